"""What to make of an optional package whose import or call failed: absent, or somebody wants the process to stop."""

from __future__ import annotations

import logging
import signal
from itertools import pairwise

logger = logging.getLogger("vllm.rocm_fixes")


def is_interruption(error: BaseException) -> bool:
    """Somebody wants the process to stop: Ctrl-C, or a signal handler's SystemExit, also where another came of it.

    vLLM's workers are told to stop by SIGTERM, whose handler raises SystemExit; AITER raises the same when its JIT
    build fails.
    """
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    return any(isinstance(e, KeyboardInterrupt) or (isinstance(e, SystemExit) and _from_handler(e)) for e in chain)


def count_as_absent(package: str, error: BaseException) -> None:
    """Say why a package that is installed counts as absent. Raises the error again where it is an interruption.

    A missing package is stock's ordinary case, and not worth a line.
    """
    if is_interruption(error):
        raise error
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == package:
        return
    logger.warning("%s can't be imported and counts as absent: %s: %s", package, type(error).__name__, error)


def _from_handler(error: BaseException) -> bool:
    """A signal handler raised it: one that is set, or one that was handed a number and the interrupted frame."""
    set_now = map(signal.getsignal, signal.valid_signals())
    known = {getattr(getattr(h, "__func__", getattr(h, "func", h)), "__code__", None) for h in set_now}
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        if step.tb_next.tb_frame.f_code in known:
            return True
        values = list(step.tb_next.tb_frame.f_locals.values())
        values = [v for value in values for v in (value if type(value) is tuple else (value,))]
        if any(isinstance(a, int) and b is step.tb_frame for a, b in pairwise(values)):
            return True
        step = step.tb_next
    return False
