"""Guard hip: the HIP runtime that torch has mapped stands first in the global scope before TVM is loaded.

What stock does: `tvm/base.py` opens libtvm_runtime.so with RTLD_GLOBAL, and with it a stub of the HIP runtime that it
needs (libhip_stub.so in TileLang 0.1.10 and 0.1.11, libstub_hip.so from 0.1.12). The loader looks through the global
scope before an extension's own needs, and torch's runtime isn't in it: torch is opened locally. So an extension that
is bound afterwards (AITER's, or one that was opened lazily before) calls the stub.

What a user sees: the stub of 0.1.10 to 0.1.13 answers hipGetDevicePropertiesR0600 with the older, shorter struct, and
launches fail with "invalid configuration argument" (vLLM #51151). Where only libamdhip64.so.7 can be found, the stub
throws out of a C function at its first use and the process aborts.

What this does: reopen the very file that is mapped, with RTLD_GLOBAL and RTLD_NOLOAD. The first in the global scope
wins, so this comes before TVM. The path is the process's own; opening another one, /opt/rocm/lib say, could load a
second runtime whose handles torch doesn't know.

When TVM was there first, reopening changes nothing: first in the scope is first. (Nor does the stub find a runtime
that comes behind it: RTLD_NEXT searches what libtvm_runtime.so needs, and not the global scope.) Then this says who
answers, what that means and what still helps.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from ..settings import flag

logger = logging.getLogger("vllm.rocm_fixes")

ASKED = "hipGetDevicePropertiesR0600"
RUNTIME = re.compile(r"/libamdhip64\.so[.0-9]*$")
STUB = re.compile(r"/lib(?:hip_stub|stub_hip)\.so$")
TORCHS = re.compile(r"/lib(?:c10|torch)_hip\.so$")
# The stub's table of runtime functions: 30 pointers in 0.1.10 to 0.1.13 (src/backend/rocm/stubs/hip.h in its wheel).
SLOTS = 30


class Library(NamedTuple):
    """A file that is mapped into this process; gone: it was deleted or replaced on disk since."""

    path: str
    gone: bool
    ranges: tuple[tuple[int, int], ...]

    def holds(self, address: int | None) -> bool:
        """Tell whether an address lies in this library."""
        return address is not None and any(start <= address < end for start, end in self.ranges)


class Unprotected(Exception):
    """Why torch's runtime can't be put first, in words."""


def mapped(pattern: re.Pattern[str], maps: str = "/proc/self/maps") -> list[Library]:
    """The libraries in a process's maps whose path the pattern finds, one for each file; OSError without maps."""
    files: dict[tuple[str, str], list[tuple[int, int]]] = {}
    with open(maps, encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            fields = line.rstrip("\n").split(None, 5)
            if len(fields) == 6 and pattern.search(fields[5].removesuffix(" (deleted)")):
                start, end = (int(edge, 16) for edge in fields[0].split("-"))
                files.setdefault((fields[5], fields[4]), []).append((start, end))
    return [
        Library(path.removesuffix(" (deleted)"), path.endswith(" (deleted)"), tuple(ranges))
        for (path, _), ranges in files.items()
    ]


def torchs() -> Library | None:
    """The HIP runtime that torch uses.

    None where torch isn't loaded or isn't a ROCm build, or no runtime is mapped. Raises Unprotected where it can't be
    told.
    """
    if not _rocm(sys.modules.get("torch")):
        return None
    try:
        runtimes = mapped(RUNTIME)
        return _bound(runtimes) if runtimes else None
    except OSError as error:
        raise Unprotected(f"the process's maps can't be read: {error}") from None


def promote(runtime: Library) -> None:
    """Put a HIP runtime that is mapped into the global scope; Unprotected where it can't be reopened."""
    # A file that is gone can only be asked for by its SONAME; with RTLD_NOLOAD that opens nothing new either.
    soname = re.sub(r"(\.so\.\d+)[.0-9]*$", r"\1", Path(runtime.path).name)
    for name in (runtime.path, soname) if runtime.gone else (runtime.path,):
        with contextlib.suppress(OSError):
            if runtime.holds(_address(ctypes.CDLL(name, mode=os.RTLD_NOLOAD), "hipGetDeviceCount")):
                ctypes.CDLL(name, mode=os.RTLD_GLOBAL | os.RTLD_NOLOAD)
                return
    gone = ", whose file was deleted or replaced," if runtime.gone else ""
    raise Unprotected(f"{runtime.path}{gone} can't be reopened")


def owner() -> tuple[str, int] | None:
    """Who answers for the symbol that is asked for in the global scope: the file, and the address; None: nobody."""
    everything = ctypes.CDLL(None)
    address = _address(everything, ASKED)
    if address is None:
        return None
    info = _Info()
    everything.dladdr.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Info)]
    found = everything.dladdr(address, ctypes.byref(info))
    return (os.fsdecode(info.file) if found and info.file else "a file that can't be told"), address


def heal() -> str:
    """Point the stub's one wrong slot at the function whose struct its callers expect. Returns what came of it.

    Mends extensions that are bound to the stub already, and those that will be. It changes nothing unless exactly one
    slot holds torch's hipGetDeviceProperties: in TileLang 0.1.14 and later none does.
    """
    runtime, stubs = torchs(), mapped(STUB)
    if runtime is None or len(stubs) != 1:
        return f"{len(stubs)} stubs are mapped, and {'a' if runtime else 'no'} HIP runtime of torch's"
    stub, hip = (ctypes.CDLL(library.path, mode=os.RTLD_NOLOAD) for library in (stubs[0], runtime))
    available, table = (
        getattr(stub, f"_ZN3tvm2tl3hip12HIPDriverAPI{name}Ev", None) for name in ("12is_available", "3get")
    )
    if available is None or table is None:
        return "the stub doesn't show its table"
    available.restype, table.restype = ctypes.c_bool, ctypes.c_void_p
    if not available():  # asking for the table would end the process
        return "the stub finds no runtime, and the first HIP call through it ends the process"
    legacy, current = _address(hip, "hipGetDeviceProperties"), _address(hip, ASKED)
    slots = (ctypes.c_void_p * SLOTS).from_address(table())
    wrong = [place for place in range(SLOTS) if slots[place] == legacy]
    if not wrong and current is not None and current in slots:
        return "repaired"
    if legacy is None or current is None or len(wrong) != 1:
        return f"{len(wrong)} slots of the stub's table look wrong where one should"
    slots[wrong[0]] = current
    return "repaired"


@contextlib.contextmanager
def around(package: str) -> Iterator[None]:
    """Promote torch's runtime before the package is executed, and see afterwards who answers."""
    _contained(lambda: _before(package))
    try:
        yield
    finally:
        _contained(_after)


def install() -> None:
    """TileLang or TVM got in first: see who answers, and say what still helps."""
    _contained(_late)


def state() -> str:
    """What the guard did and found in this process, in words."""
    return _state.words


class _State:
    words: str = "neither tilelang nor tvm was imported"
    runtime: Library | None = None
    why: str = ""


class _Info(ctypes.Structure):
    """Dl_info of dladdr(3)."""

    _fields_ = [
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    ]


_state = _State()
_said: set[str] = set()


def _before(package: str) -> None:
    if package == "tvm":
        _torch_first()
    try:
        _state.runtime = torchs()
        if _state.runtime:
            promote(_state.runtime)
    except Unprotected as reason:
        _state.why = str(reason)


def _late() -> None:
    try:
        _state.runtime = torchs()
        _state.why = "TVM was loaded before this guard" if _state.runtime else ""
    except Unprotected as reason:
        _state.why = str(reason)
    _after()


def _after() -> None:
    """See who answers for the symbol that the stub gets wrong, and say so where it isn't torch's runtime."""
    if not _rocm(sys.modules.get("torch")):
        _state.words = "torch isn't a ROCm build, or not loaded: nothing to do"
        return
    found = owner()
    if _state.runtime is None and not _state.why:
        _state.words = "no HIP runtime is mapped: nothing to do"
    elif found is None:
        _state.words = "no HIP function is in the global scope"
    elif _state.runtime is not None and _state.runtime.holds(found[1]):
        _state.words = f"torch's HIP runtime answers first: {_state.runtime.path}"
    else:
        _state.words = _meaning(found[0])
        _warn(f"guard hip: {_state.words}")


def _meaning(file: str) -> str:
    """What it means that this file answers before torch's runtime, and what can be done; one line."""
    runtime = _state.runtime.path if _state.runtime else "torch's HIP runtime"
    why = f" ({_state.why})" if _state.why else ""
    head = f"{file} answers for {ASKED} before {runtime}{why}: "
    if not STUB.search(file):
        return f"{head}extensions bind to another HIP runtime than torch, and handles of one are invalid in the other"
    ends = "where only libamdhip64.so.7 can be found, the first HIP call ends the process"
    if b"\0hipGetDeviceProperties\0" not in Path(file).read_bytes():
        return f"{head}extensions call TileLang's stub, which hands on the right struct; {ends}"
    remedies = (
        "import vllm before tilelang, set TORCH_USE_RTLD_GLOBAL=1, preload torch's libamdhip64 with LD_PRELOAD, or use "
        "TileLang 0.1.14 or later"
    )
    if flag("ROCM_FIXES_HEAL", False):
        done = heal()
        if done == "repaired":
            return f"{head}its table was repaired (ROCM_FIXES_HEAL), and it hands on the right struct"
        head += f"its table was not repaired (ROCM_FIXES_HEAL), {done}; "
    else:
        remedies = f"set ROCM_FIXES_HEAL=1, which repairs the stub's table, {remedies}"
    return (
        f"{head}extensions that bind to it, AITER's kernels too, read device properties in the wrong layout and "
        f"launches fail with 'invalid configuration argument'; {ends}. What helps, from the next start on: {remedies}"
    )


def _bound(runtimes: list[Library]) -> Library:
    """The one of several runtimes that torch's own libraries are bound to."""
    if len(runtimes) == 1:
        return runtimes[0]
    files = " and ".join(runtime.path for runtime in runtimes)
    for library in mapped(TORCHS):
        with contextlib.suppress(OSError):
            address = _address(ctypes.CDLL(library.path, mode=os.RTLD_NOLOAD), "hipGetDeviceCount")
            for runtime in runtimes:
                if runtime.holds(address):
                    _warn(f"guard hip: {len(runtimes)} HIP runtimes are mapped, {files}; torch uses {runtime.path}")
                    return runtime
    raise Unprotected(f"{len(runtimes)} HIP runtimes are mapped, {files}, and torch's can't be told")


def _torch_first() -> None:
    """Import a ROCm torch before TVM does.

    tvm_ffi imports torch itself, at the top of its __init__ (0.1.9 to 0.1.15), but that is inside tvm, after this
    guard; tilelang imports torch before tvm. So this costs nothing, and only the order changes.
    """
    if "torch" in sys.modules or importlib.util.find_spec("tvm_ffi") is None:
        return
    spec = importlib.util.find_spec("torch")
    said = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8") if spec and spec.origin else ""
    if re.search(r"^hip\b[^=\n]*=\s*['\"]", said, re.MULTILINE):
        importlib.import_module("torch")


def _rocm(torch: object) -> bool:
    return bool(getattr(getattr(torch, "version", None), "hip", None))


def _address(library: ctypes.CDLL, symbol: str) -> int | None:
    try:
        return ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value
    except AttributeError:
        return None


def _contained(step: Callable[[], None]) -> None:
    """Nothing that goes wrong here reaches the import."""
    try:
        if sys.platform == "linux":
            step()
    except Exception as error:
        _state.words = f"failed: {type(error).__name__}: {error}"
        _warn(f"guard hip {_state.words}")


def _warn(text: str) -> None:
    if text not in _said:
        _said.add(text)
        logger.warning("%s", text)
