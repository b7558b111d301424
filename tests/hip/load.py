"""load.py BUILD TILELANG STEP...: load libraries in this order, and say as JSON what the extension was bound to.

BUILD is what build.py made, TILELANG a folder with TileLang's real libraries. Opening libtvm_runtime.so globally is
what importing TileLang does to the loader, in 20 ms and without torch. With --guard before the steps, TVM is loaded
inside guard hip. torch here is a module with nothing but version.hip, and a library that needs the runtime.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import logging
import os
import sys
import types
from pathlib import Path

build, tilelang = Path(sys.argv[1]), Path(sys.argv[2])
steps = sys.argv[3:]
guarded = "--guard" in steps
answer: dict[str, object] = {"warnings": []}
libraries: dict[str, ctypes.CDLL] = {}


class Warnings(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        answer["warnings"].append(record.getMessage())


logging.getLogger("vllm.rocm_fixes").addHandler(Warnings())


def shared(name: str, mode: int = 0) -> None:
    library = libraries[Path(name).stem] = ctypes.CDLL(str(name), mode=mode)
    for function in "layout", "owner":
        with contextlib.suppress(AttributeError):
            getattr(library, function).restype = ctypes.c_char_p
    with contextlib.suppress(AttributeError):
        library.mark.restype = ctypes.c_long


def around(package: str) -> contextlib.AbstractContextManager[None]:
    if not guarded:
        return contextlib.nullcontext()
    from vllm_rocm_fixes.guards import hip

    return hip.around(package)


def take(step: str) -> None:
    word, _, argument = step.partition(":")
    mode = os.RTLD_GLOBAL if argument == "global" else 0
    if word == "torch":
        sys.modules["torch"] = types.ModuleType("torch")
        sys.modules["torch"].version = types.SimpleNamespace(hip=None if argument == "cpu" else "7.2.0")
        if argument != "alone":
            shared(build / "libtorch_like.so", mode)
    elif word == "c10":  # the same library under a name that torch's own have
        take("torch:alone")
        shared(build / "libc10_hip.so")
    elif word == "runtime":
        shared(build / "torch" / "libamdhip64.so.7", mode)
    elif word == "other":
        shared(build / "other" / "libamdhip64.so.7", mode)
    elif word == "stub":
        (stub,) = (*tilelang.glob("tilelang/lib/libhip_stub.so"), *tilelang.glob("tilelang/lib/libstub_hip.so"))
        with around("tvm"):
            shared(stub, mode)
    elif word in ("tvm", "unguarded-tvm"):
        with around("tvm") if word == "tvm" else contextlib.nullcontext():
            shared(tilelang / "tilelang/lib/libtvm_runtime.so", os.RTLD_GLOBAL | os.RTLD_LAZY)
        sys.modules["tvm"] = types.ModuleType("tvm")
    elif word == "late":
        from vllm_rocm_fixes.guards import hip

        hip.install()
        hip.install()
    elif word == "no-maps":
        from vllm_rocm_fixes.guards import hip

        hip.mapped.__defaults__ = (str(build / "no" / "maps"),)
    elif word == "delete":
        (build / "torch" / "libamdhip64.so.7.2.70200").unlink()
    elif word == "replace":
        file = build / "torch" / "libamdhip64.so.7.2.70200"
        file.unlink()
        file.write_bytes((build / "other" / file.name).read_bytes())
    elif word == "python":
        sys.path.insert(0, str(build))
        answer["layout"] = importlib.import_module("hip_extension").layout()
    elif word == "ask":
        extension = libraries[argument]
        answer["layout"] = extension.layout().decode()
        answer["mark"] = hex(extension.mark())
        if hasattr(extension, "owner"):
            names = b"hipGetDevicePropertiesR0600", b"hipMalloc", b"hipFuncSetAttribute"
            answer["owners"] = [extension.owner(name).decode() for name in names]
    elif word.startswith("extension"):
        shared(build / f"{word}.so", os.RTLD_LAZY)
    elif word == "--guard":
        pass
    else:
        raise ValueError(step)


for step in steps:
    try:
        take(step)
    except OSError as error:
        answer["error"] = str(error)
        break
with open("/proc/self/maps") as maps:
    files = {line.split(None, 5)[5].strip() for line in maps if "libamdhip64" in line}
answer["runtimes"] = sorted(files)
if "vllm_rocm_fixes.guards.hip" in sys.modules:
    answer["state"] = sys.modules["vllm_rocm_fixes.guards.hip"].state()
print(json.dumps(answer))
