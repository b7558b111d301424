"""`vllm-rocm-fixes ps`: the vLLM processes that run now, and what the overlay did in each."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import doors, records
from ..records import Record
from . import add_command

if TYPE_CHECKING:
    from . import Subparsers

_TEXT = """\
API server, EngineCore, workers and Ray workers are joined by who started whom. A process that differs from its
siblings is marked, and so is one that should have the overlay and hasn't.

Listed are, of this user, on this host and in this container:
  - each process that has a record, which the overlay writes when vLLM loads its plugins, in scripts too;
  - a fork of such a process, and a child of it that has loaded torch;
  - with or without a record, what vLLM or Ray titled (VLLM::EngineCore, ray::RayWorkerWrapper), `vllm serve`, and
    `python -m vllm.entrypoints...`.
Not listed is a Python script that uses vLLM and has no record: its plugins aren't loaded yet, or the overlay is
switched off, kept out or not installed there. `vllm-rocm-fixes doctor --pid PID` tells of its environment.

Exit status: 0 all alike; 1 one is marked, or none is listed."""
_USUAL = ("applied", "waiting", "clear", "absent")  # states that need no name
_STARTING = 120  # seconds that a process may take from its start to the plugin door


@dataclass
class Shown:
    """One process in the table. record is its own, or its parent's where it was forked from it; None: it has none."""

    pid: int
    parent: int
    start: int
    role: str
    record: Record | None
    seconds: float
    forked: bool = False
    marks: list[str] = field(default_factory=list)
    children: list[Shown] = field(default_factory=list)

    def walk(self, depth: int = 0) -> Iterator[tuple[int, Shown]]:
        """This process and those below it, with their depth."""
        yield depth, self
        for child in self.children:
            yield from child.walk(depth + 1)


def add_parser(subparsers: Subparsers) -> None:
    """Add this command's parser."""
    parser = add_command(subparsers, "ps", run, "show the running vLLM processes, and what was mended in each", _TEXT)
    parser.add_argument("--patches", action="store_true", help="name each patch")
    parser.add_argument("--json", action="store_true", help="print JSON, with each patch's state and reason")


def run(args: argparse.Namespace) -> int:
    """Print the running services. Returns the exit status."""
    found, elsewhere = records.read()
    services = join(found)
    for service in services:
        compare([process for _, process in service.walk()])
    if args.json:
        print(json.dumps({"services": [_service(service) for service in services], "elsewhere": elsewhere}, indent=2))
    else:
        print(
            "\n\n".join("\n".join(_lines(service, args.patches)) for service in services)
            or "No process of vLLM's is listed; which ones are is told by `vllm-rocm-fixes ps --help`."
        )
        if elsewhere:
            print(f"\n{elsewhere} records belong to other hosts or containers: ask there.")
    marked = any(process.marks for service in services for _, process in service.walk())
    return 1 if marked or not services else 0


def join(found: list[Record]) -> list[Shown]:
    """The processes with a record, their forks, and vLLM processes without one: as trees, by who started whom."""
    known = {record.pid: record for record in found}
    running = dict(_processes())
    shown: dict[int, Shown] = {}
    for pid, (start, parent) in running.items():
        title = _title(pid)
        record, forked = known.get(pid), False
        if record is None:
            ancestor = _nearest(parent, known, running)
            if ancestor is not None and _image(pid) == _image(ancestor):
                record, forked = known[ancestor], True
            elif not (_is_vllm(title) or (ancestor is not None and _has_torch(pid))):
                continue
        shown[pid] = Shown(pid, parent, start, _role(title, record, forked), record, _age(start), forked)
    roots = []
    for process in shown.values():
        above = _nearest(process.parent, shown, running)
        if above is None:
            roots.append(process)
        else:
            shown[above].children.append(process)
    return _join_ray(roots)


def compare(processes: list[Shown]) -> None:
    """Mark each process of one service that isn't like most of the others."""
    described = {p.pid: _traits(p.record) for p in processes if p.record}
    most: dict[str, str] = {}
    for trait in sorted({trait for traits in described.values() for trait in traits}):
        most[trait] = Counter(traits.get(trait, "missing") for traits in described.values()).most_common(1)[0][0]
    for process in processes:
        if process.record is None:
            reason = _kept_out(process)
            if reason:
                process.marks.append(f"not mended here: {reason}")
            continue
        mine = described[process.pid]
        for trait, usual in most.items():
            value = mine.get(trait, "missing")
            if value != usual:
                others = sum(traits.get(trait, "missing") == usual for traits in described.values())
                process.marks.append(f"differs: {trait} is {value}, and {usual} in {others} other{'s'[: others != 1]}")


def _kept_out(process: Shown) -> str | None:
    """Why a process of vLLM's has no record; None while it may still be starting."""
    try:
        entries = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    except OSError:
        entries = []
    environ = {key: value for key, _, value in (os.fsdecode(entry).partition("=") for entry in entries)}
    shut = doors.shut(environ)
    if shut:
        return shut[0]
    return (
        "the overlay isn't installed for its Python, or no plugin is loaded yet"
        if process.seconds > _STARTING
        else None
    )


def _traits(record: Record) -> dict[str, str]:
    """What siblings have in common. A patch that waits for its module is as good as one that is applied."""
    data = record.data
    traits = {f"patch {name}": p.get("state", "").replace("waiting", "applied") for name, p in record.patches.items()}
    traits |= {f"guard {name}": "on" for name in record.guards}
    traits |= {"vllm-rocm-fixes": str(data.get("overlay")), "vLLM": f"{data.get('vllm')} in {data.get('root')}"}
    return traits


def _join_ray(roots: list[Shown]) -> list[Shown]:
    """Ray starts the workers itself: they go below the one service that runs the same vLLM, or stay by themselves."""
    ray = [root for root in roots if root.role.startswith("Ray")]
    rest = [root for root in roots if root not in ray]
    for worker in ray:
        place = worker.record.data.get("root") if worker.record else None
        drivers = [root for root in rest if root.record and root.record.data.get("root") == place]
        if len(drivers) == 1:
            drivers[0].children.append(worker)
        else:
            rest.append(worker)
    return rest


# What /proc says


def _processes() -> Iterator[tuple[int, tuple[int, int]]]:
    for name in os.listdir("/proc"):
        try:
            if name.isdecimal() and os.stat(f"/proc/{name}").st_uid == os.geteuid():
                yield int(name), records.birth(int(name))
        except (OSError, ValueError, IndexError):
            continue


def _nearest(pid: int, wanted: dict[int, Any], running: dict[int, tuple[int, int]]) -> int | None:
    """The process itself or the nearest above it that is wanted."""
    for _ in running:
        if pid in wanted or pid not in running:
            break
        pid = running[pid][1]
    return pid if pid in wanted else None


def _title(pid: int) -> list[str]:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return []
    return [word.decode(errors="replace") for word in words]


def _is_vllm(title: list[str]) -> bool:
    if title and title[0].startswith(("VLLM::", "ray::RayWorker")):
        return True
    program = [os.path.basename(word) for word in title[:2]]
    if any(p == "vllm" and title[i + 1 : i + 2] == ["serve"] for i, p in enumerate(program)):
        return True
    return any(one == "-m" and two.startswith("vllm.entrypoints.") for one, two in itertools.pairwise(title))


def _role(title: list[str], record: Record | None, forked: bool) -> str:
    """What vLLM or Ray titled the process, else the name in its record, else its program."""
    first = title[0] if title else ""
    if first.startswith("VLLM::"):
        return first.removeprefix("VLLM::").split()[0]
    if first.startswith("ray::"):
        return f"Ray worker {first.removeprefix('ray::').partition('.')[0]}"
    if _is_vllm(title):
        return "API server"
    named = record.data.get("role") if record and not forked else None
    if named and named != "MainProcess":
        return str(named)
    if title[1:2] == ["-m"]:
        return title[2] if len(title) > 2 else "?"
    words = [word if word.startswith("-") else os.path.basename(word) for word in title[:2]]
    return " ".join(words)[:40] or "?"


def _image(pid: int) -> bytes:
    """Where the program lies in memory: a fork has its parent's, a new program an address of its own."""
    try:
        with open(f"/proc/{pid}/maps", "rb") as file:
            return file.readline()
    except OSError:
        return str(pid).encode()


def _has_torch(pid: int) -> bool:
    try:
        return b"libtorch_cpu" in Path(f"/proc/{pid}/maps").read_bytes()
    except OSError:
        return False


def _age(start: int) -> float:
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - start / os.sysconf("SC_CLK_TCK"))


# What is printed


def _lines(service: Shown, named: bool) -> Iterator[str]:
    processes = list(service.walk())
    first = next((process.record for _, process in processes if process.record), None)
    if first:
        release, root = first.data.get("vllm") or "of unknown version", first.data.get("root")
        yield f"vLLM {release} in {root}, vllm-rocm-fixes {first.data.get('overlay')}"
    else:
        yield "vLLM, and no process here has a record of vllm-rocm-fixes"
    wide = max(2 * depth + len(process.role) for depth, process in processes)
    yield f"{'PID':>8}  {'ROLE':<{wide}}  {'UP':>8}  {'MS':>6}  PATCHES"
    for depth, process in processes:
        role, up = "  " * depth + process.role, _clock(process.seconds)
        yield f"{process.pid:>8}  {role:<{wide}}  {up:>8}  {_spent(process)}  {_states(process, named)}"
        for mark in process.marks:
            yield f"{'!':>8}  {mark}"


def _states(process: Shown, named: bool) -> str:
    if process.record is None:
        return "no record" if process.marks else "no record yet"
    groups: dict[str, list[str]] = {}
    for name, patch in process.record.patches.items():
        groups.setdefault(patch.get("state", "?"), []).append(name)
    said = []
    for state in sorted(groups, key=lambda state: (_USUAL.index(state) if state in _USUAL else -1, state)):
        names = groups[state]
        which = ", ".join(names) if named or state not in _USUAL else str(len(names))
        said.append(f"{which} {state.replace('waiting', 'when imported')}")
    return ("as its parent: " if process.forked else "") + ("; ".join(said) or "none")


def _spent(process: Shown) -> str:
    own = process.record is not None and not process.forked
    return f"{process.record.data.get('milliseconds', 0.0):>6.1f}" if own and process.record else f"{'-':>6}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _service(service: Shown) -> dict[str, Any]:
    first = next((process.record for _, process in service.walk() if process.record), None)
    return {
        "vllm": first and {"version": first.data.get("vllm"), "root": first.data.get("root")},
        "processes": [
            {
                "pid": process.pid,
                "parent": process.parent,
                "role": process.role,
                "seconds": round(process.seconds, 1),
                "forked": process.forked,
                "overlay": process.record and process.record.data.get("overlay"),
                "milliseconds": process.record and process.record.data.get("milliseconds"),
                "patches": process.record.patches if process.record else {},
                "guards": process.record.guards if process.record else {},
                "marks": process.marks,
            }
            for _, process in service.walk()
        ],
    }
