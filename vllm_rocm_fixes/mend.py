"""Source in, mended tree and outcomes out: examine, mend, examine again, compile.

Nothing here touches a process. Whatever goes wrong with a patch is an outcome, never an exception, and a patch that
failed has left nothing in the tree.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from .late import BINDER
from .patch import Mended, Outcome, Passing, Patch, Site, Verdict, unknown
from .syntax import Definition, Function, everything, outside_functions, own_nodes, running, statements


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
        outcomes = tuple(_outcomes(patches, tree, site or Site(), failures))
        # A failed edit may have left half of itself in the tree: begin again, without it.
        if len(outcomes) < len(patches):
            continue
        if not any(outcome.applied for outcome in outcomes):
            return Mended(outcomes)
        try:
            added = [s for s in tree.body if isinstance(s, Function) and s.name not in before]
            return Mended(
                outcomes,
                tree,
                compile(tree, filename, "exec", dont_inherit=True),
                frozenset(_decorated(tree)),
                {s.name: compile(ast.Module([s], []), filename, "exec", dont_inherit=True) for s in added},
            )
        except Exception as error:
            reason = f"the mended tree doesn't compile: {_said(error)}"
            return Mended(tuple(o._replace(failed=reason) if o.applied else o for o in outcomes))


def _outcomes(patches: Sequence[Patch], tree: ast.Module, site: Site, failures: dict[str, str]) -> Iterator[Outcome]:
    """Up to the first patch that fails, which is added to failures, and which a next attempt leaves out."""
    for patch in patches:
        outcome = _apply(patch, tree, site, failures)
        if outcome.failed and patch.name not in failures:
            failures[patch.name] = outcome.failed
            return
        yield outcome


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
        complaint = _complaint(tree)
    except Exception as error:
        return Outcome(patch, verdict, failed=f"the edit broke: {_said(error)}")
    if complaint:
        return Outcome(patch, verdict, failed=f"the edit {complaint}")
    after = examine(patch, tree)
    if after.kind != "clear":
        return Outcome(patch, verdict, failed=f"after the edit the examination still says {after.kind}: {after.reason}")
    return Outcome(patch, verdict)


def _complaint(tree: ast.Module) -> str | None:
    """What is wrong with an edit, else None: a name that it binds where the source has another use for it, or reads
    where nothing binds it, or that it leaves bound below an `if` of its own alone; something that it moves into a
    function, where a name has another value by then; or a node without a position.

    What an edit put in stands at a point, and stock's own nodes don't: see syntax.place.
    """
    outer = [s for s in outside_functions(tree.body) if isinstance(s, Function)]
    scope = {id(node): function for function in outer for node in everything(function) if node is not function}
    nodes = everything(tree)
    gates = [n for n in nodes if isinstance(n, ast.If) and not n.orelse and id(n) in scope and _inserted(n)]
    gated = {id(node) for gate in gates for statement in gate.body for node in everything(statement)}
    ours: set[tuple[Function | None, str]] = set()  # bound by the edit, and in which function
    theirs: set[tuple[Function | None, str]] = set()
    read: set[tuple[Function | None, str]] = set()  # by the edit
    bound: set[tuple[Function | None, str]] = set()
    always: set[tuple[Function | None, str]] = set()  # bound, and not by what an edit's `if` may leave out
    used: set[tuple[Function | None, str]] = set()  # read, outside of those
    shared: set[str] = set()
    late: dict[tuple[Function | None, str], int] = {}  # read by what was moved out of module scope, and its first line
    for node in nodes:
        if "lineno" in node._attributes and not hasattr(node, "lineno"):
            return f"puts in a {type(node).__name__} without a position"
        if type(node) not in _NAMING:
            shared.update(node.names if isinstance(node, ast.Global) else ())
            continue
        here, name, binds = scope.get(id(node)), _name(node), _binds(node)
        if _inserted(node):
            (ours if binds else read).add((here, name))
        elif isinstance(node, ast.Name):
            theirs.add((here, name))
        if here and not binds and _inserted(here) and (here.name == BINDER or not _inserted(node)):
            line = getattr(node, "lineno", 0)
            late[here, name] = min(line, late.get((here, name), line))
        if binds:
            bound.add((here, name))
        if id(node) not in gated:
            (always if binds else used).add((here, name))
    clash = {name for here, name in theirs if {(here, name), (None, name)} & ours} - shared
    if clash:
        return f"needs the name {min(clash)}, and the source uses it"
    known = {name for here, name in bound if here is None} | shared | set(dir(builtins))
    missing = {name for here, name in read - bound} - known
    if missing:
        return f"reads {min(missing)}, which the source doesn't have"
    changed = _changed(tree, {place[1]: line for place, line in late.items() if place not in bound}, shared)
    if changed:
        return f"moves what reads {min(changed)}, which the source binds in another way after that"
    lost = {name for here, name in (bound - always) & used if here} - shared
    return f"binds {min(lost)} under a condition, and the source reads it without" if lost else None


_NAMING = {ast.Name, ast.arg, ast.alias, *get_args(Definition), ast.ExceptHandler, ast.MatchAs, ast.MatchStar}


def _name(node: Any) -> str:
    """The name that a node of these kinds reads or binds; empty where it has none."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, ast.alias):
        return node.asname or node.name.partition(".")[0]
    return node.name or ""


def _binds(node: ast.AST) -> bool:
    return not (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))


def _changed(tree: ast.Module, late: dict[str, int], shared: set[str]) -> set[str]:
    """Of names that are read late, and the lines where they were, those that are bound before that and again after it.

    Not those that are always bound in the same way, as a logger is.
    """
    ways: dict[str, tuple[set[str], set[str]]] = {name: (set(), set()) for name in late}
    for statement in running(tree.body) if late else ():
        for node in (statement, *own_nodes(statement)):
            name = _changes(node)
            if name in late and not _inserted(statement):
                ways[name][statement.lineno > late[name]].add(_way(statement, node))
    again = {name for name, (before, after) in ways.items() if before and after and len(before | after) > 1}
    return again | {name for name, (before, _) in ways.items() if before and name in shared}


_CHANGING = {"add", "append", "clear", "discard", "extend", "insert", "pop", "remove", "setdefault", "update"}


def _changes(node: Any) -> str:
    """The name that a node gives a value, or whose value it changes; empty where it does neither."""
    if isinstance(node, ast.Call) and getattr(node.func, "attr", None) in _CHANGING:
        node = node.func
    elif isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Load):
        return ""
    if isinstance(node, ast.Attribute | ast.Subscript):
        while isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
        return node.id if isinstance(node, ast.Name) else ""
    return _name(node) if type(node) in _NAMING and _binds(node) else ""


def _way(statement: ast.stmt, node: ast.AST) -> str:
    """What binds a name, as text: alike where it gives the same value each time."""
    if isinstance(node, ast.alias):
        return f"{getattr(statement, 'module', '')} {node.name if node.asname else _name(node)}"
    return ast.unparse(statement) + str(statement.lineno if isinstance(statement, ast.AugAssign) else "")


def _inserted(node: Any) -> bool:
    return (node.lineno, node.col_offset) == (node.end_lineno, node.end_col_offset)


def _decorated(node: ast.AST, prefix: str = "") -> Iterator[str]:
    for _, statement in statements(getattr(node, "body", [])):
        if isinstance(statement, Definition):
            if statement.decorator_list:
                yield prefix + statement.name
            if isinstance(statement, ast.ClassDef):
                yield from _decorated(statement, f"{prefix}{statement.name}.")


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
