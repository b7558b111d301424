"""flashinfer_comm: FlashInfer's communication isn't imported on ROCm, where vLLM never uses it.

Stock imports FlashInfer at module scope of five files that a ROCm worker imports for something else:
- two all-reduces, which every communicator imports when it is made (0.17.0 on; the second one 0.30.0 on);
- `allreduce_rms_fusion.py`, which holds AITER's fusion too (0.21.0 on), and which MiniMax-M3's AMD model imports;
- MLA's common part, which who drafts tokens imports with any model (0.14.x);
- `all2all.py`, which holds the all-gather that expert parallelism uses unless told otherwise (0.14.0 to 0.32.0).
Most catch ImportError alone. What the first four import it for is refused off CUDA later on.
Seen, where FlashInfer is installed: seconds and an early HIP context in each worker; a worker that ends because one of
FlashInfer's CUDA libraries doesn't load.
Here the first four are told on ROCm what stock tells them where FlashInfer is missing, and the last one imports it when
FlashInfer's all-to-all is chosen.
Origin: found in the sources; upstream took it out of `all2all.py` in 0.33.0. vLLM #53576 brought the second all-reduce.
Delete this file when none of them imports FlashInfer at module scope on ROCm.
"""

from __future__ import annotations

import ast
import copy
import sys
from functools import partial

from vllm_rocm_fixes.late import defer, movable
from vllm_rocm_fixes.patch import Patch, Verdict, clear, needed, unknown
from vllm_rocm_fixes.syntax import (
    Block,
    class_,
    early_imports,
    find,
    hidden_imports,
    imports,
    names,
    outside_functions,
    own_nodes,
    parse_expression,
    parse_statements,
    replace,
    statements,
)

_PACKAGE = "flashinfer"
_PLATFORM = "current_platform.is_rocm"
_FUSION = "RocmAiterAllReduceFusionPass"


def examine_off_rocm(owner: str, tree: ast.Module) -> Verdict:
    """Whether importing the file imports FlashInfer on ROCm; owner is the class that the file is known by."""
    if owner != _FUSION and class_(tree, owner) is None:
        return unknown(f"looked for the class {owner}, and it isn't there once")
    if owner == _FUSION and class_(tree, owner) is None:
        if class_(tree, "AllReduceFusionPass") is None:
            return unknown(f"looked for the classes {owner} and AllReduceFusionPass, and neither is there once")
        return clear("it holds nothing for ROCm, which doesn't import it")
    if hidden_imports(tree, _PACKAGE):
        return unknown("FlashInfer is imported while the module runs, in a way that isn't known")
    around = [s for s in tree.body if early_imports([s], _PACKAGE)]
    if any(_asks_inside(c) for s in outside_functions(tree.body) for c in own_nodes(s)):
        return unknown("vLLM is asked for a part of FlashInfer while the module runs, which imports that")
    if not around:
        return clear("FlashInfer isn't imported at module scope")
    if all(isinstance(s, ast.If) and _is_gated(s) for s in around):
        return clear("FlashInfer isn't imported on ROCm")
    if len(around) != 1 or not _is_known(around[0]):
        return unknown("FlashInfer is imported at module scope, outside of the one `try` or `if` that is known")
    head = (s for s in tree.body[: tree.body.index(around[0])] if isinstance(s, ast.ImportFrom))
    if not any(alias.name == "current_platform" and not alias.asname for s in head for alias in s.names):
        return unknown("FlashInfer is imported at module scope, and the platform isn't known there")
    return needed("importing the file imports an installed FlashInfer, on ROCm too")


def mend_off_rocm(tree: ast.Module) -> None:
    """On ROCm do what stock does for a missing FlashInfer."""
    statement = next(s for s in tree.body if early_imports([s], _PACKAGE))
    if isinstance(statement, ast.If):
        test = f"not {_PLATFORM}() and {ast.unparse(statement.test)}"
        statement.test = parse_expression(test, statement.test)
        return
    assert isinstance(statement, ast.Try)
    gate = parse_statements(f"if {_PLATFORM}():\n    pass\nelse:\n    pass", statement)[0]
    assert isinstance(gate, ast.If)
    gate.body, gate.orelse = copy.deepcopy(statement.handlers[0].body), [statement]
    replace(tree.body, statement, [gate])


def _asks_inside(node: ast.AST) -> bool:
    """A call such as has_flashinfer_comm(), which looks for a module inside of FlashInfer."""
    return isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2].startswith(f"has_{_PACKAGE}_")


def _is_gated(statement: ast.If) -> bool:
    """An `if` whose imports of FlashInfer don't run on ROCm."""
    conditions = statement.test.values if isinstance(statement.test, ast.BoolOp) else [statement.test]
    together = not isinstance(statement.test, ast.BoolOp) or isinstance(statement.test.op, ast.And)
    off = together and not {f"not {_PLATFORM}()", "current_platform.is_cuda()"}.isdisjoint(map(ast.unparse, conditions))
    on = ast.unparse(statement.test) == f"{_PLATFORM}()"
    here, otherwise = (bool(early_imports(block, _PACKAGE)) for block in (statement.body, statement.orelse))
    return (off or not here) and (on or not otherwise)


def _is_known(statement: ast.stmt) -> bool:
    """`if find_spec("flashinfer"):` without an else, or a `try` whose one handler can do without an error."""
    if isinstance(statement, ast.If):
        known = ast.unparse(statement.test) == f"find_spec({_PACKAGE!r})" and not statement.orelse
        return known and _is_of_flashinfer(statement.body, set())
    if not isinstance(statement, ast.Try) or len(statement.handlers) != 1:
        return False
    handler = statement.handlers[0]
    known = not (handler.name or statement.orelse or statement.finalbody or find(handler, ast.Raise))
    return known and _is_of_flashinfer(statement.body, set(movable(handler.body)))


def _is_of_flashinfer(block: Block, otherwise: set[str]) -> bool:
    """Whether a block imports FlashInfer alone, and binds what comes of that, or what is bound otherwise too."""
    every = [s for _, s in statements(block)]
    plain = (s for s in every if isinstance(s, ast.ImportFrom) or (isinstance(s, ast.Import) and len(s.names) == 1))
    own = [s for s in plain if imports(s, _PACKAGE)]
    brought = set(movable([*own]))

    def known(statement: ast.stmt) -> bool:
        if isinstance(statement, ast.Assign):
            return bool(brought & names(statement.value)) or set(movable([statement])) <= otherwise
        logs = ast.unparse(statement).startswith("logger.")
        return logs or statement in own or isinstance(statement, ast.If | ast.Try | ast.Pass)

    return all(map(known, every))


def examine_all2all(tree: ast.Module) -> Verdict:
    """Whether the file of all back ends imports FlashInfer for one of them."""
    if class_(tree, "AgRsAll2AllManager") is None:
        return unknown("looked for the class AgRsAll2AllManager, and it isn't there once")
    if hidden_imports(tree, _PACKAGE):
        return unknown("FlashInfer is imported while the module runs, in a way that isn't known")
    early = early_imports(tree.body, _PACKAGE)
    if not early:
        return clear("FlashInfer isn't imported at module scope")
    inside = [part for s in _asks(tree) for part in ast.walk(s)]
    if not all(any(part is s for part in inside) for s in early):
        return unknown("FlashInfer is imported at module scope, outside of an `if has_flashinfer...()`")
    return needed("importing the file imports an installed FlashInfer")


def mend_all2all(tree: ast.Module) -> None:
    """Move the imports to where one of their names is used."""
    asks = _asks(tree)
    defer(tree, lambda statement: any(statement is s for s in asks))


def _asks(tree: ast.Module) -> list[ast.If]:
    found = (s for s in tree.body if isinstance(s, ast.If) and not s.orelse)
    return [s for s in found if ast.unparse(s.test).startswith(f"has_{_PACKAGE}") and imports(s, _PACKAGE)]


def _off_rocm(name: str, module: str, owner: str, summary: str, releases: tuple[str, str | None]) -> Patch:
    examine = partial(examine_off_rocm, owner)
    return Patch(name, module, summary, ("vLLM #53576",), *releases, examine, mend_off_rocm)


def behaves(patch: Patch) -> str | None:
    """What is wrong in this process, which chose no all-to-all; None: nothing.

    `vllm-rocm-fixes verify` asks, in a child.
    """
    from vllm.platforms import current_platform

    from vllm_rocm_fixes.checks import CannotAsk, imported

    if patch is ALL2ALL:  # the question before the import, in another file, brings FlashInfer too
        return "importing it imported FlashInfer" if "Mapping" in vars(sys.modules[patch.module]) else None
    if not current_platform.is_rocm():
        raise CannotAsk("this isn't ROCm, and FlashInfer is imported as in stock")
    found = imported(patch.module, _PACKAGE)
    return f"importing it imported {', '.join(found)}" if found else None


_COMMUNICATORS = "vllm.distributed.device_communicators"
ALL_REDUCE = _off_rocm(
    "flashinfer_all_reduce",
    f"{_COMMUNICATORS}.flashinfer_all_reduce",
    "FlashInferAllReduce",
    "FlashInfer's all-reduce, which is for CUDA alone, isn't imported on ROCm",
    ("0.17.0", None),
)
PCIE_IPC = _off_rocm(
    "flashinfer_pcie_ipc",
    f"{_COMMUNICATORS}.flashinfer_pcie_ipc_all_reduce",
    "FlashInferPcieIpcAllReduce",
    "FlashInfer's all-reduce over PCIe, which is for CUDA alone, isn't imported on ROCm",
    ("0.30.0", None),
)
FUSION = _off_rocm(
    "allreduce_fusion",
    "vllm.compilation.passes.fusion.allreduce_rms_fusion",
    _FUSION,
    "AITER's fusion of an all-reduce comes without FlashInfer's, which is for CUDA alone",
    ("0.21.0", None),
)
MLA = _off_rocm(
    "mla_flashinfer",
    "vllm.v1.attention.backends.mla.common",
    "MLACommonImpl",
    "FlashInfer's prefill, which is for CUDA alone, isn't imported on ROCm",
    ("0.14.0", "0.16.0"),
)
ALL2ALL = Patch(
    name="all2all_flashinfer",
    module=f"{_COMMUNICATORS}.all2all",
    summary="FlashInfer is imported when its all-to-all is chosen",
    origin=("vLLM #53576",),
    since="0.14.0",
    until="0.33.0",
    examine=examine_all2all,
    mend=mend_all2all,
)
PATCHES = (ALL_REDUCE, PCIE_IPC, FUSION, MLA, ALL2ALL)
