"""Take imports out of module scope: each happens when one of its names is first used.

    defer(tree, lambda statement: bool(imports(statement, "mori")))

moves the chosen statements, with the `if` conditions they stood under, into a function that binds their names in the
module. Functions that read such a name ask for it first; `from module import name` and `module.name` find it through
the module's `__getattr__` (PEP 562). A condition is moved too: `if has_mori():` is asked when a name is, not before.

A star import doesn't take such a name. vLLM has no star import of a module that is mended so.

Once bound, a name is an ordinary global as in stock: what a test or a plugin has put there stays there.
"""

from __future__ import annotations

import ast
import copy
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any

from .failures import is_interruption
from .syntax import (
    Block,
    Definition,
    Function,
    binds,
    blocks,
    first_statement,
    for_type_checkers,
    name_of,
    outside_functions,
    own_nodes,
    parse_expression,
    parse_statements,
    running_blocks,
    statements,
)

_PATIENCE = 10  # seconds for another thread's import; after that the import system's own locks decide, as in stock
BINDER = "_rocm_fixes_late"  # the function that runs the moved statements
_GETATTR = "def __getattr__(name):\n    from vllm_rocm_fixes.late import resolve\n    return resolve(globals(), name)"


def defer(
    tree: ast.Module, chosen: Callable[[ast.stmt], bool], helper: tuple[str, str] = (__name__, "need")
) -> list[str]:
    """Defer the chosen statements of module scope, in place. Returns the names they bind.

    chosen is asked for every statement at module scope and under its `if`s, outermost first; a chosen `try` or `if`
    moves as a whole. helper is the (module, function) that functions call before they read a name: helper(globals(),
    *names). Raises ValueError where a name is needed at module scope after all, or nothing was chosen.
    """
    if any(isinstance(s, Definition) and s.name == BINDER for s in tree.body):
        raise ValueError("imports of this module are deferred already")
    groups = _take(tree.body, chosen)
    if not groups:
        raise ValueError("no statement was chosen")
    at = groups[0][0]
    index = next((i for i, s in enumerate(tree.body) if s.lineno >= at.lineno), len(tree.body))
    bound = {name: None for group in groups for name in movable(group)}
    _refuse_early_use(tree, set(bound))
    for statement in outside_functions(tree.body):
        if isinstance(statement, Function):
            statement.body = _supply(statement.body, set(bound) - _locals(statement), set(), helper)
    binder, new = binding(list(bound), at)
    for group in groups:
        own = _bound(group)
        step = parse_statements(f"if name in {tuple(own)!r}:\n    pass", at)[0]
        assert isinstance(step, ast.If)
        step.body = _supply(group, set(bound) - set(own), set(), helper)
        binder.body.append(step)
    if _answered(tree, list(bound)):
        new.pop()
    tree.body[index:index] = new
    return list(bound)


def movable(block: Block) -> list[str]:
    """The names that statements of module scope bind. Raises ValueError where a function can't hold them."""
    for _, statement in statements(block):
        inside = (ast.Yield, ast.YieldFrom, ast.Await)  # in stock a SyntaxError, which a function would hide
        if isinstance(statement, ast.Return) or any(isinstance(n, inside) for n in own_nodes(statement)):
            raise ValueError(f"line {statement.lineno}: {type(statement).__name__} belongs to no function")
    return _bound(block)


def binding(bound: Sequence[str], at: ast.stmt) -> tuple[ast.FunctionDef, Block]:
    """A function that binds these names of the module once it has a body, for a patch that moves statements by itself.

    Returns it, and it with a `__getattr__` that asks it: they go before the statement `at`. Its second argument only
    tells the names.
    """
    code = f"def {BINDER}(name, names={tuple(bound)!r}):\n    global {', '.join(bound)}\n{_GETATTR}"
    new = parse_statements(code, at)
    binder = new[0]
    assert isinstance(binder, ast.FunctionDef)
    return binder, new


def asking(names: Sequence[str], at: ast.stmt, helper: tuple[str, str] = (__name__, "need")) -> Block:
    """The statements that ask for moved names, to go before the statement `at`, which reads them."""
    module, function = helper
    wanted = ", ".join(map(repr, names))
    return parse_statements(f"from {module} import {function}\n{function}(globals(), {wanted})", at)


def catch_whatever(attempt: ast.Try, package: str) -> None:
    """Let the handler of an import's `try` take whatever the import raises, as it takes a package that isn't there."""
    handler = attempt.handlers[0]
    handler.type = parse_expression("(Exception, SystemExit)", handler)
    handler.name = handler.name or "_error"
    code = f"from vllm_rocm_fixes.failures import count_as_absent\ncount_as_absent({package!r}, {handler.name})"
    handler.body[:0] = parse_statements(code, handler)


def need(namespace: dict[str, Any], *names: str) -> None:
    """Bind deferred names in a module's namespace. Raises what their import raises, and NameError as stock would."""
    for name in names:
        if name not in namespace:
            _bind(namespace, name)
        if name not in namespace:
            raise NameError(f"name {name!r} is not defined: the conditions for its import do not hold", name=name)


def offer(namespace: dict[str, Any], *names: str) -> None:
    """Bind deferred names that may be read; where that fails, the name has no value, as in stock."""
    for name in names:
        try:
            need(namespace, name)
        except (Exception, SystemExit) as error:
            if is_interruption(error):
                raise


def resolve(namespace: dict[str, Any], name: str) -> object:
    """What a module's `__getattr__` answers for a name. Raises AttributeError, with the reason where there is one."""
    missing = f"module {namespace.get('__name__')!r} has no attribute {name!r}"
    try:
        _bind(namespace, name)
    except Exception as error:
        raise AttributeError(f"{missing}: {type(error).__name__}: {error}", name=name) from error
    if name in namespace:
        return namespace[name]
    raise AttributeError(missing, name=name)


def _bind(namespace: dict[str, Any], name: str) -> None:
    """Run the statements that bind a name as an import would be: others wait, and it is done or nothing is.

    They run beside the module, with its names as they are now: nobody sees half of what they bind, and what a test or
    a plugin has put there, or puts there meanwhile, stays.
    """
    binder = namespace.get(BINDER)
    if binder is None or name not in binder.__defaults__[0]:
        return
    lock = _locks.setdefault(namespace.get("__name__"), threading.RLock())
    held = lock.acquire(timeout=_PATIENCE)
    try:
        if name not in namespace:
            beside = dict(namespace)
            FunctionType(binder.__code__, beside)(name, ())
            late = (n for n in binder.__defaults__[0] if n in beside and n not in namespace)
            namespace.update({n: beside[n] for n in late})
    finally:
        if held:
            lock.release()


_locks: dict[str | None, threading.RLock] = {}  # of each module
os.register_at_fork(after_in_child=_locks.clear)  # the child has none of the threads that may hold one


def _take(block: Block, chosen: Callable[[ast.stmt], bool]) -> list[Block]:
    """Take the chosen statements out of a block and the branches below it, each under its conditions."""
    groups: list[Block] = []
    for statement in list(block):
        if chosen(statement):
            block.remove(statement)
            groups.append([statement])
        elif isinstance(statement, ast.If):
            for branch in running_blocks(statement):
                test = copy.deepcopy(statement.test)
                if branch is statement.orelse:
                    test = ast.copy_location(ast.UnaryOp(ast.Not(), test), test)
                taken = _take(branch, chosen)
                groups += [[ast.copy_location(ast.If(test, group, []), statement)] for group in taken]
            if not statement.body:
                statement.body = parse_statements("pass", statement)
                if not statement.orelse:
                    block.remove(statement)
    return groups


def _answered(tree: ast.Module, names: list[str]) -> bool:
    """Let the `__getattr__` that a module has find the names, and itself everything else; False where it has none."""
    existing = [s for s in tree.body if isinstance(s, ast.FunctionDef) and s.name == "__getattr__"]
    if not existing and "__getattr__" in _bound(tree.body):
        raise ValueError("the module's __getattr__ is no plain function")
    if existing:
        name = existing[-1].args.args[0].arg
        answer = f"if {name} in {tuple(names)!r}:\n    from vllm_rocm_fixes.late import resolve\n"
        answer += f"    return resolve(globals(), {name})"
        start = first_statement(existing[-1].body)
        existing[-1].body[start:start] = parse_statements(answer, existing[-1].body[-1])
    return bool(existing)


def _bound(block: Block) -> list[str]:
    """The names that a block binds in its own scope, in the order of the source."""
    found: dict[str, None] = {}
    for _, statement in statements(block):
        own = [statement, *own_nodes(statement)]
        # Comprehensions and functions have variables of their own, and a handler's is gone behind it.
        inner = {id(n) for c in own if isinstance(c, ast.comprehension) for n in ast.walk(c.target)}
        inner |= {id(node) for node in own if isinstance(node, ast.arg | ast.ExceptHandler)}
        found |= {name_of(node): None for node in own if binds(node) and id(node) not in inner}
        if "*" in found:
            raise ValueError(f"line {statement.lineno}: a star import can't be deferred")
    return [name for name in found if name]


def reads(statement: ast.stmt, names: set[str]) -> tuple[set[str], set[str]]:
    """The names that a statement of a function reads whenever it is executed, and those it reads only now and then.

    Now and then: in a branch of an expression, say. The statements inside it are left out.
    """
    certain: set[str] = set()
    perhaps: set[str] = set()
    waiting: list[ast.AST] = [statement]
    if isinstance(statement, ast.AnnAssign):  # in a function an annotation is never evaluated
        waiting = [part for part in (statement.target, statement.value) if part]
    for node in waiting:
        parts = _perhaps(node)
        perhaps |= {name for part in parts for name in _names_in([part, *own_nodes(part)], names)}
        certain |= _names_in([node], names)
        waiting += [c for c in ast.iter_child_nodes(node) if not isinstance(c, ast.stmt) and c not in parts]
    return certain, perhaps - certain


def _names_in(nodes: Iterable[ast.AST], names: set[str]) -> set[str]:
    return {n.id for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Store)} & names


# What of a node isn't evaluated whenever it is: all of some fields, of others all but the first.
_PERHAPS: dict[type[ast.AST], tuple[tuple[str, ...], str]] = {
    ast.IfExp: (("body", "orelse"), ""),
    ast.BoolOp: ((), "values"),
    ast.Compare: ((), "comparators"),
    ast.Lambda: (("body",), ""),
    ast.Assert: (("msg",), ""),
    ast.match_case: (("pattern", "guard"), ""),
    ast.comprehension: (("ifs",), ""),
    ast.ExceptHandler: (("type",), ""),
    **{kind: (("elt",), "generators") for kind in (ast.ListComp, ast.SetComp, ast.GeneratorExp)},
    ast.DictComp: (("key", "value"), "generators"),
    ast.arg: (("annotation",), ""),
    **{kind: (("returns",), "") for kind in (ast.FunctionDef, ast.AsyncFunctionDef)},
}


def _perhaps(node: ast.AST) -> list[ast.AST]:
    fields, rest = _PERHAPS.get(type(node), ((), ""))
    found = [getattr(node, field) for field in fields] + getattr(node, rest, [])[1:]
    return [part for one in found for part in (one if isinstance(one, list) else [one]) if part]


def _refuse_early_use(tree: ast.Module, names: set[str]) -> None:
    """Raise ValueError where module scope, or a class body in it, reads or binds one of the names."""
    for statement in outside_functions(tree.body):
        for name in sorted(_names_in(own_nodes(statement), names)):
            raise ValueError(f"line {statement.lineno}: {name} is read at module scope")
    running = [part for s in tree.body for part in (s.orelse if for_type_checkers(s) else [s])]
    for name in sorted(names & set(_bound(running))):
        raise ValueError(f"{name} is bound at module scope in another place too")


def _supply(block: Block, names: set[str], done: set[str], helper: tuple[str, str], branch: bool = False) -> Block:
    """The block, with a call of the helper before each statement that is the first to read a name.

    A branch of an `if` asks at its start for what it reads before it may be left.
    """
    supplied: Block = []
    for index, statement in enumerate(block):
        missing, perhaps = reads(statement, names)
        if branch and index == 0:
            for later in block[: _first_exit(block) + 1]:
                missing |= reads(later, names)[0]
        for way, wanted in ((helper, missing - done), ((__name__, offer.__name__), perhaps - missing - done)):
            if wanted:
                supplied += asking(sorted(wanted), statement, way)
        done |= missing
        inside = names - _locals(statement) if isinstance(statement, Function) else names
        for inner in blocks(statement):
            inner[:] = _supply(list(inner), inside, set(done), helper, isinstance(statement, ast.If))
        supplied.append(statement)
    return supplied


def _first_exit(block: Block) -> int:
    """The index of the first statement that may leave a block early; the block's length where there is none."""
    exits = (ast.Return, ast.Raise, ast.Break, ast.Continue, ast.Yield, ast.YieldFrom, ast.Await)
    found = (i for i, statement in enumerate(block) if any(isinstance(n, exits) for n in ast.walk(statement)))
    return next(found, len(block))


def _locals(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """The names that are a function's own: its arguments and what it binds, without what it declares global."""
    every = [s for _, s in statements(function.body)]
    shared = {name for s in every if isinstance(s, ast.Global) for name in s.names}
    arguments = {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
    caught = {name_of(node) for s in every for node in own_nodes(s) if isinstance(node, ast.ExceptHandler)}
    return (arguments | caught | set(_bound(function.body))) - shared
