"""_has_module: a package is tried in a child process, not in the one that asks whether it is there.

What stock does. Up to 0.22.1 `_has_module` asks for the spec alone and says yes to a package whose native libraries
don't load; the import behind it then ends the start (nixl_ep without libcudart, #39923). From 0.23.0 on it imports the
package to find out, in whichever process asks (#44035).
What a user sees. The probe itself initialises HIP, puts TileLang's stub before the real runtime (0.23.0 to 0.27.1,
`has_tilelang` at module scope of layers/mhc.py), or ends the process where the package does: nixl_ep on a processor
without AVX (#52885). Each failure is a warning with a traceback.
The edit. `_has_module` asks answer() below first: no spec, no package; loaded already, yes; otherwise a trial in a
child process, and one line where it fails. Stock's own code answers where no child can be had, for what is part of vLLM
(vllm.third_party), and for triton_kernels, which has_triton_kernels imports into this process anyway. has_tilelang asks
for the spec alone. What looks into deep_ep for its second interface asks the same child.

Origin: vLLM #51162 (open), #44035, #39923, #52885, #51159; #54100 would go back to the spec alone.
Since 0.18.0, where nixl_ep came; until no release yet. Delete this file when `_has_module` imports nothing in its own
process and still says no to a broken package.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import logging
import sys
import tempfile
from pathlib import Path

from vllm_rocm_fixes.patch import Patch, Verdict, clear, needed, unknown
from vllm_rocm_fixes.syntax import (
    Block,
    calls,
    everything,
    find,
    first_statement,
    for_type_checkers,
    function,
    imports,
    imports_by_name,
    parse_statements,
    place,
    replace,
    statements,
    string,
)
from vllm_rocm_fixes.trial import Trial, trial

_LOG = logging.getLogger("vllm.rocm_fixes.import_utils")
_PROBE = "_has_module"
# has_triton_kernels goes on to import it, and vllm.third_party is part of vLLM: a trial would come on top.
_STOCK = ("vllm", "triton_kernels")
_ASKED = ("aiter", "tilelang", "deep_ep", "mori", "nixl_ep", "moonep")  # whose import is what this patch is about


def answer(name: str) -> bool | None:
    """Whether a module can be imported, found out without importing it here. None: stock's own way shall answer."""
    top = name.partition(".")[0]
    try:
        if top in _STOCK:
            return None if importlib.util.find_spec(name) else False
        if importlib.util.find_spec(top) is None:
            return False
    except ModuleNotFoundError:  # a dotted name's parent isn't there
        return False
    except Exception as error:
        _LOG.warning("%s counts as absent, looking for it failed: %s: %s", name, type(error).__name__, error)
        return False
    if sys.modules.get(name) is not None:
        return True
    found = _trial(name)
    if found is None and name != top and trial(top, _place(top)) is not None:
        return False  # the child has the package, and not this module of it
    if found is not None and not found.ok:
        _LOG.warning("%s is installed but counts as absent: %s", name, found.reason)
    return None if found is None else found.ok


def installed(name: str) -> bool:
    """Whether a package is there, by its spec alone; what is broken in it shows when it is used."""
    try:
        return importlib.util.find_spec(name) is not None
    except Exception:
        return False


def offers(package: str, name: str) -> bool:
    """Whether a package has an attribute, found out without importing it here."""
    if sys.modules.get(package) is not None:
        return hasattr(sys.modules[package], name)
    found = _trial(package)
    if found is None:
        return hasattr(importlib.import_module(package), name)  # as stock
    if name not in found.names and "__getattr__" in found.names:  # it makes its attributes when they are asked for
        found = trial(package, _place(package), name) or found
        return found.ok
    return name in found.names


def reason(package: str) -> str | None:
    """Why a package can't be imported, in words; None where it can, or where that could not be found out."""
    if not installed(package):
        return "it is not installed"
    found = None if sys.modules.get(package) is not None else _trial(package)
    return None if found is None or found.ok else found.reason


def _trial(name: str) -> Trial | None:
    return trial(name, _place(name.partition(".")[0]))


def _place(top: str) -> object:
    """Where a package lies: another one of that name is tried anew."""
    try:
        return getattr(importlib.util.find_spec(top), "origin", None)
    except Exception:
        return None


def examine(tree: ast.Module) -> Verdict:
    """Whether looking for a package imports it here, or believes in one that doesn't load."""
    probe = function(tree, _PROBE)
    if probe is None or not probe.args.args:
        return unknown(f"looked for {_PROBE}(module_name)")
    looks, here = calls(probe, "importlib.util.find_spec"), calls(probe, "importlib.import_module")
    if not looks or find(probe, ast.Import):
        return unknown(f"{_PROBE} finds packages in a way that isn't known")
    strange = _tries(tree)
    if strange:
        return unknown(f"{', '.join(strange)} in a way that isn't known")
    if imports(probe, "vllm_rocm_fixes"):
        left = [name for name, _, _, _ in _inspections(tree)] + (["has_tilelang"] if _tries_tilelang(tree) else [])
        if left:
            return unknown(f"{_PROBE} is mended, and {', '.join(left)} is not")
        return clear("a child process finds out whether a package can be imported")
    if here:
        return needed("looking for a package imports it in the process that asks")
    if function(tree, "has_nixl_ep") is None:
        return clear("looking for a package imports nothing, and no package is known to break the start that way")
    return needed("a package counts as there even where its native libraries don't load")


def mend(tree: ast.Module) -> None:
    """Ask answer() first; TileLang by its spec; DeepEP's second interface by the same trial."""
    probe = function(tree, _PROBE)
    assert probe is not None, "examine() found it"
    name, start = probe.args.args[0].arg, first_statement(probe.body)
    code = f"from {__name__} import answer\nknown = answer({name})\nif known is not None:\n    return known"
    probe.body[start:start] = parse_statements(code, probe.body[start])
    tilelang, asked = function(tree, "has_tilelang"), _tries_tilelang(tree)
    if tilelang is not None and asked:
        start = first_statement(tilelang.body)
        tilelang.body[start:start] = parse_statements(f"from {__name__} import installed", tilelang.body[start])
        for call in asked:
            call.func = place(ast.Name("installed", ast.Load()), call.func)
    for _, block, statement, tests in _inspections(tree):
        for call in tests:
            package = call.args[0]
            call.func = place(ast.Name("offers", ast.Load()), call.func)
            call.args[0] = ast.copy_location(ast.Constant(ast.unparse(package)), package)
        replace(block, statement, parse_statements(f"from {__name__} import offers", statement))


def _tries_tilelang(tree: ast.Module) -> list[ast.Call]:
    tilelang = function(tree, "has_tilelang")
    return calls(tilelang, _PROBE) if tilelang else []


def _tries(tree: ast.Module) -> list[str]:
    """Functions that import a package in order to answer for it, where the child isn't asked, and what they import.

    Not what _inspections finds, and not a check that returns nothing and asks has_PACKAGE() first: it uses the package.
    """
    known = [statement for _, _, statement, _ in _inspections(tree)]
    found = []
    for part in (s for s in tree.body if not for_type_checkers(s)):
        nodes = [n for n in everything(part) if isinstance(n, ast.Import | ast.ImportFrom | ast.Call)]
        for package in dict.fromkeys(name for n in nodes if n not in known for name in _brings(n)):
            if find(part, ast.Return, lambda r: r.value is not None) or not calls(part, f"has_{package}"):
                found.append(f"{getattr(part, 'name', 'the module')} imports {package}")
    return found


def _brings(node: ast.Import | ast.ImportFrom | ast.Call) -> list[str]:
    """Which packages it imports, and names; what vLLM is told to import has no name here."""
    if not isinstance(node, ast.Call):
        return [package for package in _ASKED if imports(node, package)]
    if not imports_by_name(node, *_ASKED):
        return []
    said = [f"{string(n)}." for n in everything(node)]
    return [package for package in _ASKED if any(name.startswith(f"{package}.") for name in said)]


def _inspections(tree: ast.Module) -> list[tuple[str, Block, ast.Import, list[ast.Call]]]:
    """Where a function asks for a package and imports it just to see whether it has an attribute.

    For each the function's name, the import with the block that holds it, and the calls of hasattr.
    """
    found = []
    for probe in find(tree, ast.FunctionDef, lambda f: bool(calls(f, _PROBE))):
        for block, statement in statements(probe.body):
            if isinstance(statement, ast.Import) and len(statement.names) == 1 and not statement.names[0].asname:
                package = statement.names[0].name
                used = find(probe, ast.Name, lambda n, package=package: n.id == package)  # type: ignore[misc]
                tests = [c for c in calls(probe, "hasattr") if ast.unparse(c.args[0]) == package]
                if tests and len(used) == len(tests):
                    found.append((probe.name, block, statement, tests))
    return found


def behaves() -> str | None:
    """What is wrong with looking for a package that is installed and doesn't load; None: nothing.

    `vllm-rocm-fixes verify` asks, in a child.
    """
    from vllm_rocm_fixes.checks import CannotAsk

    name = "rocm_fixes_of_this_check"
    with tempfile.TemporaryDirectory() as folder:
        code = "import sys\nsys.rocm_fixes_asked = True\nraise ImportError('its library does not load')\n"
        Path(folder, f"{name}.py").write_text(code)
        sys.path.insert(0, folder)
        try:
            importlib.invalidate_caches()
            there = sys.modules[PATCH.module]._has_module(name)
            if hasattr(sys, "rocm_fixes_asked"):
                if _trial(name) is None:
                    raise CannotAsk("no child process can be started, and stock's own way answers")
                return "looking for a package imported it in this process"
            return "a package that doesn't load counts as there" if there else None
        finally:
            sys.path.remove(folder)


PATCH = Patch(
    name="import_utils",
    module="vllm.utils.import_utils",
    summary="whether an optional package can be imported is found out in a child process",
    origin=("vLLM #51162", "vLLM #44035", "vLLM #52885"),
    since="0.18.0",
    until=None,
    examine=examine,
    mend=mend,
)
