"""The command line: one module for each command, and main().

A command is a module of this package named in COMMANDS. It has `add_parser(subparsers)`, which adds its parser with
`add_command` below, and `run(args) -> int`, which returns the exit status: 0 done, 1 what was asked for isn't so, 2 bad
input or a refusal. Whatever stops a command for the user to mend is raised as Stop: main() prints it as one line.
Only the module of the wanted command is imported, and none of them imports vLLM into this process.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .. import __version__

if TYPE_CHECKING:
    from ..installation import Installation
    from ..patch import Patch

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

PROGRAM = "vllm-rocm-fixes"
COMMANDS = ("status", "diff", "bake", "unbake", "ps", "doctor", "trace", "verify")


class Stop(Exception):
    """What stops a command, in one line: what, where, what to do."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """End the process with status 2 and one line on stderr."""
        self.exit(2, f"{PROGRAM}: {message}; see {self.prog} --help\n")


def add_command(
    subparsers: Subparsers, name: str, run: Callable[[argparse.Namespace], int], summary: str, text: str = ""
) -> argparse.ArgumentParser:
    """A parser for one command; summary is its line in the overview, text what its own --help says below the usage."""
    parser = subparsers.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.\n\n{text}".rstrip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def number(kind: type[int] | type[float], what: str, most: float) -> Callable[[str], float]:
    """The type of an option that takes a number above 0 and no more than most; what says in words which."""

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = kind()
        if not 0 < value <= most:
            raise argparse.ArgumentTypeError(f"{text} isn't {what}")
        return value

    return read


def add_vllm_option(parser: argparse.ArgumentParser) -> None:
    """The option --vllm DIR."""
    parser.add_argument(
        "--vllm",
        metavar="DIR",
        type=Path,
        help="the folder that holds vllm/: an unpacked image's site-packages, or a checkout; without it, the vLLM that "
        "this Python would import",
    )


def installation(args: argparse.Namespace) -> Installation:
    """The vLLM that --vllm names, or the installed one. Raises Stop where there is none."""
    from ..installation import find

    try:
        return find(args.vllm)
    except LookupError as error:
        raise Stop(str(error)) from error


def add_names(parser: argparse.ArgumentParser) -> None:
    """The argument NAME ..., which chooses patches."""
    from ._completion import offer

    action = parser.add_argument("names", metavar="NAME", nargs="*", help="the patches to take; without it, all")
    offer(action, (patch.name for patch in all_patches()))


def all_patches() -> tuple[Patch, ...]:
    """The series."""
    from ..series import real

    return real()


def selected(names: Sequence[str] = ()) -> tuple[list[Patch], frozenset[str]]:
    """The patches of these names, in the order of the series, and all that ROCM_FIXES_SKIP names; no names: all.

    Raises Stop for a name that isn't in the series.
    """
    from .. import settings
    from ..guards import GUARDS

    series = all_patches()
    known, guards = [patch.name for patch in series], [guard.name for guard in GUARDS]
    for name in names:
        if name in guards:
            raise Stop(
                f"{name} is a guard: it acts on a process and edits no file of vLLM's, so there is no diff of it"
            )
        if name not in known:
            raise Stop(f"no patch is called {name}{settings.nearest(name, known)}")
    switches = settings.read([*known, *guards])
    for complaint in switches.complaints:
        print(f"{PROGRAM}: {complaint}", file=sys.stderr)
    return [patch for patch in series if not names or patch.name in names], switches.skip


def build_parser(commands: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of the whole command line, with the parsers of the commands that are named."""
    parser = Parser(
        prog=PROGRAM,
        description="See what vllm-rocm-fixes finds in a vLLM, what it would change there, and what it did.",
        epilog=f"'{PROGRAM} COMMAND --help' tells more. Shell completion: eval \"$({PROGRAM} --completion bash)\"",
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    parser.add_argument(
        "--completion", choices=("bash", "zsh", "fish"), help="print a completion script for that shell, and end"
    )
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", parser_class=Parser)
    for name in commands:
        importlib.import_module(f"{__name__}.{name}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status; --help, bad options and output that goes nowhere end the process."""
    if sys.stdout is None:
        print(f"{PROGRAM}: stdout can't be written: it is closed", file=sys.stderr)
        return 2
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # what it has no character for, such as in a file's name
    try:
        return _main(argv)
    except OSError:
        _flush("\n")  # if stdout takes no more, that was it
        raise
    finally:
        _flush()


def _flush(more: str = "") -> None:
    """Write out what was printed; end the process where stdout doesn't take it."""
    try:
        print(end=more, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python tries again when it ends
        if isinstance(error, BrokenPipeError):  # the reader, such as `head`, has what it wanted
            sys.exit(141)
        print(f"{PROGRAM}: stdout can't be written: {error.strerror}", file=sys.stderr)
        sys.exit(2)


def _main(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    wanted = arguments[:1] if arguments and arguments[0] in COMMANDS else COMMANDS
    parser = build_parser(wanted)
    args: Any = parser.parse_args(arguments)
    try:
        if args.completion:
            from ._completion import script

            print(script(args.completion, parser))
            return 0
        if args.command is None:
            parser.error(f"a command is needed: {', '.join(COMMANDS)}")
        status: int = args.run(args)
        return status
    except Stop as stop:
        print(f"{PROGRAM}: {stop}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
