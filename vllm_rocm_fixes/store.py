"""What is kept between starts, so that a node pays for an edit once and not in every process: mended code above all.

An entry is found by a digest of all that it depends on: the stock source, the overlay's own files, the interpreter.
It is read only where this user alone can have written it. Whatever goes wrong here costs the entry and nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import marshal
import os
import stat
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from . import __version__
from .patch import Mended, Outcome, Patch, Site, Verdict

_DIGEST = 32  # bytes of a SHA-256
_LIMIT = 1 << 24  # bytes of an entry; the largest has some 300,000
_MOST = 200  # entries: some two dozen, for a few releases and versions of the overlay
_unkept: dict[bytes, Mended] = {}  # made in this process, where the folder didn't take it


def folder() -> Path:
    """Where entries lie: below ROCM_FIXES_CACHE, XDG_CACHE_HOME or ~/.cache. Raises RuntimeError without a home."""
    named = os.environ.get("ROCM_FIXES_CACHE")
    if named:
        return Path(named).expanduser() / "mended"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-rocm-fixes" / "mended"


def digest(*parts: object) -> bytes:
    """What an entry is found by: these parts, the interpreter and the overlay's own files.

    Raises OSError where the overlay has no files, as in an archive.
    """
    more = sys.version, sys.flags.optimize, importlib.util.MAGIC_NUMBER, __version__
    return _sha256(parts, more, _own_files())


def key(source: bytes | str, filename: str, patches: Sequence[Patch], site: Site) -> bytes:
    """The digest of all that a module's mended code depends on. Raises OSError where the overlay has no files."""
    text = source if isinstance(source, bytes) else source.encode("utf-8", "surrogatepass")
    names = [patch.name for patch in patches]
    return digest(hashlib.sha256(text).digest(), filename, names, site.version, sorted(site.skipped))


def mended(source: bytes | str, filename: str, patches: Sequence[Patch], site: Site) -> Mended:
    """A stock module mended, with its code from the store where that has it; there is no tree then."""
    found_by = None
    if not (site.skipped and any(patch.refuse for patch in patches)):  # which may look at more than the key covers
        with contextlib.suppress(OSError):  # the overlay lies in an archive
            found_by = key(source, filename, patches, site)
    found = (_unkept.pop(found_by, None) or load(found_by, patches)) if found_by else None
    if found is None:
        from .mend import mend  # a warm start has no use for it

        found = mend(source, filename, patches, site)
        if found_by and all(o.lasts for o in found.outcomes) and not save(found_by, found):
            _unkept[found_by] = found._replace(tree=None)
    return found


def load(wanted: bytes, patches: Sequence[Patch]) -> Mended | None:
    """The mended code of that key; None where there is none that can be trusted."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        outcomes, code, decorated, added = recall(wanted)
        named = {patch.name: patch for patch in patches}
        made = tuple(Outcome(named[name], Verdict(kind, reason)) for name, kind, reason in outcomes)
        return Mended(made, None, code, frozenset(decorated), added)
    return None


def save(wanted: bytes, mended: Mended) -> bool:
    """Keep mended code; False where that failed."""
    outcomes = [(o.patch.name, o.verdict.kind, o.verdict.reason) for o in mended.outcomes]
    return keep(wanted, (outcomes, mended.code, sorted(mended.decorated), dict(mended.added)))


def recall(wanted: bytes) -> Any:
    """The value of an entry; None where there is none that can be trusted."""
    with contextlib.suppress(OSError, RuntimeError, ValueError, EOFError, TypeError), opened(folder()) as handle:
        data = get(handle, wanted.hex(), _LIMIT)
        payload = data[2 * _DIGEST :]
        if data[: 2 * _DIGEST] == wanted + hashlib.sha256(payload).digest():
            return marshal.loads(payload)
    return None


def keep(wanted: bytes, value: Any) -> bool:
    """Write an entry, whole or not at all: False. The value is of what marshal knows."""
    payload = marshal.dumps(value)
    with contextlib.suppress(OSError, RuntimeError):
        place = folder()
        place.parent.mkdir(parents=True, exist_ok=True)
        with opened(place, create=True) as handle:
            put(handle, wanted.hex(), wanted + hashlib.sha256(payload).digest() + payload)
            for entry in sorted(os.scandir(handle), key=lambda e: e.stat().st_mtime_ns)[:-_MOST]:
                os.unlink(entry.name, dir_fd=handle)
            return True
    return False


# A folder of this user alone, and its files; records.py has another


@contextlib.contextmanager
def opened(place: Path, create: bool = False) -> Iterator[int]:
    """The open folder. Raises OSError where there is none, or where another user can have written it."""
    if create:
        with contextlib.suppress(FileExistsError):
            place.mkdir(mode=0o700)
    handle = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _check_owner(os.fstat(handle))
        yield handle
    finally:
        os.close(handle)


def get(handle: int, name: str, limit: int) -> bytes:
    """A file of an open folder. Raises OSError where another user can have written it, or it has more bytes."""
    # Without waiting: for a pipe of that name nobody may ever write.
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=handle)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        _check_owner(status)
        if not stat.S_ISREG(status.st_mode) or status.st_size > limit:
            raise OSError(f"{name} is no file of ours")
        return file.read()


def put(handle: int, name: str, data: bytes) -> None:
    """Write a file of an open folder, whole or not at all. Raises OSError."""
    partial = f".{name}.{os.getpid()}.{threading.get_ident()}"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(partial, flags, 0o600, dir_fd=handle), "wb", buffering=0) as file:
            if file.write(data) != len(data):
                raise OSError("written in part")
        os.rename(partial, name, src_dir_fd=handle, dst_dir_fd=handle)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(partial, dir_fd=handle)
        raise


def _check_owner(status: os.stat_result) -> None:
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError("another user can have written it")


def _sha256(*parts: object) -> bytes:
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).digest()


@functools.cache
def _own_files() -> bytes:
    """The digest of name, size and time of the files that decide what an edit does, as this process found them first.

    With it the content's, as an installer wrote it down. The time is in whole seconds then: an image keeps no more.
    """
    here = Path(__file__).parent
    patches = importlib.util.find_spec(f"{__package__}.patches")
    folders = [here, *map(Path, (patches and patches.submodule_search_locations) or ())]
    entries = [entry for place in folders for entry in os.scandir(place) if entry.name.endswith(".py")]
    record = here.with_name(f"{here.name}-{__version__}.dist-info") / "RECORD"
    told, unit = b"", 1
    with contextlib.suppress(OSError):
        told, unit = record.read_bytes(), 10**9
    found = ((entry.path, entry.stat().st_size, entry.stat().st_mtime_ns // unit) for entry in entries)
    return _sha256(told, sorted(found))
