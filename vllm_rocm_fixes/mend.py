"""Source in, mended tree and outcomes out: examine, mend, examine again, compile.

Nothing here touches a process. Whatever goes wrong with a patch is an outcome, never an exception, and a patch that
failed has left nothing in the tree.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Sequence
from types import CodeType

from .patch import Mended, Outcome, Passing, Patch, Site, Verdict, unknown
from .syntax import Definition, Function, everything, statements


def mend(source: bytes | str, filename: str, patches: Sequence[Patch], site: Site | None = None) -> Mended:
    """Examine a stock module's source, and mend it where that is needed. filename goes into the code object."""
    failures: dict[str, str] = {}
    while True:
        try:
            tree = ast.parse(source, filename)
        except Exception as error:
            reason = f"the source doesn't parse: {_said(error)}"
            verdict = unknown(reason) if isinstance(error, SyntaxError | ValueError) else Passing("unknown", reason)
            return Mended(tuple(Outcome(patch, verdict) for patch in patches))
        before = {statement.name for statement in tree.body if isinstance(statement, Function)}
        outcomes = tuple(_apply(patch, tree, site or Site(), failures) for patch in patches)
        # A failed edit may have left half of itself in the tree: begin again, without it.
        fresh = {o.patch.name: o.failed for o in outcomes if o.failed and o.patch.name not in failures}
        if fresh:
            failures.update(fresh)
            continue
        if not any(outcome.applied for outcome in outcomes):
            return Mended(outcomes)
        try:
            added = [s for s in tree.body if isinstance(s, Function) and s.name not in before]
            return Mended(
                outcomes,
                tree,
                _compile(tree, filename),
                frozenset(_decorated(tree)),
                {statement.name: _compile(ast.Module([statement], []), filename) for statement in added},
            )
        except Exception as error:
            reason = f"the mended tree doesn't compile: {_said(error)}"
            return Mended(tuple(o._replace(failed=reason) if o.applied else o for o in outcomes))


def examine(patch: Patch, tree: ast.Module) -> Verdict:
    """The patch's verdict on a tree; "unknown" where the examination itself broke."""
    try:
        return patch.examine(tree)
    except Exception as error:
        return Passing("unknown", f"the examination broke: {_said(error)}")


def _apply(patch: Patch, tree: ast.Module, site: Site, failures: dict[str, str]) -> Outcome:
    verdict = examine(patch, tree)
    if verdict.kind != "needed":
        return Outcome(patch, verdict)
    if patch.name in failures:
        return Outcome(patch, verdict, failed=failures[patch.name])
    try:
        refused = patch.refuse(site) if patch.refuse else None
        if refused:
            return Outcome(patch, verdict, refused=refused)
        patch.mend(tree)
        ast.fix_missing_locations(tree)
    except Exception as error:
        return Outcome(patch, verdict, failed=f"the edit broke: {_said(error)}")
    clash = _clash(tree)
    if clash:
        return Outcome(patch, verdict, failed=f"the edit needs the name {clash}, and the source uses it")
    missing = _missing(tree)
    if missing:
        return Outcome(patch, verdict, failed=f"the edit reads {missing}, which the source doesn't have")
    after = examine(patch, tree)
    if after.kind != "clear":
        return Outcome(patch, verdict, failed=f"after the edit the examination still says {after.kind}: {after.reason}")
    return Outcome(patch, verdict)


def _clash(tree: ast.Module) -> str | None:
    """A name that an edit binds where the source has another use for it; None where there is none.

    What an edit put in stands at a point, and stock's own nodes don't: see syntax.place.
    """
    bound, used = _bound_and_used(tree, outside=True)
    for function in _outermost(tree):
        own, theirs = _bound_and_used(function)
        if (own | bound) & theirs:
            return min((own | bound) & theirs)
    return min(bound & used, default=None)


def _missing(tree: ast.Module) -> str | None:
    """A name that an edit reads and nothing in the module binds; None where there is none."""
    bound: set[str] = set(dir(builtins))
    read: set[str] = set()
    for node in everything(tree):
        if isinstance(node, ast.Name):
            if not isinstance(node.ctx, ast.Load):
                bound.add(node.id)
            elif _inserted(node):
                read.add(node.id)
        elif isinstance(node, Definition | ast.ExceptHandler):
            bound.add(node.name or "")
        elif isinstance(node, ast.alias):
            bound.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
    return min(read - bound, default=None)


def _outermost(node: ast.AST) -> Iterator[Function]:
    """The functions that stand in no other function."""
    for _, statement in statements(getattr(node, "body", [])):
        if isinstance(statement, Function):
            yield statement
        elif isinstance(statement, ast.ClassDef):
            yield from _outermost(statement)


def _bound_and_used(node: ast.AST, outside: bool = False) -> tuple[set[str], set[str]]:
    """The names that inserted nodes bind at or below node, and those that stock's use; outside: not in functions."""
    bound: set[str] = set()
    used: set[str] = set()
    shared: set[str] = set()
    waiting = [node]
    for part in waiting:
        waiting += [n for n in ast.iter_child_nodes(part) if not (outside and isinstance(n, Function))]
        if isinstance(part, ast.Name):
            if not _inserted(part):
                used.add(part.id)
            elif isinstance(part.ctx, ast.Store):
                bound.add(part.id)
        elif isinstance(part, ast.arg) and _inserted(part):
            bound.add(part.arg)
        elif isinstance(part, ast.alias) and _inserted(part):
            bound.add(part.asname or part.name.partition(".")[0])
        elif isinstance(part, ast.Global):
            shared.update(part.names)
    return bound - shared, used


def _inserted(node: ast.expr | ast.arg | ast.alias) -> bool:
    return (node.lineno, node.col_offset) == (node.end_lineno, node.end_col_offset)


def _compile(tree: ast.Module, filename: str) -> CodeType:
    return compile(tree, filename, "exec", dont_inherit=True)


def _decorated(node: ast.AST, prefix: str = "") -> Iterator[str]:
    for _, statement in statements(getattr(node, "body", [])):
        if isinstance(statement, Definition):
            if statement.decorator_list:
                yield prefix + statement.name
            if isinstance(statement, ast.ClassDef):
                yield from _decorated(statement, f"{prefix}{statement.name}.")


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
