"""jit_monitor: watching TileLang's compiler does not import TileLang.

Stock: every worker of every model calls jit_monitor.activate() at the end of its warm-up, and that imports
`tilelang.jit` in order to wrap it (0.26.0 to 0.27.1).
Seen on ROCm: half a second and 86 MB in each worker; TileLang's HIP stub in front of the real runtime, so that kernels
fail with "invalid configuration argument" (vLLM #51151); PYTHONPATH changed under the worker's children.
Origin: vLLM #51159 (0.28.0), which leaves TileLang unwatched on ROCm. Here it is still watched where the warm-up has
loaded it, which is where kernels of TileLang run. Delete this file when 0.28.0 is the oldest supported release.
"""

from __future__ import annotations

import ast
import sys

from vllm_rocm_fixes.patch import Patch, Verdict, clear, needed, unknown
from vllm_rocm_fixes.syntax import (
    calls,
    find,
    function,
    holding,
    imports,
    imports_by_name,
    names,
    parse_statements,
    string,
)

_HOOK = "_setup_tilelang_jit_hook"
_NOT_ON_ROCM = ("not current_platform.is_rocm()", "current_platform.is_cuda()")


def examine(tree: ast.Module) -> Verdict:
    """Whether activate() leads to an import of TileLang."""
    activate = function(tree, "activate")
    if activate is None:
        return unknown("looked for the function activate, and it isn't there once")
    hook = function(tree, _HOOK)
    if hook is None:
        by_name = find(tree, ast.Call, lambda c: imports_by_name(c, "tilelang"))
        imported = by_name or imports(tree, "tilelang")
        return unknown(f"TileLang is imported outside of {_HOOK}") if imported else clear("TileLang isn't watched")
    if not any(_is_tilelang(c) for c in calls(hook, "importlib.import_module")):
        return unknown(f"{_HOOK} doesn't import TileLang in a way that is known")
    if calls(hook, "is_wanted"):
        return clear("TileLang is watched where it is loaded")
    asked = calls(activate, _HOOK)
    guards = find(activate, ast.If, lambda i: ast.unparse(i.test) in _NOT_ON_ROCM)
    if asked and all(any(part is call for i in guards for s in i.body for part in ast.walk(s)) for call in asked):
        return clear("TileLang isn't watched on ROCm")
    if "current_platform" in names(hook):
        return unknown(f"{_HOOK} asks for the platform, and it isn't known what for")
    return needed("activate() imports TileLang in every worker")


def mend(tree: ast.Module) -> None:
    """Return from the hook before its first import, where TileLang isn't loaded."""
    hook = function(tree, _HOOK)
    assert hook is not None
    block, first = holding(hook, next(c for c in calls(hook, "importlib.import_module") if _is_tilelang(c)))
    if block is not hook.body:  # the import stands in a `try`
        block, first = hook.body, next(s for s in hook.body if any(part is first for part in ast.walk(s)))
    code = "from vllm_rocm_fixes.patches.jit_monitor import is_wanted\nif not is_wanted():\n    return"
    index = next(i for i, s in enumerate(block) if s is first)
    block[index:index] = parse_statements(code, first)


def _is_tilelang(call: ast.Call) -> bool:
    return bool(call.args) and (string(call.args[0]) or "").split(".")[0] == "tilelang"


def is_wanted() -> bool:
    """Whether TileLang is to be wrapped: off ROCm always, on ROCm where something has imported it already."""
    from vllm.platforms import current_platform

    return not current_platform.is_rocm() or sys.modules.get("tilelang") is not None


def behaves() -> str | None:
    """What is wrong with activating the monitor; None: nothing. `vllm-rocm-fixes verify` asks, in a child."""
    from vllm.platforms import current_platform

    from vllm_rocm_fixes.checks import CannotAsk, broken

    if not current_platform.is_rocm():
        raise CannotAsk("this isn't ROCm, and TileLang is watched as in stock")
    with broken("tilelang") as asked:  # the real one stays out of this process
        sys.modules[PATCH.module].activate()
    return "activate() imports TileLang" if asked else None


PATCH = Patch(
    name="jit_monitor",
    module="vllm.utils.jit_monitor",
    summary="workers don't import TileLang in order to watch it",
    origin=("vLLM #51159", "vLLM #51151"),
    since="0.26.0",
    until="0.28.0",
    examine=examine,
    mend=mend,
)
