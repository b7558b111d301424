"""`vllm-rocm-fixes status`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from . import add_command, add_vllm_option, all_patches, installation

if TYPE_CHECKING:
    from . import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    """Add this command's parser."""
    parser = add_command(subparsers, "status", run, "tell what each patch finds in this vLLM")
    add_vllm_option(parser)


def run(args: argparse.Namespace) -> int:
    """Print the table. Returns the exit status."""
    from ..survey import survey

    vllm = installation(args)
    print(f"vLLM {vllm.version} in {vllm.root}")
    for outcome in survey(vllm.root, all_patches(), vllm.version):
        print(f"{outcome.patch.name}: {outcome.verdict.kind}, {outcome.verdict.reason}")
    return 0
