"""mhc: which fused kernels AITER has is read from its source, not by importing it.

Stock: `layers/mhc.py` is imported with every quantised model's configuration. From 0.30.0 on it asks, while it is being
imported, whether AITER has `mhc_fused_post_pre` and whether its kernels take a norm, and imports AITER to find out.
Seen: AITER's start, its kernel builds and a HIP context in the API server; `fork` is lost; an error that isn't one of
the four that are caught (RuntimeError on an unsupported GPU, SystemExit of a failed build) ends the start.
The probe for TileLang in the same file (0.22.0 on) is `has_tilelang()`: the patch import_utils mends it at its source.
In 0.20.0 to 0.21.0 the file holds TileLang kernels itself, and only the DeepSeek-V4 model imports it.
Origin: found in the sources; upstream has not changed it (0.33.0). Delete this file when it asks without importing.
"""

from __future__ import annotations

import ast
import re
import sys
from itertools import dropwhile

from vllm_rocm_fixes.patch import Patch, Verdict, clear, needed, unknown
from vllm_rocm_fixes.syntax import (
    Definition,
    Function,
    definitions,
    early_imports,
    everything,
    find,
    first_statement,
    function,
    hidden_imports,
    imports,
    parse_statements,
    replace,
    running,
    statements,
)

from .aiter_ops import spec_of, touches

_MODULE = "aiter.ops.mhc"
_FLAG = "HAS_AITER_MHC_"  # what names of module scope begin with that hold the answers
_GUARD = re.compile(r"if not \w+:\n    return False")
# What the probe for a norm reads that it doesn't bind itself, in 0.30.0 to 0.33.0: the names and the constants.
_NORM = {"getattr", "inspect", "signature", "parameters", "'norm_weight'", "'norm_eps'", "'_fake'", "None", "True"}


def examine(tree: ast.Module) -> Verdict:
    """Where this module imports AITER while it is imported, and whether those places are known."""
    if not find(tree, ast.ClassDef, lambda c: c.name == "MHCPreOp") and not _has_kernels(tree):
        return unknown("looked for the class MHCPreOp, and it isn't there")
    if early_imports(tree.body, "aiter"):
        return unknown("AITER is imported at module scope itself")
    probes = _probes(tree)
    inside = {id(node) for probe in probes for node in everything(probe)}
    if any(id(node) not in inside for node in hidden_imports(tree, "aiter")):
        return unknown("AITER is imported while the module runs, in a way that isn't known")
    strange = [p.name for p in probes if not _answered(p) and _kind(p) is None]
    if strange:
        return unknown(f"{', '.join(strange)} imports AITER at module scope for a question that isn't known")
    elsewhere = _elsewhere(tree, [p.name for p in probes])
    if elsewhere:
        return unknown(f"what AITER has is asked at module scope by {', '.join(elsewhere)}, in a way that isn't known")
    asking = [p.name for p in probes if not _answered(p)]
    if asking:
        return needed(f"AITER is imported at module scope by {', '.join(asking)}")
    return clear("AITER's kernels are not asked for by importing it")


def mend(tree: ast.Module) -> None:
    """Answer from AITER's source first; stock's own way stays for a source that doesn't tell."""
    for probe in _probes(tree):
        if _answered(probe):
            continue
        attempt = next(s for s in probe.body if isinstance(s, ast.Try))
        question = 'has_kernel("mhc_fused_post_pre")'
        if _kind(probe) == "norm":
            question = f"takes_norm({probe.args.args[0].arg})"
        code = f"from vllm_rocm_fixes.patches.mhc import {question.partition('(')[0]}\n"
        code += f"_from_source = {question}\nif _from_source is not None:\n    return _from_source"
        replace(probe.body, attempt, [*parse_statements(code, attempt), attempt])


def _has_kernels(tree: ast.Module) -> bool:
    return bool(imports(tree, "tilelang")) and bool(find(tree, ast.FunctionDef, lambda f: f.name.startswith("mhc_pre")))


def _probes(tree: ast.Module) -> list[Function]:
    """Functions that import AITER and are called at module scope."""
    called = {
        ast.unparse(call.func)
        for _, s in statements(tree.body)
        if not isinstance(s, ast.ClassDef | Function)
        for call in find(s, ast.Call)
    }
    return [f for f in tree.body if isinstance(f, Function) and f.name in called and imports(f, "aiter")]


def _elsewhere(tree: ast.Module, probes: list[str]) -> list[str]:
    """What the flags are asked of that is neither a probe nor a function here that has nothing to do with AITER."""
    flags = [s for s in running(tree.body) if isinstance(s, ast.Assign | ast.AnnAssign) and s.value]
    called = [
        ast.unparse(c.func)
        for s in flags
        if any(n.id.startswith(_FLAG) for n in find(s, ast.Name) if isinstance(n.ctx, ast.Store))
        for c in find(s, ast.Call)
    ]
    found = {name: function(tree, name) for name in called if name not in probes}
    return [name for name, f in found.items() if f is None or "aiter" in "".join(map(ast.unparse, _body(f)))]


def _body(probe: Function) -> list[ast.stmt]:
    """What a probe does after its docstring and its guards, `if not NAME: return False`."""
    return list(dropwhile(lambda s: _GUARD.fullmatch(ast.unparse(s)), probe.body[first_statement(probe.body) :]))


def _kind(probe: Function) -> str | None:
    """What a probe asks: for the fused kernel, or whether a kernel (named by the argument) takes a norm.

    None where it decides anything else, too: our answer comes before it, and would leave that out.
    """
    body, asked = _body(probe), imports(probe, "aiter")
    attempt = body[0] if len(body) == 2 else None
    if not isinstance(attempt, ast.Try) or attempt.orelse or attempt.finalbody or len(asked) != 1:
        return None
    count, end, first = len(probe.args.args), ast.unparse(body[1]), ast.unparse(asked[0])
    caught = {ast.unparse(s) for handler in attempt.handlers for s in handler.body}
    if first == f"from {_MODULE} import mhc_fused_post_pre" and attempt.body == asked:
        return "fused" if (count, end, caught) == (0, "return callable(mhc_fused_post_pre)", {"return False"}) else None
    plain = (count, end) == (1, "return False") and caught <= {"pass", "return False"}
    if plain and re.fullmatch(r"from aiter\.ops import mhc( as \w+)?", first) and not _decides(probe, attempt):
        return "norm"
    return None


def _decides(probe: Function, attempt: ast.Try) -> bool:
    """Whether the search for a norm reads anything, or compares in any way, that isn't known."""
    parts = [part for s in attempt.body for part in everything(s)]
    of_aiter = imports(attempt, "aiter")[0].names[0]
    own = {of_aiter.asname or of_aiter.name, probe.args.args[0].arg}
    own |= {n.id for n in parts if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    read = {n.id for n in parts if isinstance(n, ast.Name)} - own
    read |= {n.attr for n in parts if isinstance(n, ast.Attribute)}
    read |= {repr(n.value) for n in parts if isinstance(n, ast.Constant)}
    how: set[type[ast.AST]] = {type(op) for n in parts if isinstance(n, ast.Compare) for op in n.ops}
    how |= {type(n.op) for n in parts if isinstance(n, ast.BoolOp | ast.UnaryOp)}
    return read != _NORM or how != {ast.Is, ast.In, ast.And}


def _answered(probe: Function) -> bool:
    return bool(imports(probe, "vllm_rocm_fixes"))


# What the mended code calls


def has_kernel(name: str) -> bool | None:
    """Whether AITER's source defines a function of that name in aiter.ops.mhc; None where the source doesn't tell."""
    found = _defined(_source(), name)
    return None if found is None else bool(found)


def takes_norm(name: str) -> bool | None:
    """Whether that kernel, or its fake, has the parameters norm_weight and norm_eps; None where the source is silent.

    A decorated function doesn't count: AITER's decorators (aiter/jit/utils/torch_guard.py, aiter/jit/core.py) return
    a function of (*args, **kwargs), and that is all that stock's inspect.signature sees of it.
    """
    tree = _source()
    for candidate in (name, f"{name}_fake"):
        found = _defined(tree, candidate)
        if found is None:
            return None
        arguments = [f.args for f in found if not f.decorator_list]
        names = {a.arg for given in arguments for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
        if {"norm_weight", "norm_eps"} <= names:
            return True
    return False


def _is_stand_in() -> bool:
    """What is loaded as AITER has no spec: somebody made it, and find_spec would raise ValueError."""
    loaded = sys.modules.get("aiter")
    return loaded is not None and getattr(loaded, "__spec__", None) is None


def _source() -> ast.Module | None:
    """The tree of aiter.ops.mhc, empty where AITER has no such module; None where only importing it can tell."""
    if _is_stand_in():
        return None
    source: str | None = ""
    for module in ("aiter", "aiter.ops", _MODULE):
        spec = spec_of(module)
        if spec is None:
            return ast.Module([], [])
        folder = spec.origin is None  # without __init__.py
        source = "" if folder else getattr(spec.loader, "get_source", lambda _: None)(module)
        if source is None or "__path__" in source:  # compiled alone, or its modules lie elsewhere too
            return None
    return ast.parse(source or "")


def _defined(tree: ast.Module | None, name: str) -> list[Function] | None:
    """The function that a module has by that name, or none; None where its source doesn't tell."""
    if tree is None:
        return None
    last: ast.stmt | None = None
    for statement in tree.body:
        if statement.name == name if isinstance(statement, Definition) else touches(statement, name):
            last = statement
    if isinstance(last, Function):
        return [last]
    return None if last or definitions(tree, "__getattr__") else []


def behaves() -> str | None:
    """What is wrong in this process, which imported the module; None: nothing.

    `vllm-rocm-fixes verify` asks, in a child.
    """
    from vllm_rocm_fixes.checks import CannotAsk, imported

    if not imported(PATCH.module, "aiter"):
        return None
    answers = has_kernel("mhc_fused_post_pre"), takes_norm("mhc_pre"), takes_norm("mhc_fused_post_pre")
    if None in answers:
        raise CannotAsk("AITER's source doesn't tell what it has, and it is imported as in stock")
    return "importing it imported AITER"


PATCH = Patch(
    name="mhc",
    module="vllm.model_executor.layers.mhc",
    summary="which fused kernels AITER has is read from its source",
    origin=("vLLM #51162",),
    since="0.30.0",
    until=None,
    examine=examine,
    mend=mend,
)
