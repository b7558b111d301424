"""Guard tilelang_pair: a TileLang that would abort the interpreter counts as absent.

What stock does: imports TileLang, or asks whether it can. TileLang 0.1.10, 0.1.11 and 0.1.12 beside apache-tvm-ffi
0.1.12 or later register one type attribute twice, and TVM ends the process from C++ ("TypeAttr `__ffi_repr__` is
already registered", SIGABRT); no except clause helps. ROCm requirements left tvm-ffi unpinned in 0.21.0 to 0.22.1.

Measured by importing each pair of TileLang 0.1.9 to 0.1.15 and tvm-ffi 0.1.9 to 0.1.15.post2. TileLang 0.1.9, 0.1.13
and later raise an ordinary exception beside a tvm-ffi that doesn't fit, and that is left to them.

What this does: read both versions from the metadata, import neither, and enter None for `tilelang` in sys.modules.
That is how Python marks a module as absent: `import` raises ModuleNotFoundError, `find_spec` answers None.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from collections.abc import Iterator
from importlib import metadata

logger = logging.getLogger("vllm.rocm_fixes")

_words: list[str] = []


def bad_pair() -> str | None:
    """Why importing the installed TileLang would abort this process; None where that isn't known."""
    tilelang = _version("tilelang")
    tvm_ffi = _version("apache-tvm-ffi") if tilelang is not None else None
    if tilelang is None or tvm_ffi is None or not aborts(tilelang, tvm_ffi):
        return None
    return (
        f"TileLang {tilelang} counts as absent: beside apache-tvm-ffi {tvm_ffi} its import aborts the process. "
        f"apache-tvm-ffi {'0.1.11' if _numbers(tilelang) == (0, 1, 12) else '0.1.10'} fits"
    )


def aborts(tilelang: str, tvm_ffi: str) -> bool:
    """Tell whether a version of TileLang beside a version of tvm-ffi is known to abort the interpreter."""
    return (0, 1, 10) <= _numbers(tilelang) <= (0, 1, 12) and _numbers(tvm_ffi) >= (0, 1, 12)


def install() -> None:
    """Mark TileLang as absent where the pair is bad and TileLang isn't loaded; say so once."""
    reason = None if "tilelang" in sys.modules else bad_pair()
    if reason:
        sys.modules["tilelang"] = None  # type: ignore[assignment]  # what Python itself takes for "absent"
        _words[:] = [reason]
        logger.warning("guard tilelang_pair: %s", reason)


@contextlib.contextmanager
def around(package: str) -> Iterator[None]:
    """Raise ModuleNotFoundError where a bad pair turned up after install(), by a longer sys.path for example."""
    reason = bad_pair()
    if reason:
        _words[:] = [reason]
        raise ModuleNotFoundError(reason, name=package)
    yield


def state() -> str:
    """What the guard found in this process, in words."""
    return _words[0] if _words else "no pair that is known to abort"


def _version(distribution: str) -> str | None:
    """A distribution's version as installed, None where it isn't or its metadata can't be read."""
    try:
        return metadata.version(distribution)
    except Exception:  # a half-written dist-info raises more than PackageNotFoundError
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers: 0.1.15.post2 and 0.1.15+rocm are 0.1.15."""
    found = re.match(r"\d+(?:\.\d+)*", version or "")
    return tuple(int(part) for part in found[0].split(".")[:3]) if found else ()
