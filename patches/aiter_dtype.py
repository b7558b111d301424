"""aiter_dtype: the fp8 type of AITER's kernels is the platform's, and AITER isn't imported to ask for it.

Stock: 0.14.x imports AITER at module scope of `_aiter_ops.py`, on every ROCm node that has it, switched on or not, for
one name: the type that AITER uses for fp8.
Seen: AITER's start, its kernel builds and a HIP context in every process that imports vLLM; `fork` is lost; what AITER
raises on a GPU that it doesn't know ends the start.
The edit: the name gets the platform's fp8 type, which stands in `_FP8_DTYPE` a few lines above; 0.16.0 does the same.
The import must not move into the kernels: stock's comment says that AITER answers wrongly there on gfx942.
Origin: vLLM #32902 (0.16.0). Delete this file when 0.16.0 is the oldest supported release.
"""

from __future__ import annotations

import ast
import sys

from vllm_rocm_fixes.patch import Patch, Verdict, clear, needed, unknown
from vllm_rocm_fixes.syntax import class_, early_imports, find, hidden_imports, imports, place, statements

_NAME, _TYPE = "AITER_FP8_DTYPE", "_FP8_DTYPE"
_KNOWN = ["from aiter import dtypes", f"{_NAME} = dtypes.fp8"]
_PLATFORMS = f"{_TYPE} = current_platform.fp8_dtype()"


def examine(tree: ast.Module) -> Verdict:
    """Whether AITER is imported at module scope for the type of fp8, and for nothing else."""
    if class_(tree, "rocm_aiter_ops") is None:
        return unknown("looked for the class rocm_aiter_ops, and it isn't there once")
    early = _early(tree)
    types = [s.lineno for s in tree.body if isinstance(s, ast.Assign) and ast.unparse(s) == _PLATFORMS]
    if early and (not types or types[0] > early[0].lineno):
        return unknown(f"AITER is imported for the type of fp8, and `{_PLATFORMS}` doesn't stand before that")
    if early and len(find(tree, ast.Name, lambda n: n.id == "dtypes")) > len(early):
        return unknown("AITER is imported for the type of fp8, and for more of its dtypes")
    plain = early_imports(tree.body, "aiter")
    if early and len(plain) == len(early):
        return needed("AITER is imported at module scope for the type of fp8")
    if plain or hidden_imports(tree, "aiter"):
        return unknown("AITER is imported while the module runs, in a way that isn't known")
    return clear("AITER isn't imported at module scope for the type of fp8")


def mend(tree: ast.Module) -> None:
    """Take the platform's type, under the condition that stock has."""
    for statement in _early(tree):
        assignment = statement.body[-1]
        assert isinstance(assignment, ast.Assign), "examine() found it"
        assignment.value = place(ast.Name(_TYPE, ast.Load()), assignment.value)
        statement.body = [assignment]


def _early(tree: ast.Module) -> list[ast.If]:
    """Each `if` at module scope that imports AITER, and does that and one assignment only."""
    return [
        s
        for _, s in statements(tree.body)
        if isinstance(s, ast.If) and imports(s, "aiter") and [ast.unparse(x) for x in s.body] == _KNOWN
    ]


def behaves() -> str | None:
    """What is wrong with this process's type of fp8; None: nothing. `vllm-rocm-fixes verify` asks, in a child."""
    from vllm.platforms import current_platform

    from vllm_rocm_fixes.checks import imported

    if imported(PATCH.module, "aiter"):
        return "importing it imported AITER"
    known = vars(sys.modules[PATCH.module])
    right = _NAME not in known or known[_NAME] == current_platform.fp8_dtype()
    return None if right else f"{_NAME} isn't the platform's fp8 type"


PATCH = Patch(
    name="aiter_dtype",
    module="vllm._aiter_ops",
    summary="the fp8 type of AITER's kernels is the platform's, and AITER isn't imported to ask for it",
    origin=("vLLM #32902",),
    since="0.14.0",
    until="0.16.0",
    examine=examine,
    mend=mend,
)
