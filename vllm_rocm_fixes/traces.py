"""What the processes below `vllm-rocm-fixes trace` wrote down, read and joined.

tracer/rocm_fixes_tracer.py writes it, and tells the format.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TRACER = Path(__file__).parent / "tracer"
VARIABLE = "_ROCM_FIXES_TRACE"  # not ROCM_FIXES_...: those are the user's switches
# What vLLM on ROCm may import too early.
HAZARDS = ("aiter", "tilelang", "tvm", "mori", "deep_ep", "nixl", "nixl_ep", "moonep", "flashinfer", "flash_attn")
DEVICES = ("/dev/kfd", "/dev/nvidiactl")
_ESCAPES = {"\\\\": "\\", "\\t": "\t", "\\n": "\n"}


@dataclass
class Import:
    """One module's import: begin and end in ns of the monotonic clock, and who asked. parent: the outer one's index."""

    name: str
    begin: int
    end: int
    thread: int
    depth: int
    file: str
    line: int
    outcome: str
    parent: int | None = None


@dataclass
class Event:
    """Something else that happened. kind: hazard, gpu, device, variable, flags or library.

    name is the module, function, file or variable; chain the frames that led there, outermost first.
    """

    kind: str
    time: int
    name: str
    chain: list[str] = field(default_factory=list)
    outcome: str = ""
    old: str = ""
    new: str = ""
    end: int = 0
    kilobytes: int = 0
    first: bool = False

    @property
    def failed(self) -> bool:
        """The module isn't installed, or its import raised."""
        return self.kind == "hazard" and self.outcome not in ("ok", "")


@dataclass
class Process:
    """One traced process. parent is its index in the list; kind: start, fork or exec."""

    pid: int
    begin: int
    kind: str
    above: list[int]
    python: str
    words: list[str]
    end: int
    name: str = ""
    overhead: int = 0
    parent: int | None = None
    imports: list[Import] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    started: list[tuple[int, int, bool, list[str]]] = field(default_factory=list)  # time, pid, traced, words
    unseen: list[tuple[int, list[str], str]] = field(default_factory=list)  # pid, words, why

    @property
    def title(self) -> str:
        """The name that vLLM or multiprocessing gave it, else its program."""
        return self.name or " ".join(" ".join(self.words).split())

    def of(self, kind: str) -> list[Event]:
        """The events of one kind, in the order of time."""
        return [event for event in self.events if event.kind == kind]


def environment(folder: Path, base: Mapping[str, str]) -> dict[str, str]:
    """The environment in which a command and all below it are traced into a folder that prepare() has made."""
    path = [str(TRACER), *filter(None, [base.get("PYTHONPATH")])]
    return {**base, "PYTHONPATH": os.pathsep.join(path), VARIABLE: str(folder)}


def prepare(folder: Path, watch: Sequence[str] = (), devices: Sequence[str] = DEVICES) -> None:
    """Make a folder ready to be traced into. watch: modules to report beside HAZARDS."""
    (folder / "config").write_text(f"watch\t{' '.join([*HAZARDS, *watch])}\ndevices\t{' '.join(devices)}\n")


def read(folder: Path, ends: Mapping[str, int] | None = None, titles: Mapping[str, str] | None = None) -> list[Process]:
    """The processes that were traced into a folder, parents before children.

    ends and titles: for each file's name, when its process was last seen, and how it called itself.
    """
    processes = []
    for path in sorted(folder.iterdir()):
        if path.name != "config":
            process = _process(path)
            if process is not None:
                process.end = max(process.end, (ends or {}).get(path.name, 0))
                process.name = (titles or {}).get(path.name) or process.name
                processes.append(process)
    processes.sort(key=lambda process: process.begin)
    _join(processes)
    _mark_first(processes)
    return processes


def below(
    processes: Sequence[Process], parent: int | None = None, depth: int = 0
) -> Iterator[tuple[int, int, Process]]:
    """Index, depth and process, as a tree."""
    for index, process in enumerate(processes):
        if process.parent == parent:
            yield index, depth, process
            yield from below(processes, index, depth + 1)


def inherited(processes: Sequence[Process], process: Process, kind: str) -> list[Event]:
    """What a forked process has from those it was forked from: their hazards, or their GPU ("gpu", "device")."""
    found: list[Event] = []
    while process.kind == "fork" and process.parent is not None:
        parent = processes[process.parent]
        had = (event for event in parent.of(kind) if event.time < process.begin and not event.failed)
        found += [event for event in had if kind != "gpu" or event.outcome == "initialised"]
        process = parent
    return found


def without_tracer(value: str) -> str:
    """A PYTHONPATH without the tracer's own folder."""
    return os.pathsep.join(entry for entry in value.split(os.pathsep) if entry != str(TRACER))


def _process(path: Path) -> Process | None:
    process: Process | None = None
    waiting: dict[int, list[list[int]]] = {}  # thread -> for each depth, imports whose outer one hasn't ended
    open_hazards: dict[str, Event] = {}
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        kind, *fields = text.split("\t")
        if "\\" in text:
            fields = [re.sub(r"\\[\\tn]", lambda m: _ESCAPES[m[0]], part) for part in fields]
        try:
            if kind == "P":
                time, pid, above, how, python, words = fields
                process = Process(
                    int(pid), int(time), how, [int(p) for p in above.split()], python, words.split("\x1f"), int(time)
                )
            elif process is not None:
                process.end = max(process.end, int(fields[0]))
                _line(process, kind, fields, waiting, open_hazards)
        except (ValueError, IndexError):  # the last line of a process that was killed in the middle of it
            continue
    return process


def _line(
    process: Process, kind: str, fields: list[str], waiting: dict[int, list[list[int]]], hazards: dict[str, Event]
) -> None:
    time = int(fields[0])
    if kind == "I":
        begin, thread, depth, name, file, line, outcome, spent = fields[1:]
        process.overhead = max(process.overhead, int(spent))
        if file == str(TRACER / "sitecustomize.py"):
            return
        levels = waiting.setdefault(int(thread), [])
        levels += [[] for _ in range(int(depth) + 2 - len(levels))]
        index = len(process.imports)
        for inner in levels[int(depth) + 1]:
            process.imports[inner].parent = index
        levels[int(depth) + 1] = []
        levels[int(depth)].append(index)
        process.imports.append(Import(name, int(begin), time, int(thread), int(depth), file, int(line), outcome))
    elif kind == "H":
        hazards[fields[1]] = Event("hazard", time, fields[1], _frames(fields[2]))
        process.events.append(hazards[fields[1]])
    elif kind == "h":
        event = hazards[fields[1]]
        event.outcome, event.kilobytes, event.end = fields[2], int(fields[3]), time
    elif kind == "G":
        process.events.append(Event("gpu", time, fields[1], _frames(fields[2])))
    elif kind == "g":
        process.of("gpu")[-1].outcome = fields[1]
    elif kind == "D":
        process.events.append(Event("device", time, fields[1], outcome=fields[2]))
    elif kind == "V":
        old, new = (without_tracer(value[1:]) if value else "" for value in fields[2:4])
        if old != new:
            process.events.append(Event("variable", time, fields[1], _frames(fields[4]), old=old, new=new))
    elif kind == "F":
        process.events.append(Event("flags", time, "dlopen flags", _frames(fields[3]), old=fields[1], new=fields[2]))
    elif kind == "L":
        process.events.append(Event("library", time, fields[1], _frames(fields[2])))
    elif kind == "S":
        process.started.append((time, int(fields[1]), fields[2] == "1", fields[3].split("\x1f")))
    elif kind == "N":
        process.name = fields[1]
    elif kind == "X":
        process.overhead = max(process.overhead, int(fields[1]))


def _frames(text: str) -> list[str]:
    return text.split("\x1f") if text else []


def _join(processes: list[Process]) -> None:
    """Who started whom; and which Python programs were started and left no trace."""
    for index, process in enumerate(processes):
        earlier = [(p.begin, i) for i, p in enumerate(processes[:index]) if p.pid == process.pid]
        if earlier:
            process.parent, process.kind = max(earlier)[1], "exec" if process.kind == "start" else process.kind
            continue
        for pid in process.above:
            found = [(p.begin, i) for i, p in enumerate(processes[:index]) if p.pid == pid]
            if found:
                process.parent = max(found)[1]
                break
    seen = {process.pid for process in processes}
    for process in processes:
        for _, pid, traced, words in process.started:
            if pid not in seen and words and re.match(r"(python|pypy)[\d.]*$", os.path.basename(words[0])):
                flags = [word for word in words[1:] if re.match(r"-[a-zA-Z]*[IES]", word)]
                why = f"it runs with {flags[0]}" if flags else "it left no trace"
                why = why if traced else "it was given an environment of its own"
                process.unseen.append((pid, words, why))


def _mark_first(processes: list[Process]) -> None:
    seen: set[str] = set()
    events = sorted((e for p in processes for e in p.events if e.kind == "hazard" and not e.failed), key=_time)
    for event in events:
        event.first = event.name not in seen
        seen.add(event.name)


def _time(event: Event) -> int:
    return event.time


def describe(processes: Sequence[Process], origin: int) -> list[dict[str, Any]]:
    """The processes for JSON; at and seconds in seconds, at since origin. A hazard that isn't installed is in tried."""

    def at(time: int) -> float:
        return round((time - origin) / 1e9, 4)

    def event(e: Event) -> dict[str, Any]:
        shown: dict[str, Any] = {"name": e.name, "at": at(e.time), "chain": e.chain}
        if e.kind == "hazard":
            seconds = round((e.end - e.time) / 1e9, 4) if e.end else None
            shown |= {
                "outcome": e.outcome or "not ended",
                "seconds": seconds,
                "kilobytes": e.kilobytes,
                "first": e.first,
            }
        elif e.kind in ("gpu", "device"):
            shown["outcome"] = e.outcome
        elif e.kind in ("variable", "flags"):
            shown |= {"old": e.old, "new": e.new}
        return shown

    return [
        {
            "pid": p.pid,
            "parent": None if p.parent is None else processes[p.parent].pid,
            "kind": p.kind,
            "name": p.title,
            "python": p.python,
            "begin": at(p.begin),
            "end": at(p.end),
            "imports": len(p.imports),
            "hazards": [event(e) for e in p.of("hazard") if not e.failed],
            "tried": [event(e) for e in p.of("hazard") if e.failed],
            "inherited": sorted({e.name for e in inherited(processes, p, "hazard")}),
            "gpu": [event(e) for e in p.of("gpu")],
            "devices": [event(e) for e in p.of("device")],
            "forked_with_gpu": bool(inherited(processes, p, "gpu") or inherited(processes, p, "device")),
            "variables": [event(e) for e in p.of("variable")],
            "dlopen_flags": [event(e) for e in p.of("flags")],
            "global_libraries": [event(e) for e in p.of("library")],
            "not_traced": [{"pid": pid, "program": words, "why": why} for pid, words, why in p.unseen],
        }
        for p in processes
    ]
