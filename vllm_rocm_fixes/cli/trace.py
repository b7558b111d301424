"""`vllm-rocm-fixes trace`: run a command, and tell who imported what too early, and who initialised the GPU."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import traces
from ..traces import Event, Process
from . import PROGRAM, Stop, add_command

if TYPE_CHECKING:
    from . import Subparsers

_TEXT = f"""\
The command runs unchanged, with its own input, output and signals; Ctrl-C ends it and not the trace. Every Python
process below it is seen, whether it was started, spawned or forked, and tells:

  - who first imported each of {", ".join(traces.HAZARDS[:5])},
    {", ".join(traces.HAZARDS[5:])}, and the chain of files that led there;
  - when the GPU was asked for (torch.cuda._lazy_init), when a device file was found open, and by whom;
  - when PYTHONPATH, LD_LIBRARY_PATH or the dlopen flags changed, and which libraries were opened for all (RTLD_GLOBAL).

It works through PYTHONPATH: children find one entry more there. Not seen are Pythons that are started with -I, -E or
-S or with an environment of their own (the report names those that a traced process started), variables that C code
sets, and a GPU that is used without an open device file or torch.cuda.

Exit status: the command's."""
_FRAMES = 12  # of a chain are printed; --json and --html have all


def add_parser(subparsers: Subparsers) -> None:
    """Add this command's parser."""
    parser = add_command(subparsers, "trace", run, "run a command, and tell who imported what too early", _TEXT)
    parser.usage = (
        f"{PROGRAM} trace [--watch NAME] [--json] [--html FILE] [--output FILE] [--device FILE] -- COMMAND ..."
    )
    parser.add_argument("--watch", metavar="NAME", action="append", default=[], help="tell of this module too")
    parser.add_argument(
        "--json", action="store_true", help="print JSON; what the command itself prints then goes to stderr"
    )
    parser.add_argument("--html", metavar="FILE", type=Path, help="draw it: one page that needs nothing else")
    parser.add_argument("--output", metavar="FILE", type=Path, help="write the report there, and not to stdout")
    parser.add_argument(
        "--device",
        metavar="FILE",
        action="append",
        help=f"a device file to look for; without it, {' and '.join(traces.DEVICES)}",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="what to run")


def run(args: argparse.Namespace) -> int:
    """Run the command, and print what was traced. Returns the command's exit status."""
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise Stop(f"trace needs a command: {PROGRAM} trace -- vllm serve MODEL")
    with tempfile.TemporaryDirectory(prefix="vllm-rocm-fixes-trace-") as folder:
        traces.prepare(Path(folder), args.watch, args.device or traces.DEVICES)
        origin = time.monotonic_ns()
        apart = args.json and args.output is None
        status, ends, titles = _watch(command, Path(folder), sys.stderr.fileno() if apart else None)
        seconds = (time.monotonic_ns() - origin) / 1e9
        processes = traces.read(Path(folder), ends, titles)
    report = {
        "command": command,
        "status": status,
        "seconds": round(seconds, 3),
        "overhead": _overhead(processes),
        "processes": traces.describe(processes, origin),
    }
    text = json.dumps(report, indent=2) if args.json else "\n".join(_lines(report, processes, origin))
    if args.html:
        _write(args.html, page(report, processes, origin))
    if args.output:
        _write(args.output, text + "\n")
    else:
        print(text)
    return status


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Stop(f"the report can't be written to {file}: {error.strerror}") from error


def _watch(command: list[str], folder: Path, stdout: int | None) -> tuple[int, dict[str, int], dict[str, str]]:
    """Run the command to its end: its exit status, and for each trace when its process was last seen, and its title."""
    try:
        child = subprocess.Popen(command, env=traces.environment(folder, os.environ), stdout=stdout)
    except OSError as error:
        raise Stop(f"{command[0]} can't be started: {error.strerror}") from error
    # A terminal sends Ctrl-C to the command as well; who asks this process to end means the command.
    signal.signal(signal.SIGINT, lambda *_: None)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: child.send_signal(received))
    ends: dict[str, int] = {}
    titles: dict[str, str] = {}
    while True:
        try:
            status = child.wait(0.2)
        except subprocess.TimeoutExpired:
            _look(folder, ends, titles)
            continue
        _look(folder, ends, titles)
        return (status if status >= 0 else 128 - status), ends, titles


def _look(folder: Path, ends: dict[str, int], titles: dict[str, str]) -> None:
    """Which of the traced processes live, and how they call themselves now; vLLM's titles begin with VLLM::."""
    for name in os.listdir(folder):
        pid = name.partition("-")[0]
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                title = os.fsdecode(file.read(200).partition(b"\0")[0])
        except OSError:
            continue
        if title:
            ends[name] = time.monotonic_ns()
            if title.startswith(("VLLM::", "ray::")):
                titles[name] = title.strip()


def _overhead(processes: Sequence[Process]) -> dict[str, float]:
    """The tracer's own time in all processes together, and its share of the time they ran."""
    spent = sum(process.overhead for process in processes) / 1e9
    ran = sum(process.end - process.begin for process in processes) / 1e9
    return {"seconds": round(spent, 4), "share": round(spent / ran, 5) if ran else 0.0}


# The tree


def _lines(report: Mapping[str, Any], processes: Sequence[Process], origin: int) -> Iterator[str]:
    count = sum(len(process.imports) for process in processes)
    spent, share = report["overhead"].values()
    yield f"{PROGRAM} trace: {shlex.join(report['command'])[:100]}"
    yield (
        f"{_number(len(processes), 'process', 'processes')}, {_number(count, 'import')}, {report['seconds']:.1f} s, "
        f"exit status {report['status']}; the tracer took {spent:.2f} s, {100 * share:.1f} % of the "
        "processes' time"
    )
    for _, depth, process in traces.below(processes):
        yield ""
        indent = "    " * depth
        came = "" if process.parent is None else f", {process.kind} at {_at(process.begin, origin)}"
        inner = sum(i.end - i.begin for i in process.imports if i.depth == 0) / 1e9
        yield f"{indent}{process.pid} {process.title}{came}: {_number(len(process.imports), 'import')} in {inner:.1f} s"
        for line in _facts(processes, process, origin):
            yield f"{indent}  {line}"
    if not processes:
        yield ""
        yield "No Python process was traced: none was started, or without this environment, or with -I, -E or -S."
    elif not any(process.events for process in processes):
        yield ""
        yield "Nothing that is watched was imported, the GPU wasn't asked for, and no variable or dlopen flag changed."


def _facts(processes: Sequence[Process], process: Process, origin: int) -> Iterator[str]:
    hazards = sorted({event.name for event in traces.inherited(processes, process, "hazard")})
    if hazards:
        yield f"has from its parent: {', '.join(hazards)}"
    if traces.inherited(processes, process, "gpu") or traces.inherited(processes, process, "device"):
        yield "forked when the GPU had been initialised: it can't be used here"
    for event in sorted(process.events, key=lambda event: event.time):
        if event.failed:
            continue
        yield f"{_at(event.time, origin):>9}  {_said(event)}"
        yield from (f"{'':>9}    {frame}" for frame in _shortened(event.chain))
    tried = {event.name: event for event in process.events if event.failed}
    if tried:
        names = ", ".join(f"{name} ({event.outcome})" for name, event in tried.items())
        yield f"asked for in vain: {names}"
    for pid, words, why in process.unseen:
        yield f"not traced: process {pid}, {' '.join(words)[:60]}: {why}"


def _said(event: Event) -> str:
    if event.kind == "hazard":
        took = f"{(event.end - event.time) / 1e9:.2f} s, {event.kilobytes / 1024:.0f} MB" if event.end else "not ended"
        return f"imports {event.name}{', first of all' if event.first else ''} ({took})"
    if event.kind == "gpu":
        return f"asks for the GPU: {event.name} ({event.outcome or 'not ended'})"
    if event.kind == "device":
        return f"{event.name} is open, after {event.outcome}"
    if event.kind == "library":
        return f"opens for all (RTLD_GLOBAL): {event.name}"
    if event.kind == "variable":
        return f"{event.name}: {_difference(event.old, event.new)}"
    return f"{event.name}: {event.old} -> {event.new}"


def _difference(old: str, new: str) -> str:
    """What was added to a path and taken from it; both values in full where only the order differs."""
    before, after = old.split(os.pathsep), new.split(os.pathsep)
    added = [f"+ {entry}" for entry in after if entry and after.count(entry) > before.count(entry)]
    gone = [f"- {entry}" for entry in before if entry and before.count(entry) > after.count(entry)]
    return ", ".join(dict.fromkeys(added + gone)) or f"{old or 'unset'} -> {new or 'unset'}"


def _shortened(chain: Sequence[str]) -> list[str]:
    frames = [re.sub(r"^.*/(?:site|dist)-packages/", "", frame) for frame in chain]
    if len(frames) <= _FRAMES:
        return frames
    return [frames[0], f"... {len(frames) - _FRAMES} more ...", *frames[1 - _FRAMES :]]


def _at(time: int, origin: int) -> str:
    return f"+{(time - origin) / 1e9:.2f} s"


def _number(count: int, one: str, many: str = "") -> str:
    return f"{count:,} {one if count == 1 else many or one + 's'}"


# The page


def page(report: Mapping[str, Any], processes: Sequence[Process], origin: int) -> str:
    """The trace as one HTML page, with all imports in it and nothing outside it."""
    strings: dict[str, int] = {}

    def text(value: str) -> int:
        return strings.setdefault(value, len(strings))

    def microseconds(time: int) -> int:
        return (time - origin) // 1000

    lanes = []
    order = list(traces.below(processes))
    place = {index: lane for lane, (index, _, _) in enumerate(order)}
    for _, depth, process in order:
        imports = [
            [
                text(i.name),
                microseconds(i.begin),
                (i.end - i.begin) // 1000,
                i.depth,
                -1 if i.parent is None else i.parent,
                text(i.file),
                i.line,
                0 if i.outcome == "ok" else text(i.outcome),
                i.thread % 1_000_003,
            ]
            for i in process.imports
        ]
        lanes.append(
            {
                "pid": process.pid,
                "name": process.title,
                "kind": process.kind,
                "depth": depth,
                "parent": None if process.parent is None else place[process.parent],
                "begin": microseconds(process.begin),
                "end": microseconds(process.end),
                "imports": imports,
                "events": [
                    {
                        "kind": "tried" if event.failed else event.kind,
                        "at": microseconds(event.time),
                        "name": event.name,
                        "said": f"asks for {event.name} ({event.outcome})" if event.failed else _said(event),
                        "chain": event.chain,
                    }
                    for event in process.events
                ],
                "notes": [line for line in _facts(processes, process, origin) if line[:1] not in " +"],
            }
        )
    data = {
        "title": shlex.join(report["command"]),
        "seconds": report["seconds"],
        "overhead": report["overhead"],
        "strings": list(strings),
        "lanes": lanes,
    }
    template = Path(__file__).with_name("trace.html").read_text(encoding="utf-8")
    shown = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")  # a module may be called </script>
    return template.replace("/*DATA*/null", shown)
