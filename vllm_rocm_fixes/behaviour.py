"""python -m vllm_rocm_fixes.behaviour FILE: in this process, is what the overlay claims so? Written to FILE as JSON.

`vllm-rocm-fixes verify` runs it as a child. vLLM's plugins are loaded as vLLM does it, the module of every patch is
imported, and then nothing is taken on trust: the functions that live in this process are compared with what stock and
what the mended tree compile to. A patch whose file has a function `behaves()` is asked too; it returns what is wrong in
words, or None.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from .importing import Loader, source_of
from .live import functions, same
from .mend import Mended, mend
from .process import Process

CLAIMS = ("applied", "waiting")


def main(file: str) -> None:
    """Look at every patch of the series, and write what was found."""
    from . import current

    importlib.import_module("vllm.plugins").load_general_plugins()
    process = current()
    if not process.results:
        process.register()  # no door was open: then this says what the overlay would have done, and verify that
    found = {}
    for name, before in list(process.results.items()):
        module = before.patch.module
        claimed = before.state in CLAIMS and module.startswith("vllm.")  # tests.utils is for pytest to import
        wrong = _import(module) if claimed else None
        note = "stock can't import its module here either" if wrong and _stock_fails(module) else None
        result = process.results[name]
        if claimed and not wrong:
            wrong = holds(process, sys.modules[module])
        if wrong is None and result.state == "applied" and module in sys.modules:
            wrong = _behaves(result.patch.examine.__module__)
        wrong = None if note else wrong
        found[name] = {"module": module, "state": result.state, "reason": result.reason, "wrong": wrong, "note": note}
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
    if source is None:
        return "its source isn't there"
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
    changed = list(_changed(stock, mended.code))
    for name, was, becomes in changed:
        codes = alive.get(name, [])
        if was is not None and any(same(code, was) for code in codes):
            return f"{name} runs stock's code"
        if codes and not any(same(code, becomes) for code in codes):
            return f"{name} runs neither stock's code nor the mended one"
    if not changed and not ours:
        return "what differs stands at module scope, and that had run before"
    return None


def _changed(stock: CodeType, mended: CodeType) -> Iterator[tuple[str, CodeType | None, CodeType]]:
    before = dict(functions(stock))
    for name, code in functions(mended):
        if name not in before or not same(before[name], code):
            yield name, before.get(name), code


def _import(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except BaseException as error:  # AITER ends processes with SystemExit
        traceback.print_exc()
        return f"its module can't be imported: {type(error).__name__}: {error}"
    return None


def _stock_fails(module: str) -> bool:
    """Whether the module can't be imported without the overlay; ROCm's platform can't beside a CPU torch."""
    code = "import importlib, sys; importlib.import_module('vllm.plugins').load_general_plugins(); "
    code += "importlib.import_module(sys.argv[1])"
    environ = {**os.environ, "ROCM_FIXES": "off"}
    done = subprocess.run([sys.executable, "-c", code, module], env=environ, capture_output=True, check=False)
    return done.returncode != 0


def _behaves(file: str) -> str | None:
    check = getattr(sys.modules[file], "behaves", None)
    if check is None:
        return None
    try:
        said: str | None = check()
    except BaseException as error:
        traceback.print_exc()
        return f"its behaviour check broke: {type(error).__name__}: {error}"
    return said


if __name__ == "__main__":
    main(sys.argv[1])
