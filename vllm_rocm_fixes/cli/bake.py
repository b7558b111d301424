"""`vllm-rocm-fixes bake`: write the mended files over the stock ones."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from . import Stop, add_command, add_vllm_option, installation, selected

if TYPE_CHECKING:
    from . import Subparsers

TEXT = """\
For images that forbid plugins. The stock files and their hashes are kept in vllm-rocm-fixes.baked beside vllm/, where
`unbake` finds them. Each file is written whole or not at all; after an interruption, `bake` finishes and `unbake`
reverts. A second bake changes nothing, and one by a newer vllm-rocm-fixes starts from the stock files again.

The mended files call vllm-rocm-fixes, so unbake before you uninstall it. Without its plugin nothing guards the process:
a patch that is safe only behind a guard isn't baked, and that is told. Source that isn't understood is refused as a
whole; ROCM_FIXES_SKIP leaves a patch out.

exit status: 0 baked, 1 with --check where what is on disk differs, 2 refused: nothing was changed."""


def add_parser(subparsers: Subparsers) -> None:
    """Add this command's parser."""
    parser = add_command(subparsers, "bake", run, "write the mended files over the stock ones in vLLM's folder", TEXT)
    add_vllm_option(parser)
    parser.add_argument(
        "--check", action="store_true", help="write nothing, and tell whether what is on disk is what bake would leave"
    )


def run(args: argparse.Namespace) -> int:
    """Bake, or check. Returns the exit status."""
    from .. import baking

    vllm = installation(args)
    patches, skipped = selected()
    try:
        if args.check:
            lines = baking.check(vllm.root, patches, vllm.version, skipped)
            print("\n".join(lines) or f"baked: vLLM {vllm.version} in {vllm.root}")
            return 1 if lines else 0
        report = baking.bake(vllm.root, patches, vllm.version, skipped)
    except baking.Refused as refused:
        raise Stop(str(refused)) from refused
    except OSError as error:
        raise Stop(interrupted("bake", error)) from error
    for outcome in report.outcomes:
        if outcome.refused:
            print(f"left out: {outcome.patch.name}, {outcome.refused}")
    print("\n".join(f"written: {path}" for path in report.written) or "nothing to write: all is as a bake leaves it")
    return 0


def interrupted(command: str, error: OSError) -> str:
    """The line for an error of the operating system in the midst of it."""
    place = f" ({error.filename})" if error.filename else ""
    return f"{command} was interrupted: {error.strerror}{place}; mend that, then run bake to finish or unbake to revert"
