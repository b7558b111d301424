"""fa_utils: flash-attention is imported when somebody asks for it, and a broken one counts as absent.

Stock: on ROCm `fa_utils.py` imports flash_attn at module scope (AITER's Triton kernel on gfx1250 from 0.27.0 on). It is
imported with every quantised model's configuration (0.16.0 on) and with every attention layer. Only ImportError is
caught; 0.14.x raises it again.
Seen: a flash_attn built for AITER's Triton kernels imports AITER in the parent; when that fails with RuntimeError,
KeyError or SystemExit (an unknown gfx, a failed kernel build), or a library of flash_attn doesn't load, nothing starts.
Here the first `is_flash_attn_varlen_func_available()`, or import of the function by name, tries the import. Whatever
that raises, the answer is stock's for a missing package.
Origin: kyuz0 r9700 #15, Dao-AILab/flash-attention #2580; upstream has not changed it (0.33.0).
Delete this file when upstream imports it late.
"""

from __future__ import annotations

import ast
import copy
from typing import Any

from vllm_rocm_fixes.late import asking, binding, catch_whatever, movable
from vllm_rocm_fixes.patch import Patch, Verdict, clear, needed, unknown
from vllm_rocm_fixes.syntax import (
    Block,
    definitions,
    early_imports,
    find,
    function,
    hidden_imports,
    holding,
    imports,
    insert_before,
    names,
    parse_statements,
    replace,
    statements,
)

from .layer_imports import brought

_NAME = "flash_attn_varlen_func"
_FLAG = "_ROCM_FLASH_ATTN_AVAILABLE"
_ASK = "is_flash_attn_varlen_func_available"
_PACKAGES = ("flash_attn", "aiter")
_OTHERS = ("current_platform.is_cuda()", "current_platform.is_xpu()")


def examine(tree: ast.Module) -> Verdict:
    """Whether flash_attn is imported at module scope, and in the shape that is known."""
    if function(tree, _ASK) is None:
        return unknown(f"looked for the function {_ASK}, and it isn't there once")
    early = early_imports(tree.body, *_PACKAGES)
    if not early and hidden_imports(tree, *_PACKAGES):
        return unknown("flash_attn is imported while the module runs, in a way that isn't known")
    if not early and brought(tree, (_NAME, _FLAG)):
        return unknown("another file of vLLM's is asked for flash_attn, and whether that imports it isn't known")
    if not early:
        return clear("flash_attn isn't imported at module scope")
    attempt = _attempt(tree)
    if attempt is None or not all(any(s is part for part in ast.walk(attempt)) for s in early):
        return unknown("flash_attn is imported at module scope, outside of the one `try` that is known")
    if not _on_rocm(tree, attempt):
        return unknown("flash_attn is imported at module scope, under conditions that aren't known")
    strange = _strange(tree, attempt)
    if strange:
        return unknown(f"flash_attn is imported at module scope, and {strange}")
    return needed("flash_attn is imported at module scope, and only ImportError is caught")


def mend(tree: ast.Module) -> None:
    """Move the `try` into a function that is asked for the name; the rest of its block stays."""
    attempt = _attempt(tree)
    assert attempt is not None
    stays: Block = _staying(attempt)
    attempt.body = [s for s in attempt.body if s not in stays]
    handler = attempt.handlers[0]
    kept = {ast.unparse(s) for s in stays}
    handler.body = [_late(s) for s in handler.body if ast.unparse(s) not in kept]
    catch_whatever(attempt, "flash_attn")
    outer = next(s for s in tree.body if any(part is attempt for part in ast.walk(s)))
    replace(holding(tree, attempt)[0], attempt, stays or parse_statements("pass", attempt))

    flags = _flags(tree)
    late = [_NAME, _FLAG] if flags else [_NAME]
    binder, new = binding(late, attempt)
    gate = parse_statements("if not current_platform.is_rocm():\n    return", attempt)[0]
    assert isinstance(gate, ast.If)
    for flag in flags:  # last: who finds it bound may ask for no more
        replace(tree.body, flag, [])
        gate.body.insert(0, flag)
        handler.body.append(copy.deepcopy(flag))
    binder.body += [gate, attempt]
    insert_before(tree.body, outer, new)
    for answer in _answers(tree):
        replace(holding(tree, answer)[0], answer, [*asking([_FLAG], answer), answer])


def _flags(tree: ast.Module) -> list[ast.stmt]:
    """The flag's value until the import has worked; it moves, because a late name that is bound stays as it is."""
    return [s for s in tree.body if isinstance(s, ast.Assign) and ast.unparse(s.targets[0]) == _FLAG]


def _answers(tree: ast.Module) -> list[ast.Return]:
    """Where the function that is asked answers with the flag."""
    ask = function(tree, _ASK)
    return find(ask, ast.Return, lambda r: r.value is not None and ast.unparse(r.value) == _FLAG) if ask else []


def _late(statement: ast.stmt) -> ast.stmt:
    """What a handler raises is raised by the function when it is called, as from 0.16.0 on."""
    if not isinstance(statement, ast.Raise) or statement.exc is None:
        return statement
    stub = parse_statements(f"def {_NAME}(*args, **kwargs):\n    pass", statement)[0]
    assert isinstance(stub, ast.FunctionDef)
    stub.body = [ast.copy_location(ast.Raise(statement.exc, None), statement)]
    return stub


def _staying(attempt: ast.Try) -> Block:
    """What a `try` assigns beside the import, and its handler just the same: nothing that the import gave."""
    otherwise = {ast.unparse(s) for s in attempt.handlers[0].body}
    plain = (s for s in attempt.body if isinstance(s, ast.Assign) and isinstance(s.value, ast.Constant))
    return [s for s in plain if ast.unparse(s) in otherwise and not {_NAME, _FLAG} & names(s)]


def _on_rocm(tree: ast.Module, attempt: ast.Try) -> bool:
    """Whether the `try` stands in ROCm's branch of the `if` for platforms, and under no other condition."""
    outer = next(s for s in tree.body if any(part is attempt for part in ast.walk(s)))
    while isinstance(outer, ast.If) and attempt not in outer.body:
        if ast.unparse(outer.test) not in _OTHERS or len(outer.orelse) != 1:
            return False
        outer = outer.orelse[0]
    return isinstance(outer, ast.If) and ast.unparse(outer.test) == "current_platform.is_rocm()"


def _strange(tree: ast.Module, attempt: ast.Try) -> str | None:
    """Why the `try` can't be moved: what else it binds, and who else reads what it binds."""
    if definitions(tree, "__getattr__"):
        return "the module has a __getattr__ of its own"
    kept = {ast.unparse(s) for s in _staying(attempt)}
    own = [s for s in (*attempt.body, *attempt.handlers[0].body, *attempt.finalbody) if ast.unparse(s) not in kept]
    more = set(movable(own)) - {_NAME, _FLAG}
    if more:
        return f"{', '.join(sorted(more))} with it"
    flags = _flags(tree)
    known = [attempt, *_answers(tree), *flags]
    inside = {id(n) for s in known for n in ast.walk(s)}
    uses = find(tree, ast.Name, lambda n: n.id == _FLAG or (n.id == _NAME and isinstance(n.ctx, ast.Load)))
    lines = [str(n.lineno) for n in uses if id(n) not in inside]
    if lines:
        return f"used in line {', '.join(lines)}"
    first = uses and len(flags) == 1 and flags[0].lineno < attempt.lineno
    return None if first or not uses else f"{_FLAG} isn't set once before it"


def _attempt(tree: ast.Module) -> ast.Try | None:
    found = [s for _, s in statements(tree.body) if isinstance(s, ast.Try) and imports(s, "flash_attn")]
    return found[0] if len(found) == 1 and len(found[0].handlers) == 1 and not found[0].orelse else None


def behaves() -> str | None:
    """What is wrong with importing it beside a flash-attention that doesn't load; None: nothing.

    `vllm-rocm-fixes verify` asks, in a child.
    """
    from vllm.platforms import current_platform

    from vllm_rocm_fixes.checks import CannotAsk, broken, import_again

    if not current_platform.is_rocm():
        raise CannotAsk("this isn't ROCm, and flash_attn isn't asked for")
    with broken(*_PACKAGES) as asked:
        try:
            copy: Any = import_again(PATCH.module)
        except Exception as error:
            return f"beside a flash_attn that doesn't load it can't be imported: {type(error).__name__}: {error}"
        if asked:
            return f"importing it imported {asked[0]}"
        return "a flash_attn that doesn't load counts as there" if copy.is_flash_attn_varlen_func_available() else None


PATCH = Patch(
    name="fa_utils",
    module="vllm.v1.attention.backends.fa_utils",
    summary="a broken flash-attention counts as absent, and none is imported before it is asked for",
    origin=("Dao-AILab/flash-attention #2580",),
    since="0.14.0",
    until=None,
    examine=examine,
    mend=mend,
)
