"""What is done to the process, and not to vLLM.

Every process has the guards, and few import what they guard: a guard's own file is imported when it has work to do.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple


def _nothing() -> None:
    return None


def _late(place: str) -> Callable[..., Any]:
    """The function `file.name` of this folder, whose file is imported by the call."""
    file, _, name = place.partition(".")

    def call(*args: Any) -> Any:
        return getattr(import_module(f"{__name__}.{file}"), name)(*args)

    return call


def _state(file: str, idle: str) -> Callable[[], str]:
    """What a guard says of itself; idle where its file was not needed yet."""
    ask = _late(f"{file}.state")
    return lambda: ask() if f"{__name__}.{file}" in sys.modules else idle


def _see_whether_it_aborts() -> None:
    if "tilelang" in sys.modules or find_spec("tilelang") is not None:
        _late("pair.install")()


def _see_who_was_first() -> None:
    if sys.modules.get("tilelang") or sys.modules.get("tvm"):  # None stands for one that counts as absent
        _late("hip.install")()


class Guard(NamedTuple):
    """A context in which a package's __init__ is executed.

    around is entered just before and left just after, whatever happens; an ImportError of the package's name from
    entering it forbids the import. install is called once in each process, before the finder is in place. state says in
    words what the guard did and found in this process. until names the first release of vLLM that does the same itself.
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
        around=_late("pair.around"),
        summary="a TileLang whose import aborts the process beside this tvm-ffi counts as absent",
        origin=("vLLM #45169", "TileLang #2367", "TileLang #2552"),
        state=_state("pair", "TileLang isn't installed"),
        install=_see_whether_it_aborts,
    ),
    Guard(
        name="hip",
        packages=("tilelang", "tvm"),
        around=_late("hip.around"),
        summary="torch's HIP runtime stands before TileLang's stub of it",
        origin=("vLLM #51151", "vLLM #51159", "AITER #4585", "TileLang #2919"),
        state=_state("hip", "neither tilelang nor tvm was imported"),
        install=_see_who_was_first,
        until="0.28.0",  # vllm/_aiter_ops.py reopens the runtime there
    ),
    Guard(
        name="pythonpath",
        packages=("tilelang", "tvm"),
        around=_late("pythonpath.around"),
        summary="PYTHONPATH and sys.path are as they were before TileLang's import",
        origin=("vLLM #44823",),
        state=_state("pythonpath", "neither tilelang nor tvm was imported"),
    ),
    Guard(
        name="aiter_locks",
        packages=("aiter", "aiter.ops.sampling"),
        around=_late("aiter_locks.around"),
        summary="the lock file that an import of AITER waits for is named in the log",
        origin=("AITER #5266",),
        state=_state("aiter_locks", "nothing waited for a lock file of AITER's"),
    ),
)
