"""A mended tree back into text: the stock source, changed in those lines only that the tree changed.

The statements of the stock tree and of the mended tree are aligned by their positions, which an edit keeps. A statement
that is the same keeps its lines, with comments and formatting; a simple one that differs becomes new text; a compound
one is entered, so that only its header, or statements in its blocks, are new. Statements that moved, into a `try` for
instance, take their lines along. Encoding, line ends, form feeds, tabs and a missing last line end stay. What comes out
is parsed and compared with the mended tree before it is handed back.
"""

from __future__ import annotations

import ast
import copy
import io
import re
import textwrap
import tokenize
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .syntax import Block, Definition, statements

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
_REST = re.compile(r"\s*(?:;\s*)?(?:#.*)?")  # what may follow a statement on its last line
_STOCK = "_stock_statement_"
_BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")


class Change(NamedTuple):
    """Lines [start, end) of a text, counted from 0, become these new lines, which have no line ends."""

    start: int
    end: int
    lines: tuple[str, ...]


class _Coarser(Exception):
    """The lines here can't be changed by themselves: the statement around them has to be written anew."""


def rewrite(source: bytes, tree: ast.Module) -> bytes:
    """The source whose syntax tree is this one, with as few lines of `source` changed as can be.

    Raises ValueError where no text gives that tree, and what `ast.parse` raises where source doesn't parse.
    """
    encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
    lines = split(source.decode(encoding))
    stock = ast.parse(source)
    for depth in (100, 1, 0):
        try:
            changes = _Writer(lines, stock, depth).changes(tree.body)
            written = "".join(apply(lines, changes)).encode(encoding)
            if same(ast.parse(written), tree):
                return written
        except (_Coarser, SyntaxError, UnicodeEncodeError):
            continue
    raise ValueError("the mended tree can't be written as text: no source that was tried gives the same tree")


def same(one: object, other: object) -> bool:
    """Whether two syntax trees, or parts of them, are the same but for positions."""
    if type(one) is not type(other):
        return False
    if isinstance(one, ast.AST):
        for field in one._fields:  # noqa: SIM110 - a quarter of `diff` goes by in here
            if not same(getattr(one, field, None), getattr(other, field, None)):
                return False
        return True
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def split(text: str) -> list[str]:
    """The lines of a text as Python's parser counts them, with their ends; str.splitlines also splits at form feeds."""
    return _LINE.findall(text)


def apply(lines: Sequence[str], changes: Sequence[Change]) -> list[str]:
    """The lines after the changes. New lines end as the first line does; a missing last line end stays missing."""
    end = next((line[len(line.rstrip("\r\n")) :] for line in lines if line[-1] in "\r\n"), "\n")
    result: list[str] = []
    position = 0
    for change in changes:
        result += [*lines[position : change.start], *(line + end for line in change.lines)]
        position = change.end
    result += lines[position:]
    result = [line if line[-1] in "\r\n" else line + end for line in result]
    if result and lines and lines[-1][-1] not in "\r\n":
        result[-1] = result[-1].rstrip("\r\n")
    return result


class _Writer:
    """Finds the changes that lead from stock lines to a mended tree, entering `depth` levels of blocks."""

    def __init__(self, lines: Sequence[str], stock: ast.Module, depth: int) -> None:
        self.lines, self.stock, self.depth = lines, stock, depth
        self.by_place = {_place(statement): statement for _, statement in statements(stock.body, closed=())}
        self.moved: set[tuple[object, ...]] = set()

    def changes(self, new: Block) -> list[Change]:
        """All changes, in the order of the lines."""
        if self.depth == 0 or not self.stock.body:
            text = [line for statement in new for line in ast.unparse(statement).split("\n")]
            return [Change(0 if self.depth == 0 else len(self.lines), len(self.lines), tuple(text))]
        found = self._block(self.stock.body, new, 1)
        return sorted(found, key=lambda change: (change.start, change.end))

    def _block(self, old: Block, new: Block, level: int) -> Iterator[Change]:
        units = list(self._units(old))
        at = {_place(unit[0]): index for index, unit in enumerate(units)}
        start_old = start_new = position = 0
        while position < len(new):
            index = at.get(_place(new[position]), -1)
            unit = units[index]
            mended = new[position : position + len(unit)]
            # Several statements on one line stay as they are, or are written anew together.
            if index >= start_old and (len(unit) == 1 or same(unit, mended)):
                yield from self._gap(units, start_old, index, new[start_new:position], level)
                yield from self._unit(unit, mended, level)
                start_old, start_new = index + 1, position + len(unit)
                position = start_new
            else:
                position += 1
        yield from self._gap(units, start_old, len(units), new[start_new:], level)

    def _gap(self, units: list[Block], start: int, end: int, new: Block, level: int) -> Iterator[Change]:
        """Units [start, end) of a block become these statements, none of which stands where one of them stood."""
        for number in range(start, end):
            twin = next((i for i, statement in enumerate(new) if _twins(units[number], statement)), None)
            if twin is not None:
                yield from self._gap(units, start, number, new[:twin], level)
                yield from self._unit(units[number], [new[twin]], level)
                yield from self._gap(units, number + 1, end, new[twin + 1 :], level)
                return
        if start == end:
            if new:
                yield self._insertion(units, start, new, level)
            return
        text = self._text(new, self._indent(units[start]))
        for unit in units[start:end]:
            first, last = self._extent(unit)
            if _place(unit[0]) in self.moved:
                first = self._comments_above(first)
            yield Change(first, last, tuple(text))
            text = []

    def _insertion(self, units: list[Block], index: int, new: Block, level: int) -> Change:
        """New statements after the one before them; at the head of a block, before its first."""
        indent = self._indent(units[0])
        text = self._text(new, indent)
        blank = [""] * ((2 if level == 1 else 1) if any(isinstance(s, Definition) for s in new) else 0)
        if index == 0:
            place = self._extent(units[0])[0]
            return Change(place, place, (*text, *blank))
        place = self._extent(units[index - 1])[1]
        # A comment that stands deeper than this block belongs to the statement before.
        while place < len(self.lines) and re.match(rf"{re.escape(indent)}[ \t]+#", self.lines[place]):
            place += 1
        return Change(place, place, (*blank, *text))

    def _unit(self, old: Block, new: Block, level: int) -> Iterator[Change]:
        """One statement, changed inside: what is new in its header and its blocks, or all of it."""
        if same(old, new):
            return
        try:
            yield from list(self._inside(old[0], new[0], level))
        except _Coarser:
            yield Change(*self._extent(old), tuple(self._text(new, self._indent(old))))

    def _inside(self, old: ast.AST, new: ast.AST, level: int) -> Iterator[Change]:
        if type(old) is not type(new) or not _parts(old) or level >= self.depth:
            raise _Coarser
        if not _same_header(old, new):
            yield self._header(old, new)
        before, after = _parts(old), _parts(new)
        if [name for name, _ in before] != [name for name, _ in after]:
            raise _Coarser
        for (name, stock), (_, mended) in zip(before, after, strict=True):
            if name in ("handlers", "cases") or (name == "orelse" and self._is_elif(stock)):
                if len(stock) != len(mended):
                    raise _Coarser
                for one, other in zip(stock, mended, strict=True):
                    yield from self._inside(one, other, level)
            else:
                yield from self._block(stock, mended, level + 1)

    def _header(self, old: ast.AST, new: ast.AST) -> Change:
        """A compound statement's first lines, up to its colon; comments between them and the body stay."""
        if not isinstance(old, ast.stmt) or not isinstance(new, ast.stmt) or isinstance(new, ast.Match):
            raise _Coarser
        start, body = self._first_line(old) - 1, old.body  # type: ignore[attr-defined]
        self._indent(body)
        end = self._first_line(body[0]) - 1
        while end > start + 1 and re.match(r"\s*(#|$)", self.lines[end - 1]):
            end -= 1
        is_elif = self._is_elif([old])
        indent = re.match(r"[ \t\f]*", self.lines[start]).group()  # type: ignore[union-attr]
        bare = copy.copy(new)
        bare.body, bare.orelse = [ast.Pass()], []  # type: ignore[attr-defined]
        *lines, last = ast.unparse(ast.fix_missing_locations(bare)).split("\n")
        if last.strip() != "pass":
            raise _Coarser
        return Change(start, end, tuple(_indented("el" * is_elif + "\n".join(lines), indent.rpartition("\f")[2])))

    # Where statements stand

    def _units(self, block: Block) -> Iterator[Block]:
        """The statements of a block, those together that share a line."""
        unit: Block = []
        for statement in block:
            if unit and self._first_line(statement) > (unit[-1].end_lineno or 0):
                yield unit
                unit = []
            unit.append(statement)
        yield unit

    def _extent(self, unit: Block) -> tuple[int, int]:
        """The lines of a unit, [start, end); _Coarser where something else stands on them."""
        self._indent(unit)
        end, column = unit[-1].end_lineno or 0, unit[-1].end_col_offset or 0
        if not _REST.fullmatch(self.lines[end - 1].encode()[column:].decode().rstrip("\r\n")):
            raise _Coarser
        return self._first_line(unit[0]) - 1, end

    def _indent(self, unit: Block) -> str:
        line = self.lines[self._first_line(unit[0]) - 1]
        decorated = getattr(unit[0], "decorator_list", [])
        before = line.partition("@")[0] if decorated else line.encode()[: unit[0].col_offset].decode()
        if before.strip():
            raise _Coarser
        return before.rpartition("\f")[2]

    def _first_line(self, statement: ast.stmt) -> int:
        decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
        number = min([statement.lineno, *(decorator.lineno for decorator in decorators)])
        while decorators and number > 1 and not self.lines[number - 1].lstrip().startswith("@"):
            number -= 1
        return number

    def _comments_above(self, line: int) -> int:
        while line and self.lines[line - 1].lstrip().startswith("#"):
            line -= 1
        return line

    def _is_elif(self, block: Sequence[ast.AST]) -> bool:
        first = block[0]
        return isinstance(first, ast.If) and self.lines[first.lineno - 1].encode()[first.col_offset :][:4] == b"elif"

    # New text

    def _text(self, new: Block, indent: str) -> list[str]:
        """The lines of new statements; the stock statements among them, and inside them, keep their own lines."""
        kept: list[list[str]] = []
        lines: list[str] = []
        for number, statement in enumerate(new):
            if number and isinstance(statement, Definition):
                lines += [""] if indent else ["", ""]
            text = ast.unparse(ast.fix_missing_locations(_Keep(self, kept).visit(copy.deepcopy(statement))))
            for line in _indented(text, indent):
                place = line.strip()
                if place.startswith(_STOCK):
                    front = line[: len(line) - len(line.lstrip())]
                    lines += [front + own if own else "" for own in kept[int(place[len(_STOCK) :])]]
                else:
                    lines.append(line)
        return lines

    def own_lines(self, statement: ast.stmt) -> list[str] | None:
        """The stock lines of a statement that is a stock one, without indentation; None where they can't be moved."""
        stock = self.by_place.get(_place(statement))
        if stock is None or not same(stock, statement):
            return None
        try:
            start, end = self._extent([stock])
            start = self._comments_above(start)
            text = textwrap.dedent("\n".join(line.rstrip("\r\n") for line in self.lines[start:end]))
            if _inside_strings(text) or not same(ast.parse(text).body, [statement]):
                return None
        except (_Coarser, SyntaxError, tokenize.TokenError):
            return None
        self.moved.add(_place(stock))
        return text.split("\n")


class _Keep(ast.NodeTransformer):
    """Puts a mark in the place of every stock statement whose lines can be kept."""

    def __init__(self, writer: _Writer, kept: list[list[str]]) -> None:
        self.writer, self.kept = writer, kept

    def visit(self, node: ast.AST) -> ast.AST:
        """The node, or the mark that stands for its lines."""
        own = self.writer.own_lines(node) if isinstance(node, ast.stmt) else None
        if own is None:
            self.generic_visit(node)
            return node
        self.kept.append(own)
        return ast.Expr(ast.Name(f"{_STOCK}{len(self.kept) - 1}", ast.Load()))


def _place(node: ast.stmt) -> tuple[object, ...]:
    """What tells a stock statement from a new one, which stands at a point; see syntax.place."""
    return type(node), node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


def _twins(old: Block, new: ast.stmt) -> bool:
    """Whether a definition was put in the place of one of that name."""
    stock = old[0]
    return type(stock) is type(new) and isinstance(stock, Definition) and stock.name == getattr(new, "name", None)


def _same_header(one: ast.AST, other: ast.AST) -> bool:
    return all(same(getattr(one, f, None), getattr(other, f, None)) for f in one._fields if f not in _BLOCKS)


def _parts(node: ast.AST) -> list[tuple[str, list[ast.stmt]]]:
    """A compound statement's parts that aren't empty: blocks, and lists of handlers or cases."""
    found = ((name, getattr(node, name, None)) for name in _BLOCKS)
    return [(name, part) for name, part in found if isinstance(part, list) and part]


def _indented(text: str, indent: str) -> list[str]:
    """The lines of new text, indented; the inner lines of a string stay, since they are its value."""
    inside, lines = _inside_strings(text), []
    for number, line in enumerate(text.split("\n"), 1):
        deeper = len(line) - len(line.lstrip(" "))
        own = "\t" * (deeper // 4) + line[deeper:] if indent.startswith("\t") else line
        lines.append(line if number in inside or not line else indent + own)
    return lines


def _inside_strings(text: str) -> set[int]:
    """The numbers of the lines, counted from 1, that begin inside a string."""
    inside: set[int] = set()
    opened: list[int] = []
    for token in tokenize.generate_tokens(io.StringIO(text + "\n").readline):
        kind = tokenize.tok_name[token.type]
        if kind.endswith(("STRING", "STRING_START")):
            opened.append(token.start[0])
        if kind.endswith(("STRING", "STRING_END")):
            inside.update(range(opened.pop() + 1, token.end[0] + 1))
    return inside
