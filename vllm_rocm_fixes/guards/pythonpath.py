"""Guard pythonpath: importing TileLang leaves PYTHONPATH and sys.path as they were.

What stock does: `tilelang/env.py` puts its vendored TVM folder in front of PYTHONPATH and sys.path, and its library
folder in front of sys.path (0.1.9 to 0.1.15).

What a user sees: every child, of any Python, finds a `tvm` that isn't its own. One that merely asks whether TVM is
there (torch._dynamo does) loads TileLang's HIP stub into its global scope. Where tvm_ffi isn't installed, the child
gets a ModuleNotFoundError instead. (That an interpreter can't find `encodings` then, as vLLM #44823 has it, could not
be reproduced.)

What this does: when the outermost import has ended, however it ended, the entries that it put there are taken away,
one by one. What another thread or the user put there stays. In this process what lies in those folders is still found,
by a finder in the place that the entries had: TileLang imports some of it late, and a second try after a failure needs
it. TVM_LIBRARY_PATH and TL_* stay. They are set only where the user has not set them, make nothing importable, are
read by nobody but TVM and TileLang, and tvm/libinfo.py reads TVM_LIBRARY_PATH at its calls, not only at import.

What it takes: TVM's own tvm.contrib.popen_pool starts its workers through PYTHONPATH. TileLang doesn't use it.
"""

from __future__ import annotations

import _imp
import contextlib
import importlib.machinery
import logging
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

logger = logging.getLogger("vllm.rocm_fixes")

_LIBRARIES = ("libtilelang.so", "libtvm_runtime.so", "libtvm.so")


@contextlib.contextmanager
def around(package: str) -> Iterator[None]:
    """Take away what the outermost of these imports adds, whatever it raises."""
    _enter()
    try:
        yield
    finally:
        _leave()


def state() -> str:
    """What the guard did in this process, in words."""
    return _state.words


class _State:
    depth = 0
    variable: str | None = None
    path: Counter[str] = Counter()
    words = "neither tilelang nor tvm was imported"


class Kept:
    """Finds top-level modules in the folders that were taken off sys.path."""

    def __init__(self) -> None:
        self.folders: list[str] = []

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec that sys.path would have given with those folders in front."""
        return importlib.machinery.PathFinder.find_spec(name, self.folders, target) if path is None else None


class _Here(threading.local):
    depth = 0  # of this thread alone


_state = _State()
_here = _Here()
_kept = Kept()
_lock = [threading.Lock()]


def _after_fork() -> None:
    """A forked child has none of the threads that may hold the lock or be in the middle of such an import."""
    _lock[0] = threading.Lock()
    _state.depth = _here.depth


os.register_at_fork(after_in_child=_after_fork)


@contextlib.contextmanager
def _no_search() -> Iterator[None]:
    """No thread looks through sys.path in here: PathFinder walks the list itself, and would miss a folder."""
    _imp.acquire_lock()
    try:
        yield
    finally:
        _imp.release_lock()


def _enter() -> None:
    with _lock[0]:
        if _state.depth == 0:
            _state.variable = os.environ.get("PYTHONPATH")
            _state.path = Counter(_strings(sys.path))
        _state.depth += 1
        _here.depth += 1


def _leave() -> None:
    with _no_search(), _lock[0]:
        _here.depth -= 1
        _state.depth -= 1
        if _state.depth:
            return
        try:
            folders = _clean_path()
            folders += [entry for entry in _clean_variable() if entry not in folders]
            _keep(folders)
            gone = ", ".join(folders)
            _state.words = f"taken away: {gone}" if gone else "the import added nothing"
        except Exception as error:
            _state.words = f"failed: {type(error).__name__}: {error}"
            logger.warning("guard pythonpath %s", _state.words)


def _clean_path() -> list[str]:
    """Take the import's entries off sys.path, each by itself: another thread may be changing the list."""
    entries = _added(list(_strings(sys.path)), _state.path)
    for entry in entries:
        with contextlib.suppress(ValueError):
            sys.path.remove(entry)
    return entries


def _clean_variable() -> list[str]:
    value = os.environ.get("PYTHONPATH")
    if value is None:
        return []
    before = _state.variable
    rest = value.split(os.pathsep)
    entries = _added(rest, Counter(before.split(os.pathsep) if before else ()))
    for entry in entries:
        rest.remove(entry)
    if entries and (rest or before is not None):
        os.environ["PYTHONPATH"] = os.pathsep.join(rest)
    elif entries:
        os.environ.pop("PYTHONPATH", None)
    return entries


def _added(entries: list[str], before: Counter[str]) -> list[str]:
    """What is there more often than before, and is TVM's or TileLang's."""
    return [entry for entry in (Counter(entries) - before).elements() if _tilelangs(Path(entry))]


def _tilelangs(folder: Path) -> bool:
    """Tell whether a folder holds TVM's Python or TileLang's libraries; a name alone says nothing."""
    return (folder / "tvm" / "__init__.py").is_file() or any((folder / name).is_file() for name in _LIBRARIES)


def _keep(folders: list[str]) -> None:
    _kept.folders += [folder for folder in folders if folder not in _kept.folders]
    if _kept.folders and _kept not in sys.meta_path:
        finders: list[object] = list(sys.meta_path)
        usual = importlib.machinery.PathFinder
        place = finders.index(usual) if usual in finders else len(finders)
        sys.meta_path.insert(place, _kept)


def _strings(entries: Sequence[object]) -> list[str]:
    return [entry for entry in entries if isinstance(entry, str)]
