"""kernel_warmup: the helper of a warm-up is imported when that warm-up will run.

Stock: `kernel_warmup` imports helpers for warm-ups that most engines never run. FlashInfer's PCIe IPC helper stood at
module scope in one nightly (0.28.1.dev202609011116); since then it is gated by a second reading of the variable that
the communicator has already judged. The Qwen helpers stand at module scope from 0.25.0 on: they import FLA late by
now, which a fork from before vLLM #47539 does not. `kernel_warmup()` imports MiniMax-M3's helper on every platform
(0.24.0 on), and with it that model's NVIDIA file: torchvision, flashinfer.comm, flash_attn.
Seen: an engine without torchvision dies in warm-up; a model registered in the parent is unknown in its children, and
"Cannot re-initialize CUDA in forked subprocess", because importing flashinfer.comm initialises the GPU.
Origin: vLLM #53576, #54869 (PCIe IPC), #47539 (Qwen), #49920 and its open pull request #49933 (MiniMax-M3).
Delete this file when no supported release imports MiniMax-M3's helper off CUDA.
"""

from __future__ import annotations

import ast
import sys

from vllm_rocm_fixes.late import BINDER, defer
from vllm_rocm_fixes.patch import Patch, Verdict, clear, needed, unknown
from vllm_rocm_fixes.syntax import (
    calls,
    everything,
    find,
    for_type_checkers,
    function,
    hidden_imports,
    holding,
    names,
    parse_statements,
    replace,
    running,
    string,
)

_PCIE = "warmup_flashinfer_pcie_ipc_allreduce"
_MINIMAX = "minimax_m3_msa_warmup"
_HELPERS = "vllm.model_executor.warmup"
_MODEL = "minimax_m3"  # a helper of that model by another name isn't known
_EAGER = ("flashinfer_pcie_ipc", "qwen", "flash_linear_attention", _MINIMAX)  # what a helper's name begins with


def examine(tree: ast.Module) -> Verdict:
    """What is imported at module scope, and under which condition the helpers of kernel_warmup() are."""
    run = function(tree, "kernel_warmup")
    if run is None:
        return unknown("looked for the function kernel_warmup, and it isn't there once")
    if hidden_imports(tree, _HELPERS):
        return unknown("a helper is imported while the module runs, in a way that isn't known")
    early = [ast.unparse(s) for s in running(tree.body) if _is_helper(s)]
    try:
        minimax = _minimax(tree)
    except LookupError as doubt:
        return unknown(str(doubt))
    pcie = _pcie(tree)
    renamed = find(tree, ast.alias, lambda a: a.name == _PCIE and a.asname is not None)
    hidden = renamed or any(string(argument) == _PCIE for call in calls(tree, "getattr") for argument in call.args)
    if hidden or not all(_statement(tree, use) for use in pcie):
        return unknown("PCIe IPC's warm-up isn't called by its name, in a statement of its own")
    defects = [f"module scope has `{text.splitlines()[0]}`" for text in early]
    if pcie:
        defects.append("PCIe IPC's warm-up doesn't ask the communicator whether it will run")
    if minimax:
        defects.append("MiniMax-M3's helper is imported on every platform")
    if defects:
        return needed("; ".join(defects))
    return clear("helpers are imported when their warm-up will run")


def mend(tree: ast.Module) -> None:
    """Gate the two warm-ups, then take the helpers out of module scope."""
    for use in _pcie(tree):
        alone = _statement(tree, use)
        assert alone is not None
        statement: ast.stmt = _gated(tree, alone) or alone
        block = holding(tree, statement)[0]
        code = "from vllm_rocm_fixes.patches.kernel_warmup import pcie_ipc_chosen\nif pcie_ipc_chosen():\n    pass"
        begin, gate = parse_statements(code, statement)
        assert isinstance(gate, ast.If)
        gate.body = statement.body if isinstance(statement, ast.If) else [statement]
        replace(block, statement, [begin, gate])
    minimax = _minimax(tree)
    if minimax:
        imported, called = minimax
        for late in imported:
            replace(holding(tree, late)[0], late, [])
        block = holding(tree, called)[0]
        gate = parse_statements("if current_platform.is_cuda():\n    pass", called)[0]
        assert isinstance(gate, ast.If)
        gate.body = [*imported, called]
        replace(block, called, [gate])
    if any(map(_is_helper, running(tree.body))):
        defer(tree, _is_helper)


def _is_helper(statement: ast.stmt) -> bool:
    """An import, or a `try` around one, of what warms up FlashInfer's PCIe IPC, Qwen, FLA or MiniMax-M3."""
    if isinstance(statement, ast.Try):
        return any(_is_helper(inner) for inner in statement.body)
    if not isinstance(statement, ast.Import | ast.ImportFrom):
        return False
    module = statement.module or "" if isinstance(statement, ast.ImportFrom) else ""
    words = ".".join([module, *(alias.name for alias in statement.names)]).lower().split(".")
    return any(w.startswith(_EAGER) or w == "fla" for w in words)


def _pcie(tree: ast.Module) -> list[ast.AST]:
    """Where the PCIe IPC warm-up is read without being gated by what the communicator decided."""
    found = [n for n in everything(tree) if _PCIE in (getattr(n, "attr", None), getattr(n, "id", None))]
    return [n for n in found if not _under(tree, n, "pcie_ipc_chosen()")]


def _statement(tree: ast.Module, use: ast.AST) -> ast.Expr | None:
    """The statement that is nothing but a call of this function, so that nothing misses what it returns."""
    return next(iter(find(tree, ast.Expr, lambda s: isinstance(s.value, ast.Call) and s.value.func is use)), None)


def _gated(tree: ast.Module, call: ast.Expr) -> ast.If | None:
    """Upstream's own gate around the call, from 0.30.0 on: one variable of vllm.envs, and nothing else in it.

    Below any other condition, which stays stock's, the call alone is gated.
    """
    gate = next(reversed(_around(tree, call)), None)
    if gate is None or gate.orelse or not isinstance(gate.test, ast.Attribute) or "PCIE_IPC" not in gate.test.attr:
        return None
    plain = all(s is call or isinstance(s, ast.Import | ast.ImportFrom) for s in gate.body)
    return gate if plain and ast.unparse(gate.test.value) == "envs" else None


def _around(tree: ast.Module, node: ast.AST) -> list[ast.If]:
    return find(tree, ast.If, lambda i: any(part is node for s in i.body for part in ast.walk(s)))


def _minimax(tree: ast.Module) -> tuple[list[ast.ImportFrom], ast.stmt] | None:
    """MiniMax-M3's helper where it runs on every platform: its imports in kernel_warmup(), and its call.

    None where it is gated, or isn't there. Raises LookupError where it is used in a way that isn't known.
    """
    run, late = function(tree, "kernel_warmup"), function(tree, BINDER)
    assert run is not None
    early = list(running(tree.body))
    imported = list(filter(_is_minimax, find(run, ast.ImportFrom)))
    known = [*imported, *filter(_is_minimax, [*early, *(everything(late) if late else [])])]
    known += [part for i in find(tree, ast.If, for_type_checkers) for s in i.body for part in ast.walk(s)]
    others = [s for s in (*find(tree, ast.Import), *find(tree, ast.ImportFrom)) if s not in known]
    if any(_MODEL in ast.unparse(s) and not _on_cuda(tree, s) for s in others):
        raise LookupError("a helper of MiniMax-M3 is imported in a way that isn't known")
    used = find(tree, ast.Name, lambda n: n.id == _MINIMAX)
    if all(_on_cuda(tree, n) for n in (*imported, *used)):
        return None
    everywhere = [holding(tree, n)[1] for n in (*imported, *used) if not _on_cuda(tree, n)]
    if any(s not in run.body or _chosen(tree, run, s) for s in everywhere):
        raise LookupError("whether MiniMax-M3's helper is for ROCm is decided in a way that isn't known")
    called = [s for s in (_statement(tree, n) for n in used) if s]
    platform = [s for s in find(tree, ast.ImportFrom) if any(a.name == "current_platform" for a in s.names)]
    if len(imported) > 1 or len(called) != 1 or len(used) != 1 or not any(s in platform for s in early):
        found = f"{len(imported)} and {len(called)}, and {len(used)} uses"
        raise LookupError(f"looked for one import and one plain call of {_MINIMAX}, and found {found}")
    return imported, called[0]


def _is_minimax(node: ast.AST) -> bool:
    """An import of the helper that is known, alone: what comes with it may be used elsewhere."""
    return isinstance(node, ast.ImportFrom) and [(a.name, a.asname) for a in node.names] == [(_MINIMAX, None)]


def _on_cuda(tree: ast.Module, node: ast.AST) -> bool:
    return _under(tree, node, "current_platform.is_cuda()")


def _under(tree: ast.Module, node: ast.AST, call: str) -> bool:
    """Whether it is run only where this call says yes."""
    return any(_implies(i.test, call) for i in _around(tree, node))


def _implies(test: ast.expr, call: str) -> bool:
    if isinstance(test, ast.BoolOp):
        return (all if isinstance(test.op, ast.Or) else any)(_implies(value, call) for value in test.values)
    return ast.unparse(test) == call


def _chosen(tree: ast.Module, run: ast.AST, statement: ast.stmt) -> bool:
    """Whether a condition that may end its function before a statement may be about ROCm: it says so, or asks."""
    ends = [i for i in find(run, ast.If) if i.lineno < statement.lineno and find(i, ast.Return)]
    read = {name for condition in ends for name in names(condition.test)}
    assigned = find(tree, ast.Assign, lambda a: any(read & names(target) for target in a.targets))
    nodes = [n for part in (*(i.test for i in ends), *(a.value for a in assigned)) for n in everything(part)]
    words = " ".join(str(getattr(n, "attr", getattr(n, "id", string(n)))) for n in nodes).lower()
    return "rocm" in words or any(isinstance(n, ast.Call) and ast.unparse(n) not in _NOT_ROCM for n in nodes)


_NOT_ROCM = [f"current_platform.is_{platform}()" for platform in ("cuda", "cpu", "xpu", "tpu")]


# What the mended code calls


def pcie_ipc_chosen() -> bool:
    """Whether the communicator of the tensor-parallel group has a PCIe IPC all-reduce that is not disabled.

    It read VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC and judged platform, world size and node when it was made
    (vllm/distributed/device_communicators/cuda_communicator.py); False where there is no such group.
    """
    from vllm.distributed.parallel_state import get_tp_group

    try:
        communicator = get_tp_group().device_communicator
    except AssertionError:  # stock's answer for a group that isn't there
        return False
    chosen = getattr(communicator, "fi_pcie_ipc_ar_comm", None)
    return chosen is not None and not chosen.disabled


def behaves() -> str | None:
    """What is wrong in this process, where no warm-up ran; None: nothing. `vllm-rocm-fixes verify` asks."""
    helpers = ("qwen_triton_warmup", "minimax_m3_msa_warmup")
    found = [name for name in helpers if f"vllm.model_executor.warmup.{name}" in sys.modules]
    return f"{', '.join(found)} was imported, and no warm-up ran" if found else None


PATCH = Patch(
    name="kernel_warmup",
    module="vllm.model_executor.warmup.kernel_warmup",
    summary="a warm-up's helper is imported when that warm-up will run",
    origin=("vLLM #54869", "vLLM #47539", "vLLM #49920"),
    since="0.24.0",
    until=None,
    examine=examine,
    mend=mend,
)
