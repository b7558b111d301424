"""mla_attention: flash-attention is imported by the first MLA layer that computes with it.

Stock: on ROCm `layers/attention/mla_attention.py` imports flash_attn at module scope (0.16.0 to 0.20.2). The module is
imported with every attention layer, so by every model and worker. Only ImportError is caught.
Seen: as in patch fa_utils: a flash_attn built for AITER's Triton kernels imports AITER in the parent, and when that
fails with anything but ImportError nothing starts.
Here the first MLA layer without another prefill imports it. Whatever that raises, the answer is stock's for a missing
package: MLA without AITER's back end says that it needs flash_attn.
Origin: Dao-AILab/flash-attention #2580. From 0.21.0 on the file has no such import.
Delete this file when 0.21.0 is the oldest supported release.
"""

from __future__ import annotations

import ast
import sys

from vllm_rocm_fixes.late import asking, binding, catch_whatever, movable
from vllm_rocm_fixes.patch import Patch, Verdict, clear, needed, unknown
from vllm_rocm_fixes.syntax import (
    Block,
    Function,
    blocks,
    class_,
    early_imports,
    find,
    hidden_imports,
    holding,
    imports,
    insert_before,
    parse_statements,
    replace,
    statements,
)

_NAME = "flash_attn_varlen_func"


def examine(tree: ast.Module) -> Verdict:
    """Whether flash_attn is imported at module scope, and in the shape that is known."""
    if class_(tree, "MLAAttention") is None:
        return unknown("looked for the class MLAAttention, and it isn't there once")
    early = early_imports(tree.body, "flash_attn")
    if not early and hidden_imports(tree, "flash_attn"):
        return unknown("flash_attn is imported while the module runs, in a way that isn't known")
    if not early:
        return clear("flash_attn isn't imported at module scope")
    outer, inner = _attempts(tree)
    if outer is None or inner is None or len(early) != 1:
        return unknown("flash_attn is imported at module scope, outside of the `try` that is known")
    if set(movable([inner])) != {_NAME}:
        return unknown(f"the `try` around flash_attn binds more than {_NAME}")
    if len(_readers(tree)) != 1 or any(isinstance(s, ast.FunctionDef) and s.name == "__getattr__" for s in tree.body):
        return unknown(f"{_NAME} is read in other places than the one that is known")
    return needed("flash_attn is imported at module scope, and only ImportError is caught")


def mend(tree: ast.Module) -> None:
    """Move the inner `try` into a function that is asked for the name; on ROCm the name has no value until then."""
    outer, inner = _attempts(tree)
    assert outer is not None and inner is not None
    block, first = _readers(tree)[0]
    insert_before(block, first, asking([_NAME], first))
    replace(holding(tree, inner)[0], inner, parse_statements(f"del {_NAME}", inner))
    inner.handlers[0].body[:0] = parse_statements(f"{_NAME} = None", inner.handlers[0])
    catch_whatever(inner, "flash_attn")
    binder, new = binding([_NAME], outer)
    binder.body.append(inner)
    insert_before(tree.body, outer, new)


def _attempts(tree: ast.Module) -> tuple[ast.Try | None, ast.Try | None]:
    """The `try` for vLLM's own flash-attention, and the one in its handler, which follows `name = None`."""
    for outer in (s for s in tree.body if isinstance(s, ast.Try) and len(s.handlers) == 1):
        handler = outer.handlers[0]
        unset = [s for s in handler.body if isinstance(s, ast.Assign) and ast.unparse(s) == f"{_NAME} = None"]
        inner = [s for _, s in statements(handler.body) if isinstance(s, ast.Try) and imports(s, "flash_attn")]
        if len(inner) == 1 and unset and len(inner[0].handlers) == 1 and not inner[0].orelse:
            return outer, inner[0]
    return None, None


def _readers(tree: ast.Module) -> list[tuple[Block, ast.stmt]]:
    """The first statement of each block of a function that reads the name, unless an outer block's was before."""
    found: list[tuple[Block, ast.stmt]] = []

    def reads(node: ast.AST) -> bool:
        return bool(find(node, ast.Name, lambda n: n.id == _NAME and isinstance(n.ctx, ast.Load)))

    def look(block: Block) -> None:
        for statement in block:
            if reads(statement):
                if not any(reads(s) for inner in blocks(statement) for s in inner) or _in_header(statement):
                    found.append((block, statement))
                    return
                for inner in blocks(statement):
                    look(inner)

    def _in_header(statement: ast.stmt) -> bool:
        return isinstance(statement, ast.If) and reads(statement.test)

    for _, statement in statements(tree.body, closed=()):
        if isinstance(statement, Function) and reads(statement):
            look(statement.body)
    return found


def behaves() -> str | None:
    """What is wrong in this process, where no MLA layer was made; None: nothing.

    `vllm-rocm-fixes verify` asks, in a child.
    """
    from vllm.platforms import current_platform

    from vllm_rocm_fixes.checks import CannotAsk

    if not current_platform.is_rocm():
        raise CannotAsk("this isn't ROCm, and flash_attn isn't asked for")
    known = vars(sys.modules[PATCH.module])
    bound = _NAME in known and not str(getattr(known[_NAME], "__module__", "")).startswith("vllm.")
    return "importing it asked for flash_attn" if bound else None


PATCH = Patch(
    name="mla_attention",
    module="vllm.model_executor.layers.attention.mla_attention",
    summary="flash-attention is imported by the first MLA layer that computes with it",
    origin=("Dao-AILab/flash-attention #2580",),
    since="0.16.0",
    until="0.21.0",
    examine=examine,
    mend=mend,
)
