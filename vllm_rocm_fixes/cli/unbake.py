"""`vllm-rocm-fixes unbake`: put the stock files back."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from . import Stop, add_command, add_vllm_option, installation
from .bake import interrupted

if TYPE_CHECKING:
    from . import Subparsers

TEXT = """\
Every byte is what it was before `bake`, whichever version of vllm-rocm-fixes baked. A file that isn't what was baked,
since vLLM was upgraded or somebody edited it, is left as it is, and that is told.

exit status: 0 done, 1 where a file that was edited still calls vllm-rocm-fixes, 2 refused: nothing was changed."""


def add_parser(subparsers: Subparsers) -> None:
    """Add this command's parser."""
    parser = add_command(subparsers, "unbake", run, "put back the stock files that bake replaced", TEXT)
    add_vllm_option(parser)


def run(args: argparse.Namespace) -> int:
    """Put the files back. Returns the exit status."""
    from .. import baking

    root = installation(args).root
    try:
        report = baking.unbake(root)
        left = baking.state(root)
    except baking.Refused as refused:
        raise Stop(str(refused)) from refused
    except OSError as error:
        raise Stop(interrupted("unbake", error)) from error
    lines = [f"put back: {path}" for path in report.written] + [f"left alone: {remark}" for remark in report.remarks]
    print("\n".join(lines) or "nothing is baked")
    return 1 if left else 0
