"""`vllm-rocm-fixes diff`: what would change, as a patch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from . import Stop, add_command, add_names, add_vllm_option, installation, selected

if TYPE_CHECKING:
    from ..patch import Outcome
    from . import Subparsers

TEXT = """\
The diff goes to the standard output, and `git apply` or `patch -p1` takes it in the folder that holds vllm/. Each patch
has a header in the form of DEP-3. What isn't needed, or isn't understood, is told on the standard error.

With --output, a quilt series is written instead: the file `series` and numbered patches, of which the first adds the
package vllm_rocm_fixes with what the others call. It is for who builds vLLM from source without this overlay. Nothing
guards such a vLLM's process, so a patch that is safe only behind a guard is left out, and that is told.

ROCM_FIXES_SKIP leaves patches out here too.

exit status: 0, or 1 where a patch is unknown or failed, 2 for bad input."""


def add_parser(subparsers: Subparsers) -> None:
    """Add this command's parser."""
    parser = add_command(subparsers, "diff", run, "print what would change in vLLM, as a patch", TEXT)
    add_names(parser)
    add_vllm_option(parser)
    parser.add_argument("--output", metavar="DIR", type=Path, help="write a quilt series into this folder")


def run(args: argparse.Namespace) -> int:
    """Print the diff, or write the series. Returns the exit status."""
    from .. import diffs
    from ..guards import GUARDS

    vllm = installation(args)
    patches, skipped = selected(args.names)
    if args.output:
        skipped |= {guard.name for guard in GUARDS}
    try:
        found, outcomes = diffs.differences(vllm.root, patches, vllm.version, skipped)
    except ValueError as error:
        raise Stop(f"{error}; leave the patch out with ROCM_FIXES_SKIP, and report it") from error
    if args.output:
        write(args.output, diffs.series(found) if found else {"series": b""})
        print(f"{args.output}: a series of {len(found)} patches", file=sys.stderr)
    else:
        sys.stdout.buffer.write(diffs.text(found))
    return tell(outcomes)


def tell(outcomes: list[Outcome]) -> int:
    """Say on stderr what isn't part of the diff, and why. Returns 1 where something is unknown or failed."""
    status = 0
    for outcome in outcomes:
        if outcome.applied:
            continue
        kind = "failed" if outcome.failed else "refused" if outcome.refused else outcome.verdict.kind
        reason = outcome.failed or outcome.refused or outcome.verdict.reason
        print(f"{outcome.patch.name}: {kind}, {reason}", file=sys.stderr)
        status |= kind in ("unknown", "failed")
    return status


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write the series, in the place of one that is there. Raises Stop where the folder holds something else."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        there = {path.name for path in folder.iterdir()}
        known = set((folder / "series").read_text().split()) | {"series"} if "series" in there else set()
        if there - known:
            raise Stop(f"{folder} holds {min(there - known)}, which is no part of a series: name a new or empty folder")
        for name in there:
            (folder / name).unlink()
        for name, content in files.items():
            (folder / name).write_bytes(content)
    except OSError as error:
        raise Stop(f"{folder} can't be written: {error.strerror}") from error
