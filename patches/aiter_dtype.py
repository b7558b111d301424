"""aiter_dtype: the fp8 type that AITER names is asked for by the first kernel that needs it.

Stock: 0.14.x imports AITER at module scope of `_aiter_ops.py`, on every ROCm node that has it, switched on or not, for
one name: the type that AITER uses for fp8.
Seen: AITER's start, its kernel builds and a HIP context in every process that imports vLLM; `fork` is lost; what AITER
raises on a GPU that it doesn't know ends the start.
Origin: vLLM #32902 (0.16.0). Delete this file when 0.16.0 is the oldest supported release.
"""

from __future__ import annotations

import ast

from vllm_rocm_fixes.late import defer
from vllm_rocm_fixes.patch import Patch, Verdict, clear, needed, unknown
from vllm_rocm_fixes.syntax import class_, imports, statements

_NAME = "AITER_FP8_DTYPE"
_KNOWN = {"from aiter import dtypes", f"{_NAME} = dtypes.fp8"}


def examine(tree: ast.Module) -> Verdict:
    """Whether AITER is imported at module scope for the type of fp8, and for nothing else."""
    if class_(tree, "rocm_aiter_ops") is None:
        return unknown("looked for the class rocm_aiter_ops, and it isn't there once")
    early = [s for _, s in statements(tree.body) if isinstance(s, ast.If) and _is_type(s)]
    if early:
        return needed("AITER is imported at module scope for the type of fp8")
    return clear("AITER isn't imported at module scope for the type of fp8")


def mend(tree: ast.Module) -> None:
    """Move the import, with its condition, to the first use of the name."""
    defer(tree, lambda statement: isinstance(statement, ast.If) and _is_type(statement))


def _is_type(statement: ast.If) -> bool:
    """An `if` that imports AITER, and does that and one assignment only."""
    return bool(imports(statement, "aiter")) and {ast.unparse(s) for s in statement.body} == _KNOWN


PATCH = Patch(
    name="aiter_dtype",
    module="vllm._aiter_ops",
    summary="AITER isn't imported for the name of a type",
    origin=("vLLM #32902",),
    since="0.14.0",
    until="0.16.0",
    examine=examine,
    mend=mend,
)
