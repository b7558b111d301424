"""Source in, mended tree and outcomes out: examine, mend, examine again, compile.

Nothing here touches a process. Whatever goes wrong with a patch is an outcome, never an exception, and a patch that
failed has left nothing in the tree.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Sequence
from typing import Any

from .late import BINDER
from .patch import Mended, Outcome, Passing, Patch, Site, Verdict, unknown
from .syntax import Definition, Function, binds, everything, name_of, outside_functions, own_nodes, running, statements


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
        known = len(failures)
        outcomes = tuple(_apply(patch, tree, site or Site(), failures) for patch in patches if len(failures) == known)
        # A failed edit may have left half of itself in the tree: begin again, without it.
        if len(failures) > known:
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


def examine(patch: Patch, tree: ast.Module) -> Verdict:
    """The patch's verdict on a tree; "unknown" where the examination itself broke."""
    try:
        return patch.examine(tree)
    except Exception as error:
        return Passing("unknown", f"the examination broke: {_said(error)}")


def _apply(patch: Patch, tree: ast.Module, site: Site, failures: dict[str, str]) -> Outcome:
    """The outcome of one patch; one that fails is added to failures, and is left out where it is found there."""
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
        complaint, after = _complaint(tree), examine(patch, tree)
        if complaint or after.kind != "clear":
            still = f"after the edit the examination still says {after.kind}: {after.reason}"
            failures[patch.name] = f"the edit {complaint}" if complaint else still
    except Exception as error:
        failures[patch.name] = f"the edit broke: {_said(error)}"
    return Outcome(patch, verdict, failed=failures.get(patch.name))


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
    attributes = {id(s) for node in nodes if isinstance(node, ast.ClassDef) for s in node.body}
    shared = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
    uses: set[tuple[_Place, bool, bool, bool]] = set()  # of a name: bound or read, by the edit, below its `if`
    moved: dict[_Place, int] = {}  # read by what was moved out of module scope, and the first line where it was
    for node in nodes:
        if "lineno" in node._attributes and not hasattr(node, "lineno"):
            return f"puts in a {type(node).__name__} without a position"
        name = name_of(node)
        if not name or id(node) in attributes:
            continue
        here, line, bound = scope.get(id(node)), getattr(node, "lineno", 0), binds(node)
        uses.add(((here, name), bound, _inserted(node), id(node) in gated))
        if here and not bound and _inserted(here) and (here.name == BINDER or not _inserted(node)):
            moved[here, name] = min(line, moved.get((here, name), line))
    bound_at = {at for at, binding, *_ in uses if binding}
    ours = {at for at, binding, inserted, _ in uses if binding and inserted}
    clash = {at[1] for at, _, inserted, _ in uses if not inserted and {at, (None, at[1])} & ours} - shared
    if clash:
        return f"needs the name {min(clash)}, and the source uses it"
    known = {name for here, name in bound_at if here is None} | shared | set(dir(builtins))
    missing = {at[1] for at, _, inserted, _ in uses if inserted and at not in bound_at} - known
    if missing:
        return f"reads {min(missing)}, which the source doesn't have"
    late = {at[1]: line for at, line in moved.items() if at not in bound_at}
    waiting = list(late)
    for name in waiting:  # grows: what is called late reads late
        inside = {at[1] for at, binding, *_ in uses if at[0] and at[0].name == name and at not in bound_at}
        waiting += inside - late.keys()
        late = dict.fromkeys(inside, late[name]) | late
    by_name = any(at[1] in _BY_NAME for at, _, inserted, _ in uses if not inserted)
    said = {str(getattr(n, "arg", getattr(n, "value", None))) for n in nodes} if by_name else set()
    changed = _changed(tree, late, shared | said)
    if changed:
        return f"moves what reads {min(changed)}, which the source binds in another way after that"
    always = {at for at, binding, _, below in uses if binding and not below}
    used = {at for at, binding, _, below in uses if not binding and not below}
    lost = {name for here, name in (bound_at - always) & used if here} - shared
    return f"binds {min(lost)} under a condition, and the source reads it without" if lost else None


_Place = tuple[Function | None, str]  # the function outside of all others, if any, and a name in it
_BY_NAME = {"globals", "setattr", "vars"}  # what these bind is said in a string, or as a keyword


def _changed(tree: ast.Module, late: dict[str, int], shared: set[str]) -> set[str]:
    """Of names that are read late, and the lines where they were, those that are bound before that and again after it.

    Not those that are always bound in the same way, as a logger is.
    """
    outside = (s for s in running(tree.body) if late and not _inserted(s))
    nodes = ((name, s, n) for s in outside for n in (s, *own_nodes(s)) if (name := _changes(n)) in late)
    ways = {(name, s.lineno > late[name], _way(s, n)) for name, s, n in nodes}
    before = {name for name, after, _ in ways if not after}
    again = {name for name, after, _ in ways if after and len({way for n, _, way in ways if n == name}) > 1}
    return before & (again | shared)


_CHANGING = {"add", "append", "clear", "discard", "extend", "insert", "pop", "remove", "setdefault", "update"}


def _changes(node: Any) -> str:
    """The name that a node gives a value, or whose value it changes; empty where it does neither."""
    if isinstance(node, ast.Call) and getattr(node.func, "attr", None) in _CHANGING:
        node = node.func
    elif isinstance(node, ast.arg) or isinstance(getattr(node, "ctx", None), ast.Load):
        return ""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return name_of(node)


def _way(statement: ast.stmt, node: ast.AST) -> str:
    """What binds a name, as text: alike where it gives the same value each time."""
    if isinstance(node, ast.alias):
        return f"{getattr(statement, 'module', '')} {node.name if node.asname else name_of(node)}"
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
