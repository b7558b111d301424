"""`vllm-rocm-fixes status`: what each patch finds in a vLLM, whether vLLM would call us, and what is baked."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import add_command, add_vllm_option, installation, selected

if TYPE_CHECKING:
    from ..guards import Guard
    from ..installation import Installation
    from ..patch import Outcome
    from . import Subparsers

TEXT = """\
Reads the files, and runs nothing of vLLM.

verdicts: needed   the defect is there, in a shape that the patch knows
          clear    the place is there, and the defect isn't (mended upstream, or baked)
          absent   this vLLM doesn't have that module
          unknown  the place wasn't found or looks like nothing that is known: vLLM is left alone there
"until" is the first release of vLLM that doesn't need the patch any more.

A guard acts on a process and not on vLLM's files; what it did in a running one is told by `ps`.

exit status: 0, or 1 with --strict where a patch is unknown or fails or a door is shut, 2 for bad input."""
COLOURS = {"needed": "yellow", "clear": "green", "absent": "dim", "unknown": "red"}


def add_parser(subparsers: Subparsers) -> None:
    """Add this command's parser."""
    parser = add_command(subparsers, "status", run, "tell what each patch finds in this vLLM", TEXT)
    add_vllm_option(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    strict = "exit status 1 where a patch is unknown or fails, or a door is shut"
    parser.add_argument("--strict", action="store_true", help=strict)


def run(args: argparse.Namespace) -> int:
    """Print what was found. Returns the exit status."""
    found = read(installation(args), args.vllm is not None)
    if args.json:
        print(json.dumps(found, indent=2))
    elif sys.stdout.isatty() and importlib.util.find_spec("rich"):
        _print_table(found)
    else:
        print("\n".join(_lines(found)))
    wanted = [patch for patch in found["patches"] if patch["outcome"] != "skipped"]
    wrong = any(p["verdict"] == "unknown" or p["outcome"] == "failed" for p in wanted)
    # Of a vLLM that was named, another environment's variables may decide.
    shut = args.vllm is None and not all(door["open"] for door in found["doors"])
    return int(args.strict and (wrong or (shut and any(p["verdict"] == "needed" for p in wanted))))


def read(vllm: Installation, named: bool) -> dict[str, Any]:
    """All that this command tells, as --json prints it; named: by --vllm, so vLLM may be of another Python."""
    from .. import baking, doors
    from ..guards import GUARDS
    from ..survey import survey

    patches, skipped = selected()
    folders = (doors.folders_of(vllm.root) if named else None) or sys.path
    try:
        baked, trouble = baking.state(vllm.root), None
    except baking.Refused as refused:
        baked, trouble = None, str(refused)
    written = {n for f in (baked or {"files": []})["files"] if f["on_disk"] == "baked" for n in f["patches"]}
    outcomes = survey(vllm.root, patches, vllm.version, skipped - {patch.name for patch in patches})
    return {
        "vllm": {
            "version": vllm.version,
            "root": str(vllm.root),
            "metadata": [{"name": m.name, "version": m.version} for m in vllm.metadata],
            "believed": vllm.doubt is None,
            "doubt": vllm.doubt,
        },
        "patches": [_patch(outcome, skipped, written) for outcome in outcomes],
        "guards": [_guard(guard, folders, skipped) for guard in GUARDS],
        "doors": [vars(door) for door in doors.look(folders)],
        "baked": baked,
        "baked_trouble": trouble,
    }


def _patch(outcome: Outcome, skipped: frozenset[str], written: set[str]) -> dict[str, Any]:
    patch, verdict = outcome.patch, outcome.verdict
    kind, reason = "none", verdict.reason
    if patch.name in skipped:
        kind, reason = "skipped", f"{reason}; named in ROCM_FIXES_SKIP"
    elif patch.name in written:
        kind, reason = "baked", f"{reason}; baked"
    elif outcome.failed or outcome.refused:
        kind = "failed" if outcome.failed else "refused"
        reason = f"{reason}; {kind}, stock is kept: {outcome.failed or outcome.refused}"
    elif outcome.applied:
        kind = "applies"
    return {
        "name": patch.name,
        "module": patch.module,
        "verdict": verdict.kind,
        "outcome": kind,
        "reason": reason,
        "summary": patch.summary,
        "origin": list(patch.origin),
        "since": patch.since,
        "until": patch.until,
    }


def _guard(guard: Guard, folders: Sequence[str], skipped: frozenset[str]) -> dict[str, Any]:
    """A guard is needed where one of its packages can be imported, from what lies in the folders."""
    there = [p for p in guard.packages if any(_holds(Path(folder), p) for folder in folders)]
    verdict, reason = "absent", f"{' and '.join(guard.packages)} can't be imported here"
    if guard.name in skipped:
        verdict, reason = "clear", "named in ROCM_FIXES_SKIP: nothing is guarded"
    elif there:
        verdict, reason = "needed", f"{' and '.join(there)} can be imported here: the import is guarded"
    return {
        "name": guard.name,
        "verdict": verdict,
        "reason": reason,
        "summary": guard.summary,
        "origin": list(guard.origin),
        "until": guard.until,
    }


def _holds(folder: Path, package: str) -> bool:
    return (folder / package / "__init__.py").is_file() or (folder / f"{package}.py").is_file()


# For people


def _head(found: dict[str, Any]) -> Iterator[str]:
    vllm = found["vllm"]
    believed = "its metadata says the same" if vllm["metadata"] else "there is no metadata beside it"
    yield f"vLLM {vllm['version'] or 'of unknown version'} in {vllm['root']} ({vllm['doubt'] or believed})"
    for door in found["doors"]:
        yield f"door {door['group']}: {'open' if door['open'] else 'closed'}, {door['reason']}"
    baked = found["baked"]
    if found["baked_trouble"]:
        yield f"baked: {found['baked_trouble']}"
    elif baked:
        state = "" if baked["finished"] else "; it was interrupted, so run bake or unbake again"
        yield f"baked by {baked['overlay']}: these files{state}"
        yield from (f"  {f['path']} ({f['on_disk']})" for f in baked["files"])


def _rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """For each patch and guard the cells of its row: three short ones, the reason, and where it is and comes from."""
    return [
        (
            *(one["name"], one["verdict"], one["until"] or "-", one["reason"]),
            f"{one.get('module', '(guard)')}; {_named(one['origin'])}",
        )
        for one in (*found["patches"], *found["guards"])
    ]


def _named(origins: Sequence[str]) -> str:
    """Origins, each project named once: "vLLM #44823, #43331, AITER #4585"."""
    numbers: dict[str, list[str]] = {}
    for origin in origins:
        project, _, number = origin.rpartition("#")
        numbers.setdefault(project.strip(), []).append(f"#{number}")
    return ", ".join(f"{project} {', '.join(each)}" for project, each in numbers.items())


HEADINGS = ("patch", "verdict", "until", "reason")


def _lines(found: dict[str, Any]) -> Iterator[str]:
    yield from _head(found)
    yield ""
    rows = [(*HEADINGS, ""), *_rows(found)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    width = max(80, shutil.get_terminal_size((100, 24)).columns)  # a pipe has none of its own
    for *short_ones, reason, where in rows:
        start = "".join(f"{cell:<{wide + 2}}" for cell, wide in zip(short_ones, widths, strict=True))
        yield from _wrapped(start, reason, width)
        yield from _wrapped("    ", where, width)


def _wrapped(start: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=start, subsequent_indent=" " * len(start), break_on_hyphens=False)


def _print_table(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    for line in _head(found):
        console.print(escape(line), highlight=False)
    table = Table(*HEADINGS[:3])
    table.add_column(HEADINGS[3], overflow="fold")
    for name, verdict, until, reason, where in _rows(found):
        colour = COLOURS.get(verdict, "none")
        table.add_row(name, f"[{colour}]{verdict}[/]", until, f"{escape(reason)}\n[dim]{escape(where)}[/dim]")
    console.print(table)
