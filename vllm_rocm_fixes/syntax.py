"""Find and change nodes of a syntax tree, positions kept.

A new node takes the position of the node it stands in for or before, so tracebacks and inspect stay right although no
file is written.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import UnionType
from typing import TypeGuard, TypeVar, get_args

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
Function = ast.FunctionDef | ast.AsyncFunctionDef
Import = ast.Import | ast.ImportFrom
Block = list[ast.stmt]
_Node = TypeVar("_Node", bound=ast.AST)


def blocks(node: ast.AST) -> Iterator[Block]:
    """Every list of statements directly below node: body, orelse, finalbody, the handlers' and the cases' bodies."""
    for field in ("body", "orelse", "finalbody"):
        block = getattr(node, field, None)
        if isinstance(block, list) and block:
            yield block
    for field in ("handlers", "cases"):
        for part in getattr(node, field, ()):
            yield part.body


def statements(
    block: Block, closed: UnionType | type | tuple[()] = Definition, below: Callable[..., Iterator[Block]] = blocks
) -> Iterator[tuple[Block, ast.stmt]]:
    """Every statement of a block and of the blocks below it, each with the list that holds it.

    Those of the closed kinds are yielded and not entered.
    """
    for statement in list(block):
        yield block, statement
        if not isinstance(statement, closed):
            for inner in below(statement):
                yield from statements(inner, closed, below)


def outside_functions(block: Block) -> Iterator[ast.stmt]:
    """Every statement that stands in no function, in classes too."""
    return (statement for _, statement in statements(block, Function))


def own_nodes(statement: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a statement without the statements inside it: of an `if` its test, of a function its header."""
    for child in ast.iter_child_nodes(statement):
        if not isinstance(child, ast.stmt):
            yield child
            yield from own_nodes(child)


def holding(tree: ast.Module | Function, node: ast.AST) -> tuple[Block, ast.stmt]:
    """The innermost statement at which node stands, and the list that holds it. Raises ValueError where none does."""
    for block, statement in statements(tree.body, closed=()):
        if statement is node or any(part is node for part in own_nodes(statement)):
            return block, statement
    raise ValueError("that node isn't in this tree")


def definitions(tree: ast.Module, qualified_name: str) -> list[Definition]:
    """The classes and functions of that dotted name, also those under `if` and `try`; inner functions don't count."""
    owners: list[ast.Module | Definition] = [tree]
    for name in qualified_name.split("."):
        inside = [s for owner in owners if not isinstance(owner, Function) for _, s in statements(owner.body)]
        owners = [s for s in inside if isinstance(s, Definition) and s.name == name]
    return [owner for owner in owners if isinstance(owner, Definition)]


def function(tree: ast.Module, qualified_name: str) -> Function | None:
    """The one function of that dotted name; None where there is none, or more than one."""
    found = definitions(tree, qualified_name)
    return found[0] if len(found) == 1 and isinstance(found[0], Function) else None


def class_(tree: ast.Module, qualified_name: str) -> ast.ClassDef | None:
    """The one class of that dotted name; None where there is none, or more than one."""
    found = definitions(tree, qualified_name)
    return found[0] if len(found) == 1 and isinstance(found[0], ast.ClassDef) else None


def everything(node: ast.AST) -> list[ast.AST]:
    """What ast.walk yields but contexts and operators, in the same order: most of a survey goes by in here."""
    found = [node]
    for parent in found:
        for field in _FIELDS[type(parent)]:
            value = getattr(parent, field, None)
            if type(value) is list:
                found += [part for part in value if isinstance(part, ast.AST)]
            elif isinstance(value, ast.AST):
                found.append(value)
    return found


_PLAIN = {"ctx", "op", "ops", "id", "attr", "arg", "asname", "module", "level", "kind", "type_comment"}
_KINDS = [kind for kind in vars(ast).values() if isinstance(kind, type) and issubclass(kind, ast.AST)]
# The fields of each kind of node that can hold others.
_FIELDS = {kind: [field for field in kind._fields if field not in _PLAIN] for kind in _KINDS} | {ast.Constant: []}


def find(node: ast.AST, kind: type[_Node], where: Callable[[_Node], bool] = lambda _: True) -> list[_Node]:
    """All nodes of a kind at or below node for which where is true, in the order of the source."""
    found = [n for n in everything(node) if isinstance(n, kind) and where(n)]
    return sorted(found, key=lambda n: (getattr(n, "lineno", 0), getattr(n, "col_offset", 0)))


def imports(node: ast.AST, package: str) -> list[Import]:
    """All absolute imports of a package, or of anything in it, at or below node, in the order of the source."""
    return [s for s in find(node, ast.stmt) if isinstance(s, Import) and _is_of(s, package)]


def running_blocks(statement: ast.stmt) -> Iterator[Block]:
    """As blocks, without what is for type checkers alone."""
    yield from (b for b in blocks(statement) if not (for_type_checkers(statement) and b is statement.body))


def running(block: Block) -> Iterator[ast.stmt]:
    """The statements of a block, also those under `if` and `try`, without what is for type checkers alone."""
    return (statement for _, statement in statements(block, below=running_blocks))


def early_imports(block: Block, *packages: str) -> list[Import]:
    """The statements of a block of module scope that import one of the packages."""
    return [s for s in running(block) if isinstance(s, Import) and any(_is_of(s, package) for package in packages)]


def hidden_imports(tree: ast.Module, *packages: str) -> list[ast.AST]:
    """What imports one of the packages while the module runs, without being an absolute import of module scope.

    That is an import in the body of a class or in a function that runs then, one by name, a relative one, and what asks
    a lazy module for something.
    """
    nodes = everything(tree)
    plain = {id(s) for _, s in statements(tree.body) if not getattr(s, "level", 0)}
    aliases = _aliases(nodes)
    loaders = [n for n in nodes if isinstance(n, ast.Assign) and _spelt(getattr(n.value, "func", n)) == "LazyLoader"]
    told = [n for n in loaders if any(_within(string(part), p) for part in everything(n.value) for p in packages)]
    lazy = {_spelt(target) for loader in told for target in loader.targets}

    def brings(node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute):
            return _spelt(node.value) in lazy
        if isinstance(node, ast.Call):
            asks = _spelt(node.func) in ("hasattr", "getattr") and any(_spelt(a) in lazy for a in node.args[:1])
            return asks or imports_by_name(node, *packages, aliases=aliases)
        return isinstance(node, Import) and any(_is_of(node, p) or _may_be_of(node, p) for p in packages)

    hidden = {id(node) for node in nodes if id(node) not in plain and brings(node)}
    return [node for node in evaluated(tree) if id(node) in hidden] if hidden else []


def evaluated(tree: ast.Module, handed_on: bool = False) -> list[ast.AST]:
    """Every node that is evaluated while the module runs, also in functions that run then.

    Those are called, read as a property, or used as a decorator or a base: whatever has such a name counts, but what is
    asked of a package outside of vLLM. A function that is handed on is taken for one that is not called, or, where
    handed_on is set, for one that is.
    """
    nodes = everything(tree)
    aliases = _aliases(nodes)
    functions = [node for node in nodes if isinstance(node, Function)]
    properties = {f.name for f in functions if any("property" in _spelt(d) for d in f.decorator_list)}
    outside = [n for n in nodes if isinstance(n, Import) and not _is_of(n, "vllm")]
    foreign = {name_of(alias) for n in outside if not getattr(n, "level", 0) for alias in n.names}
    foreign -= {name_of(node) for node in nodes if binds(node) and not isinstance(node, ast.alias)}
    resting: dict[str, list[Sequence[ast.AST]]] = {}  # what doesn't run yet, by the name that it is called by
    for part in nodes:
        if isinstance(part, Definition):
            making = [s.body for s in part.body if isinstance(s, Function) and s.name in _MAKING]
            resting.setdefault(part.name, []).extend(making if isinstance(part, ast.ClassDef) else [part.body])
        elif isinstance(part, ast.Assign) and isinstance(part.value, ast.Lambda):
            for target in part.targets:
                resting.setdefault(_spelt(target), []).append([part.value.body])
    makes: dict[str, list[Sequence[ast.AST]]] = {}  # by a decorator: it runs where what it decorates is called
    for function in functions:
        for name in {_spelt(getattr(d, "func", d)) for d in function.decorator_list}:
            if name not in makes:
                made = [part for f in functions if f.name in (name, aliases.get(name)) for part in everything(f)[1:]]
                makes[name] = [_body(part) for part in made if isinstance(part, Function | ast.Lambda)]
            resting[function.name] += makes[name]
    now: list[ast.AST] = list(tree.body)
    ran: set[int] = set()
    for node in now:  # grows
        if isinstance(node, Function | ast.Lambda):
            now += [default for default in (*node.args.defaults, *node.args.kw_defaults) if default]
        elif for_type_checkers(node):
            now += node.orelse
        else:
            now += ast.iter_child_nodes(node)
        called = list(getattr(node, "decorator_list", []))
        if isinstance(node, ast.ClassDef):
            called += [*node.bases, *(keyword.value for keyword in node.keywords)]
        else:  # a class's decorators are among its children
            now += called
        if isinstance(node, ast.Call):
            called += [node.func, *(node.args if _spelt(node.func) in ("map", "filter") else [])]
        elif handed_on or (isinstance(node, ast.Attribute) and node.attr in properties):
            called.append(node)
        called = [function for function in called if name_of(_owner(function)) not in foreign]
        bodies = [_body(function) for function in called if isinstance(function, ast.Lambda)]
        by = {name for function in called for name in (_spelt(function), aliases.get(_spelt(function), ""))} - {""}
        bodies += [body for name in by for body in resting.pop(name, [])]
        now += [part for body in bodies if id(body[0]) not in ran for part in body]
        ran |= {id(body[0]) for body in bodies}
    return now


# What runs where a class is called, entered and left, or made.
_MAKING = ("__new__", "__init__", "__post_init__", "__call__", "__enter__", "__exit__", "__init_subclass__")


def _aliases(nodes: list[ast.AST]) -> dict[str, str]:
    """Other names that the source gives to functions."""
    found = {a.asname: a.name for n in nodes if isinstance(n, ast.ImportFrom) for a in n.names if a.asname}
    for assignment in (n for n in nodes if isinstance(n, ast.Assign) and _spelt(n.value)):
        found |= {_spelt(target): _spelt(assignment.value) for target in assignment.targets}
    return found


def _body(function: Function | ast.Lambda) -> Sequence[ast.AST]:
    return [function.body] if isinstance(function, ast.Lambda) else function.body


def _owner(function: ast.AST) -> ast.AST:
    while isinstance(function, ast.Attribute):
        function = function.value
    return function


def _spelt(function: ast.AST) -> str:
    spelt = getattr(function, "attr", getattr(function, "id", ""))
    return spelt if isinstance(spelt, str) else ""


def imports_by_name(call: ast.Call, *packages: str, aliases: Mapping[str, str] = {}) -> bool:
    """Whether a call imports one of the packages, or something that isn't said; find_spec imports what is above.

    aliases are other names that the source gives to functions.
    """
    spelt = aliases.get(_spelt(call.func), _spelt(call.func))
    if spelt not in ("import_module", "__import__", "find_spec", "resolve_obj_by_qualname"):
        return False
    named = [k.value for k in call.keywords if k.arg == "name"]
    wanted = string([*call.args, *named, None][0])
    if spelt == "find_spec":
        return wanted is not None and any(_within(wanted.rpartition(".")[0], package) for package in packages)
    return wanted is None or any(_within(wanted, package) for package in packages)


def _is_of(statement: Import, package: str) -> bool:
    if isinstance(statement, ast.Import):
        return any(_within(alias.name, package) for alias in statement.names)
    return statement.level == 0 and _within(statement.module, package)


def _may_be_of(statement: Import, package: str) -> bool:
    """Whether a relative import may be one of a module of vLLM's: a tree doesn't say in which package it lies."""
    if isinstance(statement, ast.Import) or statement.level == 0 or not package.startswith("vllm."):
        return False
    named = [statement.module] if statement.module else [alias.name for alias in statement.names]
    return any(package.endswith(f".{name}") for name in named)


def _within(name: str | None, package: str) -> bool:
    return name is not None and (name == package or name.startswith(package + "."))


def for_type_checkers(statement: ast.AST) -> TypeGuard[ast.If]:
    """Whether a statement is `if TYPE_CHECKING:`, spelt with or without its module: what is in its body never runs."""
    return isinstance(statement, ast.If) and _spelt(statement.test) == "TYPE_CHECKING"


def calls(node: ast.AST, dotted_name: str) -> list[ast.Call]:
    """All calls at or below node whose function is spelt like that, such as `self.aiter_sample`."""
    last = dotted_name.rpartition(".")[2]  # unparsing each call of a module would take most of a mend's time
    return find(node, ast.Call, lambda c: _spelt(c.func) == last and ast.unparse(c.func) == dotted_name)


# Where a node of each kind that reads or binds a name keeps it.
_NAMED = {ast.Name: "id", ast.alias: "name", ast.arg: "arg", ast.MatchMapping: "rest"}
_NAMED |= dict.fromkeys((*get_args(Definition), ast.ExceptHandler, ast.MatchAs, ast.MatchStar), "name")


def name_of(node: ast.AST) -> str:
    """The name that a node itself reads or binds; empty where it has none."""
    kept: str = getattr(node, _NAMED.get(type(node), ""), None) or ""
    return getattr(node, "asname", None) or kept.partition(".")[0]


def binds(node: ast.AST) -> bool:
    """Whether a node that has a name gives it a value, or takes it away, and doesn't read it."""
    return not (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))


def names(node: ast.AST) -> set[str]:
    """All bare names read or written at or below node."""
    return {n.id for n in everything(node) if isinstance(n, ast.Name)}


def place(node: _Node, at: ast.AST) -> _Node:
    """Give node and all below it the position where `at` begins. Returns node."""
    line, column = getattr(at, "lineno", 1), getattr(at, "col_offset", 0)
    for part in ast.walk(node):
        if "lineno" in part._attributes:
            part.lineno = part.end_lineno = line  # type: ignore[attr-defined]
            part.col_offset = part.end_col_offset = column  # type: ignore[attr-defined]
    return node


def parse_statements(code: str, at: ast.AST) -> Block:
    """New statements from code, each placed where `at` begins."""
    return [place(statement, at) for statement in ast.parse(textwrap.dedent(code)).body]


def parse_expression(code: str, at: ast.AST) -> ast.expr:
    """A new expression from code, placed where `at` begins."""
    return place(ast.parse(code, mode="eval").body, at)


def replace(block: Block, old: ast.stmt, new: Block) -> None:
    """Put new statements in the place of one statement of a block. Raises ValueError where old isn't in it."""
    index = block.index(old)  # nodes are equal to themselves alone
    block[index : index + 1] = new


def insert_before(block: Block, mark: ast.stmt, new: Block) -> None:
    """Put new statements before one statement of a block. Raises ValueError where mark isn't in it."""
    replace(block, mark, [*new, mark])


def first_statement(body: Block) -> int:
    """The index of a body's first statement after its docstring."""
    first = body[0] if body else None
    return 1 if isinstance(first, ast.Expr) and string(first.value) is not None else 0


def string(node: ast.AST | None) -> str | None:
    """The value of a string literal, else None."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
