"""python -m vllm_rocm_fixes.behaviour FILE [ENDS]: is what the overlay claims so, in this process? JSON goes into FILE.

`vllm-rocm-fixes verify` runs it as a child. vLLM's plugins are loaded as vLLM does it, the module of every patch is
imported, and then nothing is taken on trust: the functions that live in this process are compared with what stock and
what the mended tree compile to. Then the patch's own check is asked, `behaves()` in its file. It says in words what is
wrong, or None, and raises CannotAsk where this machine has no answer: see checks.py.

A check asks a part of what its patch promises: what can be asked here without a GPU, a model or a server. All of it is
tested against stock in tests/. Beyond that part, the comparison of the functions is all that is looked at.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from . import series
from .checks import CannotAsk, watch
from .importing import Loader, source_of
from .live import by_name, same
from .mend import mend
from .patch import Mended, Patch
from .process import Process
from .trial import NOT_FROM_HERE

CLAIMS = ("applied", "waiting")
# Imports each module in a fork of its own: what one that fails leaves behind isn't the other's fault.
_STOCK = """
import importlib, json, os, sys
importlib.import_module("vllm.plugins").load_general_plugins()
try:
    importlib.import_module("vllm.config")  # what they have in common, once
except BaseException:
    pass
failing = []
for module in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        try:
            importlib.import_module(module)
        except BaseException:
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        failing.append(module)
print(json.dumps(failing))
"""


def main(file: str, ends: Mapping[str, str]) -> None:
    """Look at every patch of the series, and write what was found.

    ends has the modules that ended such a process before, and how. Until the end, file names the one looked at.
    """
    from . import current

    watch()
    importlib.import_module("vllm.plugins").load_general_plugins()
    process = current()
    if not process.results:
        process.register()  # no door was open: then this says what the overlay would have done, and verify that
    found: dict[str, dict[str, str | None]] = {}
    broken: dict[str, list[str]] = {}
    # vLLM's own test helpers come last: they import much of vLLM, as pytest would.
    for name, before in sorted(process.results.items(), key=lambda item: not item[1].patch.module.startswith("vllm.")):
        module = before.patch.module
        claimed, note, asked = before.state in CLAIMS, None, None
        if claimed and not module.startswith("vllm.") and not _is_here(module, process.site.root):
            claimed, note = False, "it can be imported in vLLM's checkout only"
        wrong = failed = None
        if claimed:
            Path(file).write_text(module, encoding="utf-8")
            how = ends.get(module)
            wrong = failed = f"its module can't be used: it ends the process, {how}" if how else _import(module)
        result = process.results[name]
        if claimed and not failed:
            wrong = holds(process, sys.modules[module])
        if wrong is None and result.state == "applied" and module in sys.modules:
            asked, wrong = _asked(result.patch)
        if failed:
            broken.setdefault(module, []).append(name)
        found[name] = {"module": module, "state": result.state, "reason": result.reason}
        found[name] |= {"wrong": wrong, "note": note, "asked": asked}
    for module in _stock_fails(list(broken)):
        for name in broken[module]:
            why = str(found[name]["wrong"]).partition(": ")[2]
            found[name] |= {"note": f"stock can't import its module here either ({why})", "wrong": None}
    doors = [
        point for point, called in (("registered", process._registered), ("prepared", process._prepared)) if called
    ]
    guards = {g.name: g.state() for g in process.guards if g.name not in process.settings.skip}
    Path(file).write_text(json.dumps({"patches": found, "guards": guards, "doors": doors}), encoding="utf-8")


def holds(process: Process, module: ModuleType) -> str | None:
    """Whether a loaded module runs the mended code; what doesn't, in words, or None."""
    spec = module.__spec__
    loader: Any = spec.loader if spec else None
    ours = isinstance(loader, Loader)
    source, filename = source_of(module.__name__, loader.stock if ours else loader, spec.origin if spec else None)
    patches = [r.patch for r in process.results.values() if r.patch.module == module.__name__ and r.state == "applied"]
    if not patches:
        return "its module was imported, and the patch wasn't applied"
    mended: Mended = mend(source, filename, patches, process.site)
    if mended.code is None:
        return "it is claimed to be applied, and the source gives nothing to apply"
    stock = compile(source, filename, "exec", dont_inherit=True)
    alive: dict[str, list[CodeType]] = {}
    for item in gc.get_objects():
        if type(item) is FunctionType and item.__globals__ is vars(module):
            alive.setdefault(item.__qualname__, []).append(item.__code__)
    becomes, changed = by_name(mended.code), list(_changed(stock, mended.code))
    for name, was in changed:
        codes = alive.get(name, [])
        if was is not None and any(same(code, was) for code in codes):
            return f"{name} runs stock's code"
        if codes and not any(same(code, one) for code in codes for one in becomes[name]):
            return f"{name} runs neither stock's code nor the mended one"
    if not changed and not ours:
        return "what differs stands at module scope, and that had run before"
    return None


def _changed(stock: CodeType, mended: CodeType) -> Iterator[tuple[str, CodeType | None]]:
    """The names of functions that the mended tree has anew or different, with stock's code."""
    before = by_name(stock)
    for name, codes in by_name(mended).items():
        gone = [was for was in before.get(name, ()) if not any(same(was, code) for code in codes)]
        if gone or name not in before:
            yield name, gone[0] if gone else None


def _import(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except BaseException as error:  # AITER ends processes with SystemExit
        traceback.print_exc()
        return f"its module can't be imported: {type(error).__name__}: {' '.join(str(error).split())}"
    return None


def _stock_fails(modules: list[str]) -> list[str]:
    """Those that can't be imported without the overlay; ROCm's platform can't beside a CPU torch."""
    if not modules:
        return []
    command = [sys.executable, "-c", NOT_FROM_HERE + _STOCK, *modules]
    environ = {**os.environ, "ROCM_FIXES": "off"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    failing: list[str] = json.loads(done.stdout.strip().rpartition("\n")[2]) if done.returncode == 0 else modules
    return failing


def _is_here(module: str, root: Path | None) -> bool:
    """Whether a module that isn't part of the package vllm is that of the vLLM which is looked at."""
    try:
        spec = importlib.util.find_spec(module)
    except Exception:
        return False
    return bool(spec and spec.origin and root and Path(spec.origin).is_relative_to(root))


def _asked(patch: Patch) -> tuple[str | None, str | None]:
    """Whether the patch's own check could be asked ("yes", or why not; None: it has none), and what is wrong."""
    patch = next((real for real in series.real() if real.name == patch.name), patch)  # a warm start's isn't the file's
    check: Any = getattr(patch.file, "behaves", None)
    if check is None:
        return None, None
    try:
        # One file may hold several patches: its check is told which.
        return "yes", check(patch) if inspect.signature(check).parameters else check()
    except CannotAsk as reason:
        return str(reason), None
    except BaseException as error:
        traceback.print_exc()
        return None, f"its behaviour check broke: {type(error).__name__}: {error}"


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]) if sys.argv[2:] else {})
