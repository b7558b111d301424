"""Guard aiter_locks: who waits for a lock file of AITER's is told which one.

What stock does: importing AITER builds kernels, and each build waits for its lock file. In the releases of early 2026
it waits without end and without a word, and a builder that was killed leaves its file behind (aiter #5266).

What a user sees: an engine that starts, or a first request, and then nothing, for ever.

What this does: while AITER is imported, and while its sampler answers for the first time, a thread looks every few
seconds whether lock files lie in AITER's build folders that this process doesn't hold itself. It says each once: which
file, how old, and who holds it. Nothing is removed; whether another host shares the folder, only the operator knows.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from .. import locks

logger = logging.getLogger("vllm.rocm_fixes")

SECONDS = 5.0  # between two looks; an import without builds takes less on a warm disk
_words: list[str] = []
_said: set[Path] = set()


@contextlib.contextmanager
def around(package: str = "aiter") -> Iterator[None]:
    """Say which lock files a block may be waiting for, as long as it runs."""
    done = threading.Event()
    watch = threading.Thread(target=_watch, args=(done,), name="rocm-fixes-aiter-locks", daemon=True)
    try:
        watch.start()
    except RuntimeError:  # no thread can be had: nothing is said
        watch = threading.current_thread()
    try:
        yield
    finally:
        done.set()
        if watch is not threading.current_thread():
            watch.join(1.0)  # whoever forks after this has one thread less


def state() -> str:
    """What the guard said in this process, in words."""
    return "; ".join(_words) or "nothing waited for a lock file of AITER's"


def _watch(done: threading.Event) -> None:
    while not done.wait(SECONDS):
        with contextlib.suppress(Exception):  # a folder that goes away meanwhile; the next look comes
            for lock in locks.find(locks.everywhere(_package(), os.environ)):
                _tell(lock)


def _tell(lock: locks.Lock) -> None:
    if lock.path in _said or lock.pid == os.getpid() or not (lock.stale or lock.pid or lock.where):
        return
    _said.add(lock.path)
    age = f"{lock.path} is {lock.seconds:.0f} s old"
    if lock.stale:
        advice = f"if no compiler runs and no other host shares that folder: rm {lock.path}"
        text = f"AITER may wait without end: its lock file {age}, and no process that can be seen holds it; {advice}"
    else:
        text = f"AITER waits for a build: its lock file {age}; {lock.where or f'process {lock.pid} holds it'}"
    _words.append(text)
    logger.warning("guard aiter_locks: %s", text)


def _package() -> Path | None:
    """The folder of aiter, which may be in the middle of its import."""
    spec = importlib.util.find_spec("aiter")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return Path(folders[0]) if folders else None
