"""Every release of stock vLLM against every patch: verdicts, and whether the four ways out agree. Reads, runs nothing.

python tests/matrix.py            show the matrix and write docs/support.md; exit 1 on a disagreement
python tests/matrix.py --check    write nothing; exit 1 where docs/support.md is stale, too
"""

from __future__ import annotations

import ast
import dis
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType

from packaging.version import Version
from releases import NIGHTLIES, releases, tree

from vllm_rocm_fixes.diffs import unified
from vllm_rocm_fixes.live import by_name
from vllm_rocm_fixes.mend import mend
from vllm_rocm_fixes.patch import Outcome, Patch, Site
from vllm_rocm_fixes.patches import SERIES
from vllm_rocm_fixes.rewrite import rewrite
from vllm_rocm_fixes.rewrite import same as same_tree
from vllm_rocm_fixes.survey import Surveyed, modules

SUPPORT = Path(__file__).parent.parent / "docs" / "support.md"
_SIGNS = {"needed": "**needed**", "clear": "clear", "absent": "-", "unknown": "unknown"}


@dataclass
class Column:
    """One release: each patch's verdict, and what doesn't hold there."""

    version: str
    verdicts: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    disagreements: list[str] = field(default_factory=list)


def column(version: str) -> Column:
    """Examine one release with every patch, and hold the four ways out of each mended tree against each other."""
    made = Column(version)
    root = tree(version)
    for surveyed in modules(root, SERIES, version):
        for outcome in surveyed.mended.outcomes:
            made.verdicts[outcome.patch.name] = outcome.verdict.kind
            made.reasons[outcome.patch.name] = outcome.verdict.reason
            made.disagreements += _outcome(version, outcome)
        if surveyed.mended.tree is not None:
            made.disagreements += [f"{version} {surveyed.module}: {said}" for said in _ways(surveyed, root)]
    return made


def expected(patch: Patch, version: str) -> bool | None:
    """Whether since and until say that this release has the defect; None for a nightly, which they don't speak of."""
    release = Version(version)
    if release.is_devrelease:
        return None
    return Version(patch.since) <= release and (patch.until is None or release < Version(patch.until))


def _outcome(version: str, outcome: Outcome) -> list[str]:
    patch, kind = outcome.patch, outcome.verdict.kind
    where = f"{version} {patch.name}"
    if outcome.failed:
        return [f"{where}: the edit failed: {outcome.failed}"]
    if kind == "unknown":  # a shape that nobody has seen is shown, by name, and is for a person to look at
        return []
    said = expected(patch, version)
    if said is None or said == (kind == "needed"):
        return []
    span = f"since {patch.since}, until {patch.until or 'no release yet'}"
    return [f"{where}: the source says {kind} ({outcome.verdict.reason}), the patch says {span}"]


def _ways(surveyed: Surveyed, root: Path) -> list[str]:
    """What is wrong with a mended tree: import, live, bake and diff must give that tree, and mending again nothing."""
    mended, source, path = surveyed.mended, surveyed.source, surveyed.path
    assert mended.tree is not None and mended.code is not None and source is not None and path is not None
    said = []
    baked = rewrite(source, mended.tree)
    if not same_tree(ast.parse(baked), mended.tree):
        said.append("bake gives another tree than the import")
    if _apply(source, unified(path.relative_to(root), source, baked)) != baked:
        said.append("diff gives another file than bake")
    # Live takes functions out of the code that the import runs; from the baked file they must be the same.
    codes = (compile(baked, str(path), "exec", dont_inherit=True), mended.code)
    from_file, live = ([(n, _does(c)) for n, found in by_name(code).items() for c in found] for code in codes)
    if from_file != live:
        said.append("live gives other functions than bake")
    patches = [outcome.patch for outcome in mended.outcomes if outcome.applied]
    again = mend(baked, str(path), patches, Site(root))
    if again.tree is not None or any(o.verdict.kind != "clear" for o in again.outcomes):
        said.append("mending twice isn't mending once")
    return said


def _does(code: CodeType) -> list[object]:
    """What a function does, without what its line numbers alone decide: new nodes stand on the line of their mark.

    CPython keeps a NOP for a `try` or `with` that begins on a line of its own, and jumps count it. From 3.13 on it
    makes one instruction of two accesses to local variables that stand on one line.
    """
    jumps = {*dis.hasjrel, *dis.hasjabs}
    steps: list[object] = [code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_freevars]
    for step in dis.get_instructions(code):
        if step.opname not in ("NOP", "EXTENDED_ARG"):
            value = _does(step.argval) if isinstance(step.argval, CodeType) else step.argval
            accesses = re.findall(r"(?:LOAD|STORE)_FAST", step.opname)
            if len(accesses) == 2:
                steps += [(access, repr(name)) for access, name in zip(accesses, value)]
            elif step.opname == "LOAD_FAST_BORROW":
                steps.append(("LOAD_FAST", repr(value)))
            else:
                steps.append((step.opname, None if step.opcode in jumps else _said(value)))
    return steps


def _said(value: object) -> str:
    """A constant as text: CPython may give the same set another order each time that it compiles it."""
    return f"{sorted(map(repr, value))}" if isinstance(value, frozenset) else repr(value)


def _apply(before: bytes, diff: bytes) -> bytes:
    """What a unified diff of one file makes of it, taken at its word: every context line must be there."""
    old, new, at = before.splitlines(keepends=True), [], 0
    for line in diff.splitlines(keepends=True):
        if line.startswith(b"@@"):
            start = int(line.split()[1].split(b",")[0][1:]) - 1
            new += old[at:start]
            at = start
        elif line[:1] in (b" ", b"-") and not line.startswith(b"--- "):
            if old[at].rstrip(b"\r\n") != line[1:].rstrip(b"\r\n"):
                return b""
            new += [old[at]] if line[:1] == b" " else []
            at += 1
        elif line.startswith(b"+") and not line.startswith(b"+++ "):
            new.append(line[1:])
    return b"".join([*new, *old[at:]])


def table(columns: list[Column]) -> str:
    """docs/support.md: for each release, what each patch finds there."""
    names = [patch.name for patch in SERIES]
    rows = [
        "# What each release needs",
        "",
        "Written by `make matrix`, from the sources of each release. **needed**: the defect is there, and this patch",
        "mends it; clear: it isn't; -: the module isn't part of that release; unknown: a shape that nobody has seen,",
        "left as it is. What an installed vLLM needs is read off its own files (`vllm-rocm-fixes status`), not here.",
        "",
        f"| vLLM | {' | '.join(names)} |",
        f"|---{'|---' * len(names)}|",
    ]
    rows += [f"| {c.version} | {' | '.join(_SIGNS[c.verdicts[name]] for name in names)} |" for c in columns]
    rows += ["", "| patch | what it does | origin | since | until |", "|---|---|---|---|---|"]
    rows += [f"| {p.name} | {p.summary} | {', '.join(p.origin)} | {p.since} | {p.until or ''} |" for p in SERIES]
    return "\n".join(rows) + "\n"


def listed() -> list[str]:
    """The releases that docs/support.md has a row for."""
    return re.findall(r"^\| (\d\S*) \|", SUPPORT.read_text(), re.MULTILINE)


def columns(versions: list[str]) -> list[Column]:
    """One column a release, two at a time; a release that can't be fetched or read is a disagreement of its own."""
    with ProcessPoolExecutor(2) as pool:
        return list(pool.map(_contained, versions))


def _contained(version: str) -> Column:
    try:
        return column(version)
    except Exception as error:
        unread = {patch.name: "unknown" for patch in SERIES}
        said = f"{type(error).__name__}: {error}"
        return Column(version, unread, dict.fromkeys(unread, said), [f"{version}: {said}"])


def main(arguments: list[str]) -> int:
    """Show the matrix; see the docstring of this file for the arguments and the exit status."""
    known = sorted([*releases(), *NIGHTLIES], key=Version)
    made = columns(known)
    width = max(len(version) for version in known)
    for patch in SERIES:
        print(f"\n{patch.name}: since {patch.since}, until {patch.until or 'no release yet'}")
        for col in made:
            print(f"  {col.version:{width}} {col.verdicts[patch.name]:8} {col.reasons[patch.name]}")
    unknown = [
        f"{c.version} {name}: {c.reasons[name]}" for c in made for name, v in c.verdicts.items() if v == "unknown"
    ]
    wrong = [said for col in made for said in col.disagreements]
    text = table(made)
    if "--check" not in arguments:
        SUPPORT.parent.mkdir(exist_ok=True)
        SUPPORT.write_text(text)
    elif not SUPPORT.exists() or SUPPORT.read_text() != text:
        wrong.append("docs/support.md is stale: run `make matrix`")
    print(f"\n{len(made)} releases, {len(SERIES)} patches, {len(unknown)} unknown, {len(wrong)} disagreements")
    print("\n".join([*(f"unknown: {u}" for u in unknown), *(f"disagreement: {w}" for w in wrong)]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
