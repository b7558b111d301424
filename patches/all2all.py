"""The managers of expert-parallel back ends say why their package can't be used.

What stock does. The manager is the first that asks for the package of a chosen back end. It asserts that the package is
there, and says where to get it; NIXL's imports its own in the middle of its work.
What a user sees. "DeepEP kernels not found" for a DeepEP that is installed and whose library doesn't load, or a bare
ImportError that names neither package nor back end, or an interpreter that ends.
The edit. check() below comes before each of these places. It tries the package in a child process, once, and raises
ImportError with package, back end and the real error; where the package is fine, stock goes on.

Origin: this project; the message belongs to the late imports of vLLM #50879. Since 0.14.0; until no release yet.
Delete this file with all2all_utils.py.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator

from vllm_rocm_fixes.patch import Patch, Verdict, clear, needed, unknown
from vllm_rocm_fixes.syntax import Block, Function, find, insert_before, names, parse_statements, statements

from .import_utils import reason

_PACKAGES = {  # what a manager asks for the package with
    "has_pplx": "pplx_kernels",
    "has_deep_ep": "deep_ep",
    "has_deep_ep_v2": "deep_ep",
    "has_mori": "mori",
    "check_moonep_system_support": "moonep",
}
_BACKENDS = {
    "PPLX": "pplx",
    "DeepEPHT": "deepep_high_throughput",
    "DeepEPLL": "deepep_low_latency",
    "DeepEPV2": "deepep_v2",
    "NixlEP": "nixl_ep",
    "Mori": "mori",
    "MoonEP": "moonep",
}


def check(manager: object, package: str) -> None:
    """Raise ImportError where the package of a manager's back end can't be imported; it isn't imported here."""
    why = reason(package)
    if why is not None:
        kind = type(manager).__name__
        backend = next((b for start, b in _BACKENDS.items() if kind.startswith(start)), kind)
        message = f"the all2all back end {backend} was chosen, and its package {package} can't be used: {why}"
        raise ImportError(message, name=package)


def examine(tree: ast.Module) -> Verdict:
    """Whether a manager asks for its package without saying what is wrong with it."""
    places = list(_places(tree))
    if not places:
        return unknown("looked for managers that assert has_deep_ep() and the like, and found none")
    bare = [package for block, statement, package in places if not _checked(block, statement)]
    if bare:
        return needed(f"what is wrong with {', '.join(dict.fromkeys(bare))} isn't said")
    return clear("managers say what is wrong with the package of their back end")


def mend(tree: ast.Module) -> None:
    """Put check() before each of these places."""
    for block, statement, package in _places(tree):
        code = f"from {__name__} import check\ncheck(self, {package!r})"
        insert_before(block, statement, parse_statements(code, statement))


def _places(tree: ast.Module) -> Iterator[tuple[Block, ast.stmt, str]]:
    """Where a manager's method first asks for a package: the statement, its block, the package."""
    for manager in find(tree, ast.ClassDef, lambda c: "All2AllManager" in c.name):
        for method in manager.body:
            if isinstance(method, Function) and method.args.args and method.args.args[0].arg == "self":
                for block, statement in statements(method.body):
                    package = _asked(statement)
                    if package:
                        yield block, statement, package


def _asked(statement: ast.stmt) -> str | None:
    if isinstance(statement, ast.ImportFrom) and statement.module == "nixl_ep":
        return "nixl_ep"
    if isinstance(statement, ast.If) and isinstance(statement.body[-1], ast.Raise):
        return next((p for name, p in _PACKAGES.items() if ast.unparse(statement.test) == f"not {name}()"), None)
    asks = isinstance(statement, ast.Assert) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
    )
    return next((_PACKAGES[n] for n in sorted(names(statement)) if n in _PACKAGES), None) if asks else None


def _checked(block: Block, statement: ast.stmt) -> bool:
    before = block[block.index(statement) - 1] if block.index(statement) else None
    return before is not None and ast.unparse(before).startswith("check(self, ")


def behaves() -> str | None:
    """What is wrong with what a manager says whose package is missing; None: nothing.

    `vllm-rocm-fixes verify` asks, in a child.
    """
    manager = getattr(sys.modules[PATCH.module], "DeepEPHTAll2AllManager", None)
    if manager is None:
        from vllm_rocm_fixes.checks import CannotAsk

        raise CannotAsk("this vLLM has no manager of DeepEP")
    there = sys.modules.get("deep_ep")
    sys.modules["deep_ep"] = None  # type: ignore[assignment]  # as if it weren't installed
    try:
        manager(None)
    except ImportError as error:
        return None if error.name == "deep_ep" else f"the manager of DeepEP says nothing of its package: {error}"
    except Exception as error:
        return f"the manager of DeepEP doesn't say that its package is missing: {type(error).__name__}: {error}"
    finally:
        del sys.modules["deep_ep"]
        if there is not None:
            sys.modules["deep_ep"] = there
    return "the manager of DeepEP doesn't ask for its package"


PATCH = Patch(
    name="all2all",
    module="vllm.distributed.device_communicators.all2all",
    summary="an expert-parallel back end says which package is missing or broken, and why",
    origin=("vLLM #50879", "vLLM #39923"),
    since="0.14.0",
    until=None,
    examine=examine,
    mend=mend,
)
