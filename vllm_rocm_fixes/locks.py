"""AITER's build folders, and the lock files in them: who holds one, and which are left over.

AITER compiles kernels in `jit/build` of AITER_JIT_DIR, of its own package, or of ~/.aiter where the package can't be
written (jit/core.py), and its templated ones in `build` of AITER_ROOT_DIR or ~/.aiter (csrc/cpp_itfs/utils.py). Each
build is guarded by a file that is created exclusively and removed afterwards. A builder that was killed leaves it
there, and in the releases of early 2026 everybody else waits for it without end (aiter #5266). Newer releases write
process id, host, PID namespace and start time into the file; older ones leave it empty, and only keep it open.

Nothing is removed here: whether another host shares the folder, only the operator knows.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from .records import alive

_YOUNG = 30  # seconds in which a builder may have made the file and not yet written into it


class Lock(NamedTuple):
    """A lock file. pid: the process on this host that holds it; stale: nobody does; else where says who may."""

    path: Path
    seconds: float
    pid: int | None = None
    stale: bool = False
    where: str = ""


def folders(package: Path | None, environ: Mapping[str, str]) -> list[Path]:
    """The folders that AITER builds in: of modules first, then of templated kernels. package: the folder of aiter."""
    home = Path(environ.get("HOME") or "/nonexistent")
    chosen = environ.get("AITER_JIT_DIR")
    if chosen:
        modules = Path(chosen)
    elif package is not None and os.access(package / "jit", os.W_OK):
        modules = package / "jit"
    else:
        modules = home / ".aiter" / "jit"
    root = environ.get("AITER_ROOT_DIR")
    return list(dict.fromkeys([modules, Path(root) if root else home / ".aiter"]))


def everywhere(package: Path | None, environ: Mapping[str, str]) -> list[Path]:
    """Every folder in which a lock file of AITER's may lie, those of other settings and of its configurations too."""
    others = [package / "jit", Path("/tmp/aiter_configs")] if package is not None else []
    return list(dict.fromkeys([*folders(package, environ), *others]))


def unwritable(folder: Path) -> str | None:
    """Why this user can't make files in a folder, which need not exist yet; None where it can."""
    place = folder
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    if not place.is_dir():
        return f"{place} isn't a folder"
    if not os.access(place, os.W_OK | os.X_OK):
        read_only = os.statvfs(place).f_flag & os.ST_RDONLY
        return f"{place} is on a read-only file system" if read_only else f"{place} can't be written by this user"
    status = os.statvfs(place)
    if status.f_bavail * status.f_frsize < 100 << 20:
        return f"{place} has {status.f_bavail * status.f_frsize >> 20} MB left"
    return None


def find(places: list[Path]) -> list[Lock]:
    """The lock files in and below AITER's build folders, and who holds each."""
    paths = sorted({path for place in places for path in _paths(place)})
    held = _open_files() if paths else {}
    return [lock for path in paths for lock in [_lock(path, held)] if lock is not None]


def _paths(place: Path) -> Iterator[Path]:
    for folder in (place, place / "build"):
        for pattern in ("lock_*", "*.lock", "*/lock", "*/*.lock"):
            yield from (path for path in folder.glob(pattern) if path.is_file() and not path.is_symlink())


def _lock(path: Path, held: Mapping[tuple[int, int], int] | None) -> Lock | None:
    try:
        status = path.stat()
        with path.open(errors="replace") as file:
            words = file.read(4096).splitlines()
    except OSError:
        return None
    seconds = max(0.0, time.time() - status.st_mtime)
    if held is None:
        return Lock(path, seconds, where="without /proc nobody can tell who holds it")
    holder = held.get((status.st_dev, status.st_ino))
    if holder is not None:
        return Lock(path, seconds, holder)
    if len(words) < 2 or not words[0].strip().isdecimal():
        return Lock(path, seconds, stale=seconds > _YOUNG)
    pid, host = int(words[0]), words[1].strip()
    if host != socket.gethostname():
        return Lock(path, seconds, where=f"process {pid} of host {host} wrote it")
    if len(words) > 2 and words[2].strip() and words[2].strip() != os.readlink("/proc/self/ns/pid"):
        return Lock(path, seconds, where=f"process {pid} of another container wrote it")
    start = words[3].strip() if len(words) > 3 else ""
    lives = alive(pid, int(start)) if start.isdecimal() else os.path.isdir(f"/proc/{pid}")
    return Lock(path, seconds, pid if lives else None, stale=not lives)


def _open_files() -> dict[tuple[int, int], int] | None:
    """The files that a process of this user (of any, for root) has open: device and inode -> process id.

    None where /proc isn't mounted.
    """
    if not os.path.isdir("/proc/self/fd"):
        return None
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        try:
            for link in os.scandir(f"/proc/{name}/fd"):
                status = link.stat()
                found[status.st_dev, status.st_ino] = int(name)
        except OSError:
            continue
    return found
