"""all2all_utils: the packages of expert-parallel back ends are imported when a back end is chosen.

What stock does. The module imports DeepEP, DeepEP v2, Mori, NIXL, MoonEP (and PPLX, up to 0.16.0) wherever they are
installed. From 0.16.0 on it is imported to look up a quantisation method, in all releases by a mixture of experts.
What a user sees. Seconds in every process; HIP initialised and `fork` lost where a package does that; a start that
fails because of a package that isn't used (nixl_ep without libcudart, #39923, 0.18.0 to 0.22.1).
The edit. The imports move, with the conditions they stood under, into a function (vllm_rocm_fixes/late.py); the
functions that use a back end's class call load() below first, and `from all2all_utils import MoriPrepareAndFinalize`
finds it as before. In a module that is loaded already the imports have happened, and only the functions follow.

This is what #50879 did, and what had to be taken back (#51176): where TileLang is imported at module scope on ROCm
(0.20.0 to 0.27.1), Mori's early import had put the real HIP runtime before TileLang's stub (#51151). So the patch
stands behind the guard `hip`, which does that without Mori, and is refused where the guard is skipped.

Origin: vLLM #50879, reverted by #51176; #51151, #51162, #39923.
Since 0.14.0; until no release yet (one nightly, 0.26.1.dev202608050841, had #50879). Delete this file when the module
imports no back end at module scope in the oldest supported release.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

from vllm_rocm_fixes.late import defer, movable, need
from vllm_rocm_fixes.patch import Patch, Site, Verdict, clear, needed, unknown
from vllm_rocm_fixes.syntax import Definition, blocks, definitions, find, hidden_imports, imports, names, running_blocks

from .import_utils import reason

# What a back end's class begins with, the name to choose it by, and the package behind it.
_BACKENDS = (
    ("Pplx", "pplx", "pplx_kernels"),
    ("DeepEPHT", "deepep_high_throughput", "deep_ep"),
    ("DeepEPLL", "deepep_low_latency", "deep_ep"),
    ("DeepEPV2", "deepep_v2", "deep_ep"),
    ("DEEPEP", "deepep_low_latency", "deep_ep"),
    ("Mori", "mori", "mori"),
    ("Nixl", "nixl_ep", "nixl_ep"),
    ("MoonEP", "moonep", "moonep"),
)
_USER = "maybe_make_prepare_finalize"
_FILES = "vllm.model_executor.layers.fused_moe.prepare_finalize"  # each imports the package of its back end


def load(namespace: dict[str, Any], *wanted: str) -> None:
    """Bind the names of a chosen back end in all2all_utils. Raises ImportError that says package, back end and why."""
    for name in wanted:
        try:
            need(namespace, name)
        except Exception as error:
            backend, package = next(
                (b[1:] for b in _BACKENDS if name.upper().startswith(b[0].upper())), (name, "of this back end")
            )
            why = None if package == "of this back end" else reason(package)
            if why is None:
                why = str(error) if isinstance(error, NameError) else f"{type(error).__name__}: {error}"
            message = f"the all2all back end {backend} was chosen, and its package {package} can't be used: {why}"
            raise ImportError(message, name=package) from error


def examine(tree: ast.Module) -> Verdict:
    """Whether importing the module imports the package of a back end."""
    if not definitions(tree, _USER):
        return unknown(f"looked for {_USER}()")
    early = _early(tree)
    files = (f"{_FILES}.{file}" for file in ("deepep_ht", "deepep_ll", "deepep_v2", "mori", "nixl_ep", "moonep"))
    hidden = hidden_imports(tree, *(package for _, _, package in _BACKENDS), *files)
    known = {id(part) for statement in early for part in ast.walk(statement)}
    if any(id(node) not in known for node in hidden):
        return unknown("the package of a back end is imported while the module runs, in a way that isn't known")
    if early:
        modules = ", ".join(dict.fromkeys(name.rpartition(".")[2] for s in early for name in _modules(s)))
        return needed(f"importing the module imports what is installed of {modules}")
    return clear("back ends are imported in the functions that use them")


def mend(tree: ast.Module) -> None:
    """Move the imports of back ends to where one is chosen."""
    early = _early(tree)
    defer(tree, lambda statement: any(statement is s for s in early), (__name__, load.__name__))


def _early(tree: ast.Module) -> list[ast.stmt]:
    """Imports at module scope that ask for an optional package first, or bring one, or a class that needs one.

    Where such an import stands in a `try` or a `with`, or beside what else its name may be, that.
    """
    found: list[ast.stmt] = []

    def look(block: list[ast.stmt], optional: bool) -> None:
        for statement in block:
            if isinstance(statement, Definition):
                continue
            if isinstance(statement, ast.Import | ast.ImportFrom):
                own = any(a.name.startswith(tuple(b[0] for b in _BACKENDS)) for a in statement.names)
                if optional or own or any(imports(statement, b[2]) for b in _BACKENDS):
                    found.append(statement)
            asks = isinstance(statement, ast.If) and any(n.startswith("has_") for n in names(statement.test))
            before = len(found)
            for inner in running_blocks(statement):
                look(inner, optional or asks)
            # With what it does where the import fails, or the package isn't there.
            if len(found) > before and (isinstance(statement, ast.Try | ast.With) or _either(statement)):
                found[before:] = [statement]

    look(tree.body, False)
    return found


def _either(statement: ast.stmt) -> bool:
    """Whether both branches of an `if` for one package bind the same name."""
    if not isinstance(statement, ast.If) or any(isinstance(s, ast.If) for s in statement.body):
        return False
    return bool({*movable(statement.body)} & {*movable(statement.orelse)})


def _modules(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.ImportFrom):
        return [statement.module or ""]
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    return [name for block in blocks(statement) for inner in block for name in _modules(inner)]


def refuse(site: Site) -> str | None:
    """Why the imports must stay early: nothing but they put the real HIP runtime before TileLang's stub."""
    if "hip" not in site.skipped:
        return None
    if site.root is None:
        return "the guard hip is skipped, and whether this vLLM imports TileLang first can't be read: it has no folder"
    importer = _tilelang_importer(site.root)
    if importer is None:
        return None
    return f"the guard hip is skipped, and {importer} imports TileLang on ROCm, which must not come before HIP (#51151)"


def _tilelang_importer(root: Path) -> str | None:
    """A module of this vLLM that imports TileLang at module scope on ROCm; None where there is none."""
    for file in sorted((root / "vllm").rglob("*.py")):
        source = file.read_bytes()
        if b"tilelang" in source and _imports_on_rocm(ast.parse(source).body):
            return file.relative_to(root).as_posix()
    return None


def _imports_on_rocm(block: list[ast.stmt]) -> bool:
    for statement in block:
        if isinstance(statement, ast.Import | ast.ImportFrom) and imports(statement, "tilelang"):
            return True
        if isinstance(statement, Definition):
            continue
        for inner in running_blocks(statement):
            elsewhere = isinstance(statement, ast.If) and inner is statement.body and _not_rocm(statement.test)
            if not elsewhere and _imports_on_rocm(inner):
                return True
    return False


def _not_rocm(test: ast.expr) -> bool:
    """A condition that doesn't hold on ROCm: for the type checker alone, or another platform."""
    if isinstance(test, ast.BoolOp):
        return (all if isinstance(test.op, ast.Or) else any)(_not_rocm(value) for value in test.values)
    if isinstance(test, ast.UnaryOp):
        return False
    asked = {n.attr for n in find(test, ast.Attribute)} | names(test)
    return not asked & {"is_cuda_alike", "is_rocm"} and bool(asked & {"TYPE_CHECKING", "is_cuda", "is_xpu", "is_tpu"})


def behaves() -> str | None:
    """What is wrong in this process, which chose no back end; None: nothing. `vllm-rocm-fixes verify` asks."""
    found = [package for package in ("mori", "deep_ep", "nixl_ep", "moonep") if package in sys.modules]
    return f"{', '.join(found)} was imported, and no back end was chosen" if found else None


PATCH = Patch(
    name="all2all_utils",
    module="vllm.model_executor.layers.fused_moe.all2all_utils",
    summary="DeepEP, Mori, NIXL and MoonEP are imported when that back end is chosen",
    origin=("vLLM #50879", "vLLM #51176", "vLLM #51151"),
    since="0.14.0",
    until=None,
    examine=examine,
    mend=mend,
    refuse=refuse,
)
