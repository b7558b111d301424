"""quark: the OCP-MX scheme imports AITER when one of its kernels is needed.

Stock: `quark_ocp_mx.py` imports AITER's kernels at module scope, and every model with a `quantization_config` leads
there, Quark or not, with AITER switched on or not (0.14.0 to 0.25.1).
Seen: AITER's start and a HIP context in the parent, so `fork` is lost; on a GPU that AITER doesn't know its
RuntimeError ends the start in 0.14.x, and SystemExit or KeyError in all of them.
Here the operator is registered as before where AITER is installed, and what it calls is imported with the first scheme
that doesn't emulate, or the first weights that are quantised on the fly. An import that fails then, in any way, gives
stock's answer for a missing AITER: the warning, and "requires AITER" where the scheme can't do without.
Origin: vLLM #48015 (0.26.0), #31715. Delete this file when 0.26.0 is the oldest supported release.
"""

from __future__ import annotations

import ast
import importlib.util
import sys

from vllm_rocm_fixes.late import defer
from vllm_rocm_fixes.patch import Patch, Verdict, clear, needed, unknown
from vllm_rocm_fixes.syntax import (
    Block,
    Function,
    class_,
    early_imports,
    find,
    hidden_imports,
    imports,
    names,
    parse_expression,
    parse_statements,
    replace,
)


def examine(tree: ast.Module) -> Verdict:
    """Whether AITER is imported at module scope, and in the shape that is known."""
    if class_(tree, "QuarkOCP_MX") is None:
        return unknown("looked for the class QuarkOCP_MX, and it isn't there once")
    early = early_imports(tree.body, "aiter")
    if not early and hidden_imports(tree, "aiter"):
        return unknown("AITER is imported while the module runs, in a way that isn't known")
    if not early:
        return clear("AITER isn't imported at module scope")
    attempt = _attempt(tree)
    if attempt is None or not all(any(s is part for part in ast.walk(attempt)) for s in early):
        return unknown("AITER is imported at module scope, outside of the one `try` that is known")
    return needed("AITER is imported at module scope")


def mend(tree: ast.Module) -> None:
    """Split the `try` into what defines the operator, which stays, and the imports, which are deferred."""
    attempt = _attempt(tree)
    assert attempt is not None
    late: Block = []
    for statement in list(attempt.body):
        if imports(statement, "aiter") and not isinstance(statement, Function):
            late.append(statement)
            attempt.body.remove(statement)
    handler = attempt.handlers[0]
    code = "from vllm_rocm_fixes.patches.quark import aiter_is_installed\nif aiter_is_installed():\n    "
    code += (
        f"try:\n        pass\n    except {ast.unparse(handler.type) if handler.type else 'Exception'}:\n        pass"
    )
    begin, there = parse_statements(code, attempt)
    assert isinstance(there, ast.If) and isinstance(there.body[0], ast.Try)
    there.body[0].body = attempt.body
    handler.type = parse_expression("(Exception, SystemExit)", handler)
    handler.name = handler.name or "_error"
    imported = ast.copy_location(ast.Try(late, attempt.handlers, [], []), attempt)
    replace(tree.body, attempt, [imported, begin, there])
    _split_conditions(tree, {a.asname or a.name for i in late for n in imports(i, "aiter") for a in n.names})
    defer(tree, lambda statement: statement is imported)
    # After the deferral, or this import would be one more late name of the module.
    code = f"from vllm_rocm_fixes.failures import count_as_absent\ncount_as_absent('aiter', {handler.name})"
    handler.body[:0] = parse_statements(code, handler)


def _attempt(tree: ast.Module) -> ast.Try | None:
    """The `try` at module scope that imports AITER and defines the operator's function."""
    found = [s for s in tree.body if isinstance(s, ast.Try) and imports(s, "aiter")]
    if len(found) != 1 or len(found[0].handlers) != 1 or found[0].orelse or found[0].finalbody:
        return None
    defined = [s.name for s in found[0].body if isinstance(s, Function)]
    kinds = (ast.ImportFrom, ast.If, ast.FunctionDef, ast.Expr)
    return (
        found[0] if "gemm_with_dynamic_quant" in defined and all(isinstance(s, kinds) for s in found[0].body) else None
    )


def _split_conditions(tree: ast.Module, late: set[str]) -> None:
    """`if a and b:` becomes `if a: if b:` where only b reads a late name, so that a alone decides about the import."""
    for statement in find(tree, ast.If, lambda i: isinstance(i.test, ast.BoolOp) and not i.orelse):
        test = statement.test
        assert isinstance(test, ast.BoolOp)
        reads = [bool(names(value) & late) for value in test.values]
        if isinstance(test.op, ast.And) and any(reads) and not reads[0]:
            first = reads.index(True)
            before, after = test.values[:first], test.values[first:]
            inner = ast.copy_location(ast.If(_all(after, test), statement.body, []), statement)
            statement.test, statement.body = _all(before, test), [inner]


def _all(values: list[ast.expr], at: ast.expr) -> ast.expr:
    return values[0] if len(values) == 1 else ast.copy_location(ast.BoolOp(ast.And(), values), at)


def aiter_is_installed() -> bool:
    """Whether AITER can be found, without running it, or is loaded (a stand-in for it has no spec)."""
    return sys.modules.get("aiter") is not None or importlib.util.find_spec("aiter") is not None


def behaves() -> str | None:
    """What is wrong in this process, which made no scheme; None: nothing. `vllm-rocm-fixes verify` asks, in a child."""
    from vllm_rocm_fixes.checks import imported

    found = imported(PATCH.module, "aiter")
    return f"importing it imported {', '.join(found)}" if found else None


PATCH = Patch(
    name="quark",
    module="vllm.model_executor.layers.quantization.quark.schemes.quark_ocp_mx",
    summary="the OCP-MX scheme imports AITER when it uses a kernel of it",
    origin=("vLLM #48015", "vLLM #31715"),
    since="0.14.0",
    until="0.26.0",
    examine=examine,
    mend=mend,
)
