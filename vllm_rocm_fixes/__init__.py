"""vllm-rocm-fixes: the vLLM that an AMD cluster already runs starts clean.

vLLM calls the two doors through its entry points, in every process; nothing here has to be called by hand.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .process import Process

__all__ = ["__version__", "current", "prepare", "register"]
__version__ = "0.1.0"
_process: list[Process] = []
_lock = threading.Lock()
# A forked child has none of the threads that may hold it.
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]


def prepare() -> None:
    """Door vllm.platform_plugins: before the platform is chosen. Returns None, which says "not my platform"."""
    _contained("prepare")


def register() -> None:
    """Door vllm.general_plugins: EngineArgs, EngineCore, every worker, the registry's subprocess. Returns None."""
    _contained("register")


def current() -> Process:
    """The overlay in this process, with the patches of the series; made by the first call."""
    with _lock:
        if _process:
            return _process[0]
        from . import series
        from .guards import GUARDS
        from .process import Process

        _process.append(Process(series.load(), GUARDS))
        return _process[0]


def _contained(door: str) -> None:
    """vLLM calls us unguarded in some releases: no error of ours reaches it (strict mode's SystemExit is no error)."""
    try:
        getattr(current(), door)()
    except Exception as error:
        logging.getLogger("vllm.rocm_fixes").warning(
            "%s failed, stock is kept: %s: %s", door, type(error).__name__, error
        )
