"""What each process did, where `vllm-rocm-fixes ps` finds it: one small file for each process.

A record never stops a start: whatever goes wrong with the file costs only the file. The folder belongs to the user
alone (0700, opened without following a link, owner and mode checked on the open folder before anything is read or
written), each file is written whole under another name and renamed, and its name tells whose it is: kernel boot and
PID namespace, process id, and the process's start time, which tells a reused id from the process that wrote it.

A forked child has what its parent had. It writes a record of its own when a patch changes its state there; before that
`ps` finds it by its parent.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import __version__, store

if TYPE_CHECKING:
    from .process import Process

FORMAT = 1
_LIMIT = 1 << 20  # bytes of one record; a real one has some 3,000
_SWEEP = 32  # files that a writer looks at for dead processes


class Record:
    """One process's record, checked: data is what it wrote.

    patches: name of each -> {"state", "reason"}; guards: name of each -> what it did, in words.
    """

    def __init__(self, pid: int, start: int, data: dict[str, Any]) -> None:
        self.pid, self.start, self.data = pid, start, data
        found = (data.get(what) for what in ("patches", "guards"))
        self.patches, self.guards = (part if isinstance(part, dict) else {} for part in found)


def folders() -> list[Path]:
    """Where records may lie, the first choice first; a service and the shell that asks may differ in environment.

    Memory comes before disk: a record is worth nothing after a reboot, and ext4 waits for the disk when a file is
    replaced by renaming.
    """
    user = os.geteuid()
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    found = [f"{runtime}/vllm-rocm-fixes"] if runtime else []
    found += [f"/run/user/{user}/vllm-rocm-fixes", f"/dev/shm/vllm-rocm-fixes-{user}"]
    home = os.path.expanduser("~")
    if os.path.isdir(home):
        state = os.environ.get("XDG_STATE_HOME") or f"{home}/.local/state"
        found += [f"{state}/vllm-rocm-fixes/run", f"{home}/.cache/vllm-rocm-fixes/run"]
    found.append(f"{os.environ.get('TMPDIR') or '/tmp'}/vllm-rocm-fixes-{user}")
    return [Path(folder) for folder in dict.fromkeys(found) if folder.startswith("/")]


def write(process: Process) -> Path | None:
    """Write, or replace, the record of this process. Returns its path; None where no folder took it. Raises nothing."""
    try:
        pid = os.getpid()
        start, parent = birth(pid)
        here = _here()
        name = f"{here}-{pid}-{start}.json"
        text = json.dumps(_describe(process, pid, parent, start)).encode()
    except Exception:
        return None
    for folder in folders():
        with contextlib.suppress(Exception):
            if folder.name == "run":  # below the home folder: what is missing above is made
                folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with store.opened(folder, create=True) as handle:
                store.put(handle, name, text)
                with contextlib.suppress(OSError):
                    _sweep(handle, here, _SWEEP)
            return folder / name
    return None


def read() -> tuple[list[Record], int]:
    """The records of live processes, by process id, and how many belong to other hosts or containers.

    Files of dead processes are removed. What isn't a record, or could have been written by another user, is left aside.
    """
    found: dict[int, Record] = {}
    elsewhere, here = 0, ""
    for folder in folders():
        with contextlib.suppress(OSError), store.opened(folder) as handle:
            here = here or _here()
            _sweep(handle, here, sys.maxsize)
            for name in os.listdir(handle):
                owner = _owner(name, here)
                if owner is None or _dead(name, here):
                    elsewhere += owner is None and name.endswith(".json")
                    continue
                data = _get(handle, name)
                if data is not None and (data.get("pid"), data.get("start")) == owner:
                    known = found.get(owner[0])
                    if known is None or known.data.get("written", 0) < data.get("written", 0):
                        found[owner[0]] = Record(*owner, data)
    return sorted(found.values(), key=lambda record: record.pid), elsewhere


def alive(pid: int, start: int) -> bool:
    """Whether the process with this id is the one that started then, in clock ticks since boot, and hasn't ended."""
    try:
        return birth(pid)[0] == start
    except (OSError, ValueError, IndexError):
        return False


def _describe(process: Process, pid: int, parent: int, start: int) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "pid": pid,
        "parent": parent,
        "start": start,
        "written": time.time(),
        "role": _role(),
        "ray_job": os.environ.get("RAY_JOB_ID"),
        "overlay": __version__,
        "root": str(process.site.root) if process.site.root else None,
        "vllm": process.site.version,
        "python": sys.version.partition(" ")[0],
        "off": process.settings.off,
        "milliseconds": round(process.milliseconds, 3),
        "patches": {name: {"state": r.state, "reason": r.reason} for name, r in process.results.items()},
        "guards": {g.name: _said(g) for g in process.working()},
    }


def _said(guard: Any) -> str:
    try:
        return str(guard.state())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _role() -> str | None:
    """The name that multiprocessing or Ray gave this process; vLLM's own title, set later, is read by `ps`."""
    if "RAY_JOB_ID" in os.environ and "ray" in sys.modules:
        return "Ray worker"
    module = sys.modules.get("multiprocessing.process")
    name = getattr(getattr(module, "_current_process", None), "_name", None)
    return name if isinstance(name, str) else None


def _get(handle: int, name: str) -> dict[str, Any] | None:
    try:
        data = json.loads(store.get(handle, name, _LIMIT))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) and data.get("format") == FORMAT else None


def _sweep(handle: int, here: str, limit: int) -> None:
    """Remove the files of processes of this machine that are dead, looking at no more than limit files."""
    for name in os.listdir(handle)[:limit]:
        if _dead(name, here):
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=handle)


def _dead(name: str, here: str) -> bool:
    owner = _owner(name.removeprefix(".").partition(".json")[0] + ".json", here)
    return owner is not None and not alive(*owner)


def _owner(name: str, here: str) -> tuple[int, int] | None:
    """Process id and start time in a record's name; None where it isn't one, or isn't of this boot and namespace."""
    numbers = re.fullmatch(rf"{here}-([0-9]+)-([0-9]+)\.json", name)
    return (int(numbers[1]), int(numbers[2])) if numbers else None


def _here() -> str:
    """This boot of this kernel, and this PID namespace: where a process id means what it means here."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip().replace("-", "")
    return f"{boot}_{os.stat('/proc/self/ns/pid').st_ino}"


def birth(pid: int) -> tuple[int, int]:
    """Start time of a process in clock ticks since boot, and its parent. Raises OSError for one that has ended."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        text = file.read()
    fields = text[text.rindex(b")") + 2 :].split()  # the name before it may hold spaces and brackets
    if fields[0] in (b"Z", b"X"):
        raise ProcessLookupError(pid)
    return int(fields[19]), int(fields[1])
