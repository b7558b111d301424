"""Changed stock modules: what a fork, a formatter, an editor or a broken disk may make of a real one.

A change is a function of a module's text and two numbers, so that hypothesis can draw, shrink and repeat it.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable

MARK = "_mark_"  # statements that somebody put in: whatever is mended, they have to stay
# Where the patches look; most changes are made there, or few would touch anything.
HOT = re.compile(
    r"aiter|tilelang|flash_attn|deep_ep|mori|nixl|moonep|pplx|has_|find_spec|import_module|warmup|sanitize|subprocess|"
    r"PYTHONPATH|total_memory|amdsmi|warning_once|forward_hip|Popen|proc\.start|download_model|ray\.init|cls\(|sys\.modules|vllm\.model",
    re.IGNORECASE,
)
HELPERS = ("need", "check", "load", "answer", "known", "offers", "resolve", "sys", "name", "has_kernel", "cleaned")
_WRAPPERS = (
    "if True:",
    "if TYPE_CHECKING:",
    "if not HAS_SOMETHING:",
    "try:",
    "with suppress(Exception):",
    "for _ in range(1):",
    "def wrapped():",
    "async def wrapped():",
    "class Wrapped:",
    "if some := compute():",
)


class _Statements:
    """The statements of a text that stand on lines of their own."""

    def __init__(self, text: str) -> None:
        self.tree = ast.parse(text)
        self.lines = text.splitlines(keepends=True) or [""]
        found = [n for n in ast.walk(self.tree) if isinstance(n, ast.stmt) and hasattr(n, "end_lineno")]
        self.all = [s for s in found if self._alone(s)]
        self.hot = [s for s in self.all if len(self.text(s)) < 4000 and HOT.search(self.text(s))] or self.all

    def pick(self, place: int) -> ast.stmt:
        """Most numbers lead to a statement that the patches may look at."""
        chosen = self.hot if place % 10 < 8 else self.all
        if not chosen:
            raise ValueError("nothing is left")
        return chosen[place // 10 % len(chosen)]

    def extent(self, statement: ast.stmt) -> tuple[int, int]:
        first = min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", []))])
        return first - 1, statement.end_lineno or first

    def text(self, statement: ast.stmt) -> str:
        start, end = self.extent(statement)
        return "".join(self.lines[start:end])

    def indent(self, statement: ast.stmt) -> str:
        line = self.lines[self.extent(statement)[0]]
        return line[: len(line) - len(line.lstrip(" \t"))]

    def put(self, start: int, end: int, new: str) -> str:
        new = new if not new or new.endswith("\n") else new + "\n"
        return "".join([*self.lines[:start], new, *self.lines[end:]])

    def _alone(self, statement: ast.stmt) -> bool:
        line = self.lines[statement.lineno - 1] if statement.lineno <= len(self.lines) else ""
        is_elif = isinstance(statement, ast.If) and line.lstrip().startswith("elif")
        return not line[: statement.col_offset].strip() and not is_elif


def _shifted(text: str, old: str, new: str) -> str:
    """Lines moved to another indentation; inside strings too, as a careless editor does."""
    return "".join(
        new + line[len(old) :] if line.startswith(old) and line.strip() else line for line in text.splitlines(True)
    )


def delete(text: str, place: int, choice: int) -> str:
    found = _Statements(text)
    return found.put(*found.extent(found.pick(place)), "")


def empty(text: str, place: int, choice: int) -> str:
    found = _Statements(text)
    statement = found.pick(place)
    return found.put(*found.extent(statement), found.indent(statement) + "pass\n")


def duplicate(text: str, place: int, choice: int) -> str:
    found = _Statements(text)
    start, end = found.extent(found.pick(place))
    return found.put(end, end, "".join(found.lines[start:end]))


def move(text: str, place: int, choice: int) -> str:
    found = _Statements(text)
    statement, target = found.pick(place), found.pick(choice)
    start, end = found.extent(statement)
    moved = _shifted(found.text(statement), found.indent(statement), found.indent(target))
    at = found.extent(target)[0]
    lines = found.lines
    if start <= at < end:
        return text
    if at < start:
        return "".join([*lines[:at], moved, *lines[at:start], *lines[end:]])
    return "".join([*lines[:start], *lines[end:at], moved, *lines[at:]])


def swap(text: str, place: int, choice: int) -> str:
    found = _Statements(text)
    one = found.pick(place)
    start, end = found.extent(one)
    following = [s for s in found.all if found.extent(s)[0] >= end and s.col_offset == one.col_offset]
    if not following:
        return text
    low, high = found.extent(following[0])
    lines = found.lines
    return "".join([*lines[:start], *lines[low:high], *lines[end:low], *lines[start:end], *lines[high:]])


def wrap(text: str, place: int, choice: int) -> str:
    found = _Statements(text)
    statement = found.pick(place)
    indent, head = found.indent(statement), _WRAPPERS[choice % len(_WRAPPERS)]
    new = f"{indent}{head}\n" + _shifted(found.text(statement), indent, indent + "    ")
    if head == "try:":
        caught = ("except ImportError:", "except Exception as error:", "finally:", "except BaseException:")
        new = new.rstrip("\n") + f"\n{indent}{caught[choice // 7 % 4]}\n{indent}    {MARK}{place}()\n"
    return found.put(*found.extent(statement), new)


def mark(text: str, place: int, choice: int) -> str:
    """Somebody's own statement before, or after, one of stock's."""
    found = _Statements(text)
    statement = found.pick(place)
    start, end = found.extent(statement)
    at = end if choice % 3 == 0 else start
    return found.put(at, at, f"{found.indent(statement)}{MARK}{place}()\n")


def mark_body(text: str, place: int, choice: int) -> str:
    """The same as the first, or last, statement of a function."""
    found = _Statements(text)
    functions = [s for s in found.hot if isinstance(s, ast.FunctionDef) and s.body[0] in found.all]
    if not functions:
        return text
    body = functions[place % len(functions)].body
    statement = body[-1 if choice % 3 == 0 else 0]
    start, end = found.extent(statement)
    at = end if choice % 2 else start
    return found.put(at, at, f"{found.indent(statement)}{MARK}{place}()\n")


def leave(text: str, place: int, choice: int) -> str:
    """An early end that a fork put in."""
    found = _Statements(text)
    statement = found.pick(place)
    start, _ = found.extent(statement)
    indent = found.indent(statement)
    ends = ("return None", "return _fork()", "raise RuntimeError", "global _shared", "import os as aiter")
    return found.put(start, start, f"{indent}if {MARK}{place}():\n{indent}    {ends[choice % len(ends)]}\n")


def bring(text: str, place: int, choice: int) -> str:
    """One more import of a package that the patches are about."""
    found = _Statements(text)
    statement = found.pick(place)
    start, _ = found.extent(statement)
    lines = (
        "import aiter",
        "from aiter import dtypes",
        "import tilelang.language as T",
        "from mori.ops import EpDispatchCombineConfig",
        "import flash_attn",
        "from .mori_prepare_finalize import MoriMore",
        "from vllm.model_executor.warmup.qwen_more import qwen_more_warmup",
        "import deep_ep, os",
        "from aiter.ops import *",
    )
    return found.put(start, start, f"{found.indent(statement)}{lines[choice % len(lines)]}\n")


def rename(text: str, place: int, choice: int) -> str:
    """A name becomes another everywhere, or (one time in three) only where it stands."""
    found = _Statements(text)
    body = found.text(found.pick(place))
    words = sorted(set(re.findall(r"[A-Za-z_]\w{2,}", body)) - {"import", "from", "self", "def", "return", "class"})
    if not words:
        return text
    word = words[choice % len(words)]
    new = HELPERS[place % len(HELPERS)] if choice % 4 == 0 else f"{word}_x"
    if choice % 3:
        return re.sub(rf"\b{word}\b", new, text)
    at = text.find(body)
    return text[:at] + re.sub(rf"\b{word}\b", new, body) + text[at + len(body) :]


def decorate(text: str, place: int, choice: int) -> str:
    found = _Statements(text)
    definitions = [s for s in found.hot if isinstance(s, ast.FunctionDef | ast.ClassDef)]
    if not definitions:
        return text
    statement = definitions[place % len(definitions)]
    start, _ = found.extent(statement)
    lines = ("@functools.cache", f"@{MARK}{place}", "@torch.compile(dynamic=True)", "@staticmethod")
    return found.put(start, start, f"{found.indent(statement)}{lines[choice % len(lines)]}\n")


def sign(text: str, place: int, choice: int) -> str:
    """Another signature."""
    found = _Statements(text)
    functions = [s for s in found.hot if isinstance(s, ast.FunctionDef)]
    if not functions:
        return text
    statement = functions[place % len(functions)]
    line = found.lines[statement.lineno - 1]
    edits = (
        ("(", "(fork, "),
        ("def ", "async def "),
        ("(self, ", "(this, "),
        ("()", "(*args, **kwargs)"),
        ("(", "(*, "),
    )
    return found.put(statement.lineno - 1, statement.lineno, line.replace(*edits[choice % len(edits)], 1))


def negate(text: str, place: int, choice: int) -> str:
    """Another condition, constant or comparison."""
    found = _Statements(text)
    start, end = found.extent(found.pick(place))
    body = "".join(found.lines[start:end])
    edits = (
        ("if ", "if not "),
        ("None", "0"),
        (" and ", " or "),
        ("True", "False"),
        (" is ", " is not "),
        ("==", "!="),
    )
    return found.put(start, end, body.replace(*edits[choice % len(edits)], 1))


def caught(text: str, place: int, choice: int) -> str:
    """Other exceptions are caught."""
    places = [m.start() for m in re.finditer(r"except [^\n]*:\n", text)]
    if not places:
        return text
    at = places[place % len(places)]
    new = ("except Exception:\n", "except BaseException as error:\n", "except:\n", "except (OSError, KeyError):\n")
    return text[:at] + re.sub(r"except [^\n]*:\n", new[choice % 4], text[at:], count=1)


def join(text: str, place: int, choice: int) -> str:
    """Two statements on one line, or one over several."""
    found = _Statements(text)
    statement = found.pick(place)
    start, end = found.extent(statement)
    if end - start != 1 or hasattr(statement, "body"):
        return text
    line = found.lines[start].rstrip("\n")
    new = (
        f"{line}; {MARK}{place}()\n",
        f"{found.indent(statement)}{MARK}{place}(); {line.lstrip()}\n",
        f"{line}  # ü\n",
    )
    return found.put(start, end, new[choice % 3])


def reformat(text: str, place: int, choice: int) -> str:
    return ast.unparse(ast.parse(text)) + "\n"


def halve(text: str, place: int, choice: int) -> str:
    """The file ends somewhere, at a line's end or within one."""
    at = len(text) * (place % 1000) // 1000
    return text[: text.find("\n", at) + 1] if choice % 4 else text[:at]


def halve_body(text: str, place: int, choice: int) -> str:
    """The second half of a block is gone."""
    found = _Statements(text)
    blocks = [s for s in found.hot if getattr(s, "body", None) and len(s.body) > 1]
    if not blocks:
        return text
    body = blocks[place % len(blocks)].body
    kept = body[: 1 + choice % (len(body) - 1)]
    return found.put(kept[-1].end_lineno, body[-1].end_lineno, "")


def spoil(text: str, place: int, choice: int) -> str:
    """A character that doesn't belong there."""
    at = place * 7919 % (len(text) or 1)
    return text[:at] + ("(", ")", "\t", "'", '"""', "\\", ":", " ", "\x00", "§", "\n")[choice % 11] + text[at:]


def tabs(text: str, place: int, choice: int) -> str:
    return re.sub(r"(?m)^( {4})+", lambda m: "\t" * (len(m.group()) // 4), text)


def form_feeds(text: str, place: int, choice: int) -> str:
    found = _Statements(text)
    starts = {found.extent(s)[0] for s in found.all if s.col_offset == 0}
    kinds = ("\f", "\f\n", "# page\f\n")
    return "".join(kinds[choice % 3] * (number in starts) + line for number, line in enumerate(found.lines))


def comments(text: str, place: int, choice: int) -> str:
    """A comment after each line that takes one, and one above it."""
    done: dict[int, int] = {}
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NEWLINE:
                done[token.start[0]] = token.start[1]
    except (tokenize.TokenError, SyntaxError):
        return text
    lines = text.split("\n")
    return "\n".join(f"{ln}  # é {i}" if i + 1 in done and "#" not in ln else ln for i, ln in enumerate(lines))


CHANGES: tuple[Callable[[str, int, int], str], ...] = (
    *(delete, empty, duplicate, move, swap, wrap, mark, mark_body, leave, bring, rename, decorate, sign, negate),
    *(caught, join, halve_body, wrap, mark, mark_body, move, duplicate),
    *(reformat, halve, spoil, tabs, form_feeds, comments),
)  # fmt: skip


def _latin(text: str) -> bytes:
    return b"# -*- coding: latin-1 -*-\n" + ("# \xe9\n" + text).encode("latin-1", "replace")


ENCODINGS: dict[str, Callable[[str], bytes]] = {
    "utf-8": lambda text: text.encode("utf-8", "surrogatepass"),
    "utf-8 with BOM": lambda text: b"\xef\xbb\xbf" + text.encode(),
    "latin-1": _latin,
    "cp1252": lambda text: b"#!/usr/bin/python\n# vim: set fileencoding=cp1252 :\n" + text.encode("cp1252", "replace"),
    "utf-7": lambda text: b"# coding: utf-7\n" + text.encode("utf-7"),
    "utf-16": lambda text: text.encode("utf-16"),
    "no such encoding": lambda text: b"# coding: klingon\n" + text.encode(),
    "wrong encoding": lambda text: b"# coding: ascii\n# \xff\n" + text.encode(),
    "CRLF": lambda text: text.replace("\n", "\r\n").encode(),
    "CR": lambda text: text.replace("\n", "\r").encode(),
    "mixed line ends": lambda text: "".join(
        line.rstrip("\n") + ("\r\n" if number % 3 else "\n") for number, line in enumerate(text.splitlines(True))
    ).encode(),
    "no last line end": lambda text: text.rstrip("\n").encode(),
}


def changed(text: str, steps: list[tuple[Callable[[str, int, int], str], int, int]], encoding: str) -> bytes:
    """The text after these changes, one on top of the other, as bytes; what isn't Python stays as it is."""
    for change, place, choice in steps:
        try:
            text = change(text, place, choice)
        except (SyntaxError, ValueError):
            break
    try:
        return ENCODINGS[encoding](text)
    except UnicodeError:
        return text.encode("utf-8", "surrogatepass")
