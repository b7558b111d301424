"""What is done to the process, and not to vLLM."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

from . import aiter_locks, hip, pair, pythonpath


def _nothing() -> None:
    return None


class Guard(NamedTuple):
    """A context in which a package's __init__ is executed.

    around is entered just before and left just after, whatever happens; an ImportError from entering it forbids the
    import. install is called once in each process, before the finder is in place. state says in words what the guard
    did and found in this process. until names the first release of vLLM that does the same itself.
    """

    name: str
    packages: tuple[str, ...]
    around: Callable[[str], AbstractContextManager[None]]
    summary: str
    origin: tuple[str, ...]
    state: Callable[[], str]
    install: Callable[[], None] = _nothing
    until: str | None = None


GUARDS: tuple[Guard, ...] = (
    Guard(
        name="tilelang_pair",
        packages=("tilelang",),
        around=pair.around,
        summary="a TileLang whose import aborts the process beside this tvm-ffi counts as absent",
        origin=("vLLM #45169", "TileLang #2367", "TileLang #2552"),
        state=pair.state,
        install=pair.install,
    ),
    Guard(
        name="hip",
        packages=("tilelang", "tvm"),
        around=hip.around,
        summary="torch's HIP runtime stands before TileLang's stub of it",
        origin=("vLLM #51151", "vLLM #51159", "AITER #4585", "TileLang #2919"),
        state=hip.state,
        install=hip.install,
        until="0.28.0",  # vllm/_aiter_ops.py reopens the runtime there
    ),
    Guard(
        name="pythonpath",
        packages=("tilelang", "tvm"),
        around=pythonpath.around,
        summary="PYTHONPATH and sys.path are as they were before TileLang's import",
        origin=("vLLM #44823",),
        state=pythonpath.state,
    ),
    Guard(
        name="aiter_locks",
        packages=("aiter", "aiter.ops.sampling"),
        around=aiter_locks.around,
        summary="the lock file that an import of AITER waits for is named in the log",
        origin=("AITER #5266",),
        state=aiter_locks.state,
    ),
)
