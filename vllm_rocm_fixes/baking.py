"""The mended files themselves, written over the stock ones, and the stock ones put back byte for byte.

For images that forbid plugins. Beside vllm/ lies the folder STORE: `record.json`, and the stock files, named by their
hashes. No packaging tool takes that name for a package. The record is the journal too: it is written before the first
file of vLLM changes, and holds for each file the hash of the stock text and of every text that a bake put there. So
after an interruption at any point each file is one of these, whole, and the next bake finishes as the next unbake
reverts. A file that is none of them was changed by somebody else, and is left alone.

A baked vLLM calls functions of this package, which has to stay installed until unbake. It runs without guards, so a
patch that is safe only behind a guard isn't baked.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from . import __version__
from .guards import GUARDS
from .patch import Outcome, Patch
from .rewrite import rewrite
from .survey import modules

STORE = "vllm-rocm-fixes.baked"
FORMAT = 1
_TEMPORARY = ".vllm-rocm-fixes"
_MARK = b"vllm_rocm_fixes"  # what a mended file imports, and no stock file names

OnDisk = Literal["baked", "stock", "changed", "edited", "missing"]


class Refused(Exception):
    """Why nothing was baked or put back, in a line for the user."""


@dataclass
class Entry:
    """One file of vLLM in the record: hashes of its stock text and of what bakes wrote, and the stock file's time."""

    original: str
    baked: list[str]
    mtime_ns: int
    patches: list[str]

    def on_disk(self, content: bytes | None) -> OnDisk:
        """What a file's content is; "changed": neither stock nor ours, "edited": not ours any more, but it was."""
        if content is None:
            return "missing"
        digest = _digest(content)
        if digest in self.baked or digest == self.original:
            return "stock" if digest == self.original else "baked"
        return "edited" if _MARK in content else "changed"


@dataclass
class Record:
    """What was baked: by which overlay, whether all of it was finished, and the files, relative to the root."""

    overlay: str = __version__
    finished: bool = True
    files: dict[str, Entry] = field(default_factory=dict)


@dataclass(frozen=True)
class Wanted:
    """One file as it should be, and as vLLM has it in stock."""

    original: bytes
    content: bytes
    patches: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """What was done: the files written, a line for each that was left alone, and the patches' outcomes (bake only)."""

    written: tuple[str, ...]
    remarks: tuple[str, ...] = ()
    outcomes: tuple[Outcome, ...] = ()


def bake(root: Path, series: Sequence[Patch], release: str | None, skipped: frozenset[str] = frozenset()) -> Report:
    """Write the mended files below root, the folder that holds vllm/. What is baked already is left as it is.

    Raises Refused, with nothing changed, for unknown source, a vLLM that can't be written to, or a file that somebody
    edited after it was baked.
    """
    with _locked(root):
        store = Store(root)
        record = store.load()
        wanted, outcomes = _wanted(store, record, series, release, skipped)
        doubts = [f"{o.patch.name} {_doubt(o)}" for o in outcomes if o.failed or o.verdict.kind == "unknown"]
        if doubts:
            raise Refused(f"not baked, since {'; '.join(doubts)}; ROCM_FIXES_SKIP leaves a patch out")
        edited = [path for path, entry in record.files.items() if entry.on_disk(_read(root / path)) == "edited"]
        if edited:
            raise Refused(f"{edited[0]} was edited after it was baked: reinstall vLLM, or undo the edit")
        changes = {path: w for path, w in wanted.items() if _read(root / path) != w.content}
        baked = {path: w for path, w in wanted.items() if w.patches}
        if not changes and record.finished and record.files.keys() == baked.keys():
            return Report((), outcomes=outcomes)
        _check_writable(root, [*changes, *record.files])
        for path, w in baked.items():
            store.keep(w.original)
            entry = record.files.get(path)
            if entry is None or entry.original != _digest(w.original):
                entry = record.files[path] = Entry(_digest(w.original), [], 0, [])
            if entry.on_disk(_read(root / path)) == "stock":
                entry.mtime_ns = (root / path).stat().st_mtime_ns
            entry.baked = [*dict.fromkeys([*entry.baked, _digest(w.content)])]
            entry.patches = list(w.patches)
        record.overlay, record.finished = __version__, False
        store.save(record)
        times = {path: record.files[path].mtime_ns for path in changes if path not in baked}
        _replace(root, {path: w.content for path, w in changes.items()}, record, times)
        for path in [path for path in record.files if path not in baked]:
            del record.files[path]
        for path, entry in record.files.items():
            entry.baked = [_digest(wanted[path].content)]
        record.finished = True
        store.save(record)
        store.tidy(record)
        return Report(tuple(changes), outcomes=outcomes)


def check(root: Path, series: Sequence[Patch], release: str | None, skipped: frozenset[str] = frozenset()) -> list[str]:
    """What on disk isn't what `bake` would leave there, a line each; none where it is. Raises Refused as bake does."""
    store = Store(root)
    record = store.load(only_read=True)
    wanted, outcomes = _wanted(store, record, series, release, skipped)
    lines = [f"{o.patch.name} {_doubt(o)}" for o in outcomes if o.failed or o.verdict.kind == "unknown"]
    lines += [] if record.finished else ["a bake or an unbake was interrupted: run it again"]
    for path, w in wanted.items():
        if _read(root / path) != w.content:
            lines.append(
                f"{path} isn't what vllm-rocm-fixes {__version__} would bake: {', '.join(w.patches) or 'stock'}"
            )
    edited = (path for path, entry in record.files.items() if entry.on_disk(_read(root / path)) == "edited")
    return lines + [f"{path} was edited after it was baked" for path in edited]


def unbake(root: Path) -> Report:
    """Put the stock files below root back, and forget them. Needs the record alone, whichever overlay wrote it.

    A file that isn't what was baked is left alone, with a remark; one that still calls this package stays in the
    record. Raises Refused, with nothing changed, where the record can't be trusted or vLLM can't be written to.
    """
    with _locked(root):
        store = Store(root)
        record = store.load()
        if not record.files:
            store.remove()
            return Report(())
        found = {path: entry.on_disk(_read(root / path)) for path, entry in record.files.items()}
        originals = {path: store.original(record.files[path].original) for path, x in found.items() if x == "baked"}
        _check_writable(root, list(record.files))
        record.finished = False
        store.save(record)
        _replace(root, originals, record, {path: entry.mtime_ns for path, entry in record.files.items()})
        said = {
            "missing": "is gone: nothing to put back",
            "changed": "isn't what was baked (vLLM was installed anew?), and is left as it is",
            "edited": "was edited after it was baked, and is left as it is: reinstall vLLM, or undo the edit",
        }
        remarks = tuple(f"{path} {said[state]}" for path, state in found.items() if state in said)
        record.files = {path: entry for path, entry in record.files.items() if found[path] == "edited"}
        if record.files:
            record.finished = True
            store.save(record)
            store.tidy(record)
        else:
            store.remove()
        return Report(tuple(originals), remarks)


def state(root: Path) -> dict[str, Any] | None:
    """What is baked below root, for reports; None where nothing is. Raises Refused where the record can't be read."""
    record = Store(root).load(only_read=True)
    if not record.files:
        return None
    files = [
        {"path": path, "patches": entry.patches, "on_disk": entry.on_disk(_read(root / path))}
        for path, entry in record.files.items()
    ]
    return {"overlay": record.overlay, "finished": record.finished, "files": files}


def _wanted(
    store: Store, record: Record, series: Sequence[Patch], release: str | None, skipped: frozenset[str]
) -> tuple[dict[str, Wanted], tuple[Outcome, ...]]:
    """Every file that a bake would write or has written, as it should be, and the outcomes on the stock files."""
    root = store.root

    def stock(path: Path) -> bytes:
        content = path.read_bytes()
        entry = record.files.get(path.relative_to(root).as_posix())
        return store.original(entry.original) if entry and entry.on_disk(content) == "baked" else content

    wanted: dict[str, Wanted] = {}
    outcomes: list[Outcome] = []
    unguarded = skipped | {guard.name for guard in GUARDS}
    for surveyed in modules(root, series, release, unguarded, read=stock):
        outcomes += surveyed.mended.outcomes
        if surveyed.path is None or surveyed.source is None:
            continue
        path = surveyed.path.relative_to(root).as_posix()
        if surveyed.mended.tree is not None:
            try:
                content = rewrite(surveyed.source, surveyed.mended.tree)
            except ValueError as error:
                raise Refused(f"not baked, since {path}: {error}") from error
            names = tuple(outcome.patch.name for outcome in surveyed.mended.outcomes if outcome.applied)
            wanted[path] = Wanted(surveyed.source, content, names)
    for path, entry in record.files.items():
        if path not in wanted and entry.on_disk(_read(root / path)) == "baked":
            original = store.original(entry.original)
            wanted[path] = Wanted(original, original, ())
    return wanted, tuple(outcomes)


class Store:
    """The folder beside vllm/ with the record and the stock files; what another user can write there isn't used."""

    def __init__(self, root: Path) -> None:
        self.root, self.folder = root, root / STORE

    def load(self, only_read: bool = False) -> Record:
        """The record; an empty one where there is none. Raises Refused where it can't be trusted.

        For a report, what vLLM's own owner wrote is good enough; what is put back must be this user's, or root's.
        """
        if not os.path.lexists(self.folder):
            return Record()
        owners = {os.geteuid(), 0} | ({(self.root / "vllm").stat().st_uid} if only_read else set())
        self._trust(self.folder.lstat(), self.folder, owners, stat.S_ISDIR)
        above = self.root.stat().st_mode
        if above & stat.S_IWOTH and not above & stat.S_ISVTX:
            raise Refused(f"{self.root} can be written by every user: what lies in it isn't trusted")
        content = self._secure("record.json", owners)
        if content is None:
            return Record()
        try:
            data = json.loads(content)
            if data["format"] != FORMAT:
                raise Refused(
                    f"{self.folder} was made by vllm-rocm-fixes {data['overlay']}: use that version, or a newer"
                )
            files = {path: Entry(**entry) for path, entry in data["files"].items()}
            record = Record(data["overlay"], data["finished"], files)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Refused(f"{self.folder}/record.json isn't a record of a bake: {error}") from error
        for path in files:
            if not (path.endswith(".py") and _inside(self.root, path)):
                raise Refused(f"{self.folder}/record.json names {path}, which isn't a file of this vLLM")
        return record

    def save(self, record: Record) -> None:
        """Write the record, whole or not at all."""
        files = {path: vars(entry) for path, entry in record.files.items()}
        data = {"format": FORMAT, "overlay": record.overlay, "finished": record.finished, "files": files}
        self._write("record.json", json.dumps(data, indent=1).encode())

    def keep(self, original: bytes) -> None:
        """Keep a stock file's bytes."""
        if self._secure(_kept_as(_digest(original)), {os.geteuid(), 0}) != original:
            self._write(_kept_as(_digest(original)), original)

    def original(self, digest: str) -> bytes:
        """A stock file's bytes. Raises Refused where they aren't there, aren't the same, or can't be trusted."""
        owners = {os.geteuid(), 0, (self.root / "vllm").stat().st_uid}
        content = self._secure(_kept_as(digest), owners)
        if content is None or _digest(content) != digest:
            raise Refused(f"{self.folder}/{_kept_as(digest)} is gone or damaged: reinstall vLLM")
        return content

    def tidy(self, record: Record) -> None:
        """Forget the stock files that the record doesn't need."""
        needed = {_kept_as(entry.original) for entry in record.files.values()}
        for path in sorted(self.folder.glob(_kept_as("*") + "*")):
            if path.name not in needed:
                os.unlink(path)

    def remove(self) -> None:
        """Remove the folder; the record first, so that what remains after an interruption says nothing."""
        if not self.folder.is_dir():
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.folder / "record.json")
        self.tidy(Record())
        for path in self.folder.glob(f"*{_TEMPORARY}"):
            os.unlink(path)
        os.rmdir(self.folder)
        _sync(self.root)

    def _write(self, name: str, content: bytes) -> None:
        path = self.folder / name
        if not self.folder.is_dir():
            os.mkdir(self.folder, 0o755)
            os.chmod(self.folder, 0o755)  # whatever the umask says: other users may read what is baked
            _sync(self.root)
        os.replace(_temporary(path, content, 0o644), path)
        _sync(self.folder)

    def _secure(self, name: str, owners: set[int]) -> bytes | None:
        try:
            descriptor = os.open(self.folder / name, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Refused(f"{self.folder / name} can't be read: {error.strerror}") from error
        with open(descriptor, "rb") as file:
            self._trust(os.fstat(descriptor), self.folder / name, owners, stat.S_ISREG)
            return file.read()

    @staticmethod
    def _trust(status: os.stat_result, path: Path, owners: set[int], kind: Any) -> None:
        if not kind(status.st_mode):
            raise Refused(f"{path} isn't what a bake leaves there: remove it, and reinstall vLLM")
        if status.st_uid not in owners or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise Refused(f"{path} can be written by another user, so it isn't trusted: act as its owner, or remove it")


# Files


def _replace(root: Path, contents: dict[str, bytes], record: Record, times: dict[str, int]) -> None:
    """Put new contents in the place of files, each whole or not at all; owner, group, mode and attributes stay.

    times: nanoseconds, for files that get back the time they had. Leftovers of an interrupted run, and all bytecode
    of the files in the record, go.
    """
    for path in record.files:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_temporary_name(root / path))
    written: dict[str, Path] = {}
    try:
        for path, content in contents.items():
            written[path] = _temporary_name(root / path)
            _temporary(root / path, content, None)
    except BaseException:  # a full disk: nothing has changed yet
        for temporary in written.values():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        raise
    for path, temporary in written.items():
        if path in times:
            os.utime(temporary, ns=(times[path], times[path]))
        os.replace(temporary, root / path)
    for path in {*record.files, *contents}:
        file = root / path
        for compiled in sorted((file.parent / "__pycache__").glob(f"{file.stem}.*.pyc")):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(compiled)
    for folder in sorted({(root / path).parent for path in contents}):
        _sync(folder)


def _temporary(path: Path, content: bytes, mode: int | None) -> Path:
    """Write content beside path, to be renamed; mode None: with all that the file there has."""
    temporary = _temporary_name(path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        if mode is None:
            owner = path.stat()
            os.fchown(descriptor, owner.st_uid, owner.st_gid)
            shutil.copystat(path, temporary)
            os.utime(temporary)  # the new content has a time of its own
        else:
            os.fchmod(descriptor, mode)
        os.fsync(descriptor)
    return temporary


def _temporary_name(path: Path) -> Path:
    return path.with_name(f".{path.name}{_TEMPORARY}" if path.suffix == ".py" else f"{path.name}{_TEMPORARY}")


def _check_writable(root: Path, paths: Sequence[str]) -> None:
    for path in dict.fromkeys(paths):
        file = root / path
        if not _inside(root, path):
            raise Refused(f"{file} is a link, or lies behind one: name the real folder with --vllm")
        if not file.exists():
            continue
        owner = file.stat()
        if os.geteuid() != 0 and (owner.st_uid != os.geteuid() or owner.st_gid not in {os.getegid(), *os.getgroups()}):
            raise Refused(f"{file} belongs to another user, and would not any more: act as its owner, or as root")
        _check_folder(file.parent)
    _check_folder(root)


def _check_folder(folder: Path) -> None:
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        raise Refused(f"{folder} can't be written to: act as its owner, or make it writable")


def _inside(root: Path, path: str) -> bool:
    """Whether a relative path stays below root, with no link on its way."""
    parts = path.split("/")
    return ".." not in parts and not path.startswith("/") and (root.resolve() / path).resolve() == root.resolve() / path


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    """One bake or unbake at a time; the lock is on the folder vllm/ itself, so no file is left behind."""
    descriptor = os.open(root / "vllm", os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(f"another bake or unbake of {root} is running") from None
        except OSError:  # a file system without such locks
            pass
        yield
    finally:
        os.close(descriptor)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _kept_as(digest: str) -> str:
    return f"{digest}.stock"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _doubt(outcome: Outcome) -> str:
    return f"failed: {outcome.failed}" if outcome.failed else f"is unknown: {outcome.verdict.reason}"
