"""check_aiter_fused_qk_rmsnorm: whether AITER has the kernel is read off AITER's source, not by importing it.

What stock does. From 0.20.0 to 0.26.0 the configuration asks, for every model, whether AITER has a fused qk-rmsnorm
kernel, and asks by importing AITER in the parent process. From 0.22.0 on the compiler's pass manager asks the same
function again in the worker, and takes the fusion out where the answer is no.
What a user sees. The import makes a HIP context, so fork is lost and what was registered in the parent is unknown in
the children ("Model architectures [...] are not supported"); a JIT build or its SystemExit ends the configuration.
The edit. The function keeps its name and its cache; where it imported AITER it calls offers(...) below, with the names
that it tried: 0.20 and 0.21 know the public name alone, as their kernel call does. Answering with "AITER is enabled",
as 0.27.0 does, would break MLA models on the AITER of the 0.20 images, which has neither name.
Same answer as the import's wherever AITER can be imported. Where the source can't tell (names made at run time),
AITER is imported as in stock, and a warning says so; where AITER is loaded already, the module is asked.
An AITER that can't be imported: to an ImportError stock answers no, and it passes on the rest, which ends the
configuration. The source still says yes, so the kernel call, which imports AITER in the worker, would fail later than
stock. All else that VLLM_ROCM_USE_AITER=1 turns on imports AITER in the worker before that, and fails the same.
A source with a syntax error, which ends stock's configuration too, is a no.

Origin: vLLM #47992, merged for 0.27.0, in another way.
Since 0.20.0, until 0.27.0. Delete this file when 0.26.0 is no longer supported (spec_of and touches go to mhc.py).
"""

from __future__ import annotations

import ast
import logging
import sys
import textwrap
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, resolve_name
from pkgutil import get_importer

from vllm_rocm_fixes.patch import Patch, Verdict, clear, needed, unknown
from vllm_rocm_fixes.syntax import (
    Block,
    Function,
    class_,
    definitions,
    everything,
    find,
    first_statement,
    for_type_checkers,
    function,
    imports,
    imports_by_name,
    names,
    parse_statements,
    statements,
    string,
)

_LOG = logging.getLogger("vllm.rocm_fixes.aiter_ops")
_PROBE = "check_aiter_fused_qk_rmsnorm"
_KERNELS = {"fused_qk_rmsnorm", "_fused_qk_rmsnorm"}
_AT_RUN_TIME = {"__getattr__", "globals", "vars", "locals", "setattr", "exec", "eval"}


def offers(module: str, *wanted: str) -> bool:
    """Whether a module of AITER has one of these names, without importing it where its source can tell.

    The answer of `from module import name`, tried for each name: an ImportError is a no. Raises what that import
    raises where it must be tried: AITER is loaded already, or its source can't tell.
    """
    if module.partition(".")[0] not in sys.modules:
        answers = [_has(module, name, ()) for name in wanted]
        if True in answers or None not in answers:
            _LOG.debug("By its source, %s has %s of %s", module, "one" if True in answers else "none", wanted)
            return True in answers
        _LOG.warning("The source of %s doesn't tell whether it has one of %s: it is imported", module, wanted)
    try:
        loaded = import_module(module)
        return any(hasattr(loaded, name) for name in wanted)
    except (ImportError, AttributeError):
        return False


def _has(module: str, name: str, asked: tuple[str, ...]) -> bool | None:
    """Whether a module would have a name, by its source; None: that can't tell. asked: who led here, by imports."""
    try:
        spec = spec_of(module)
        if spec is None or spec.origin is None:  # not there, or a folder without __init__.py
            return False
        source = getattr(spec.loader, "get_source", lambda _: None)(module)
        if source is None or module in asked:
            return None
        tree = ast.parse(source)
        inside = spec.submodule_search_locations is not None
        found = _after(tree.body, name, False, module if inside else module.rpartition(".")[0], (*asked, module))
        hidden = _AT_RUN_TIME & names(tree) or definitions(tree, "__getattr__")
        if found is False and (hidden or (inside and spec_of(f"{module}.{name}"))):
            return None
        return found
    except SyntaxError:
        return False  # stock raises it, and the configuration ends
    except Exception:
        return None


def spec_of(module: str) -> ModuleSpec | None:
    """Where a module lies, without importing the packages that hold it (aiter.ops has no __init__.py)."""
    parent = module.rpartition(".")[0]
    if not parent:
        return find_spec(module)
    above, portions = spec_of(parent), []
    for place in (above and above.submodule_search_locations) or ():
        finder = get_importer(place)
        spec = finder.find_spec(module) if finder else None
        if spec and spec.loader:
            return spec
        portions += (spec and spec.submodule_search_locations) or []
    found = ModuleSpec(module, None, is_package=True)
    found.submodule_search_locations = portions
    return found if portions else None


def _after(block: Block, name: str, found: bool | None, package: str, asked: tuple[str, ...]) -> bool | None:
    """Whether a name is bound after a block has run, where found says whether it was before; None: can't tell."""
    for statement in block:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found = True if statement.name == name else found
        elif not touches(statement, name):
            continue
        elif isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Delete):
            found = not isinstance(statement, ast.Delete)
        elif isinstance(statement, ast.ImportFrom):
            found = _imported(statement, name, found, package, asked)
        elif isinstance(statement, ast.If):
            never, always = (ast.unparse(statement.test) == text for text in ("False", "True"))
            never = never or for_type_checkers(statement)
            ways = [statement.body] * (not never) + [statement.orelse] * (not always)
            found = _same({_after(way, name, found, package, asked) for way in ways})
        elif isinstance(statement, ast.Try):
            passed = _after(statement.body + statement.orelse, name, found, package, asked)
            ways = [handler.body for handler in statement.handlers]
            ends = {_after(way, name, start, package, asked) for way in ways for start in (found, passed)}
            found = _after(statement.finalbody, name, _same({passed, *ends}), package, asked)
        else:
            found = None
    return found


def _imported(
    statement: ast.ImportFrom, name: str, found: bool | None, package: str, asked: tuple[str, ...]
) -> bool | None:
    """The same for an import: followed inside AITER; from elsewhere, it can't tell."""
    source = resolve_name("." * statement.level + (statement.module or ""), package)
    if source.partition(".")[0] != package.partition(".")[0]:
        return None
    origin = next((a.name for a in statement.names if (a.asname or a.name) == name), None)
    there = _has(source, origin or name, asked)
    if origin:
        return there  # a no is an ImportError, and so a no for the whole module
    return found if there is False else None  # import *: of a name that __all__ may hold back


def touches(statement: ast.stmt, name: str) -> bool:
    """A statement may bind a name of its module, or take it away."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load):
            return not (isinstance(statement, ast.AnnAssign) and statement.value is None)
        if isinstance(node, ast.alias) and (node.asname or node.name) in (name, "*"):
            return True
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
            return True
    return False


def _same(answers: set[bool | None]) -> bool | None:
    return answers.pop() if len(answers) == 1 else None


def examine(tree: ast.Module) -> Verdict:
    """Whether the probe imports AITER."""
    probe = function(tree, _PROBE)
    if probe is None:
        if class_(tree, "rocm_aiter_ops") is None or definitions(tree, _PROBE):
            return unknown(f"looked for the function {_PROBE} beside the class rocm_aiter_ops")
        elsewhere = [f.name for f in find(tree, ast.FunctionDef) if _asks(f)]
        if elsewhere:
            return unknown(f"{elsewhere[0]} asks for the kernel, and not {_PROBE}")
        return clear("nothing here asks whether AITER has the kernel")
    asked = [probe]
    functions = [s for _, s in statements(tree.body, closed=()) if isinstance(s, Function)]
    for asker in asked:  # grows: what they call, methods too
        called = names(asker) | {a.attr for a in find(asker, ast.Attribute)}
        asked += [f for f in functions if f.name in called and f not in asked]
    by_name = any(imports_by_name(call, "aiter") for f in asked for call in find(f, ast.Call))
    if not by_name and not any(imports(f, "aiter") for f in asked):
        return clear(f"{_PROBE} doesn't import AITER")
    if _shape(probe) is None:
        return unknown(f"{_PROBE} imports AITER in a way that isn't known")
    return needed(f"{_PROBE} imports AITER while the configuration is made")


def mend(tree: ast.Module) -> None:
    """Let offers() answer where the probe imported AITER; its cache stays."""
    probe = function(tree, _PROBE)
    shape = _shape(probe) if probe else None
    assert shape is not None, "examine() found it"
    guard, cache, module, wanted = shape
    arguments = ", ".join(repr(argument) for argument in (module, *wanted))
    code = f"from {__name__} import offers\n{cache} = offers({arguments})"
    guard.body = parse_statements(code, guard.body[0])


def _asks(function: ast.FunctionDef) -> bool:
    """A function tries to import the kernel or looks for its name, and lives on when it isn't there."""
    nodes = everything(function)
    if any(string(n) in _KERNELS for n in nodes) and not any(isinstance(n, ast.Raise) for n in nodes):
        by_name = any(imports_by_name(n, "aiter") for n in nodes if isinstance(n, ast.Call))
        return by_name or bool(imports(function, "aiter"))
    for attempt in (n for n in nodes if isinstance(n, ast.Try)):
        kernels = {a.name for i in imports(attempt, "aiter") for a in i.names} & _KERNELS
        if kernels and not any(isinstance(h.body[-1], ast.Raise) for h in attempt.handlers):
            return True
    return False


def _shape(probe: Function) -> tuple[ast.If, str, str, list[str]] | None:
    """The probe's `if cache is None`, its cache, and the module and names that it tries; None: another shape."""
    tried = [i for i in imports(probe, "aiter") if isinstance(i, ast.ImportFrom) and len(i.names) == 1]
    guards = [s for s in probe.body if isinstance(s, ast.If)]
    caches = [name for s in find(probe, ast.Global) for name in s.names]
    if not tried or len(tried) != len(imports(probe, "aiter")) or len(guards) != 1 or len(caches) != 1:
        return None
    cache, module, wanted = caches[0], str(tried[0].module), [i.names[0].name for i in tried]
    text = f"{cache} = False"
    for name in reversed(wanted):
        attempt = textwrap.indent(f"from {module} import {name}\n{cache} = True", "  ")
        caught = "except (ImportError, ModuleNotFoundError, AttributeError):"
        text = f"try:\n{attempt}\n{caught}\n{textwrap.indent(text, '  ')}"
    whole = f"global {cache}\nif {cache} is None:\n{textwrap.indent(text, '  ')}\nreturn {cache}"
    body = probe.body[first_statement(probe.body) :]
    known = ast.dump(ast.Module(body, [])) == ast.dump(ast.parse(whole))
    return (guards[0], cache, module, wanted) if known else None


def behaves() -> str | None:
    """What is wrong with this process's probe; None: nothing. `vllm-rocm-fixes verify` asks, in a child."""
    if "aiter" in sys.modules:
        return None  # the probe may use it then
    answer = getattr(import_module("vllm._aiter_ops"), _PROBE)()
    if "aiter" in sys.modules:
        return f"{_PROBE} imported AITER"
    return None if isinstance(answer, bool) else f"{_PROBE} answered {answer!r}"


PATCH = Patch(
    name="aiter_ops",
    module="vllm._aiter_ops",
    summary="whether AITER has the fused qk-rmsnorm kernel is read off its source, not by importing it",
    origin=("vLLM #47992",),
    since="0.20.0",
    until="0.27.0",
    examine=examine,
    mend=mend,
)
