"""What the checks of patches ask with: `behaves()` in a patch file, called in a child of `vllm-rocm-fixes verify`.

A check is asked after the patch's module was imported. It does what a user does with that module, and returns what is
wrong in one line, or None. Where this machine can't give an answer it raises CannotAsk. It must be able to fail on
stock, leave nothing behind outside of its process, and never ask a real GPU or load a real AITER or TileLang.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from .start import HAZARDS

_imports: list[tuple[str, str]] = []  # who imported what: modules of vLLM, and hazards with their full names
# What of torch.cuda initialises HIP, as far as vLLM asks it for a property of the GPU.
_PROPERTIES = ("get_device_properties", "get_device_capability", "get_device_name", "mem_get_info", "_lazy_init")


class CannotAsk(Exception):
    """A check has no answer on this machine; the message says why."""


class _Watch:
    """A finder that finds nothing, and writes down which module of vLLM imports a hazard."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if name.partition(".")[0] not in HAZARDS:
            return
        frame: Any = sys._getframe(1)
        imported = False  # and not only looked for, by importlib.util.find_spec
        while frame is not None:
            imported = imported or frame.f_code.co_name == "_find_and_load_unlocked"
            asker = str(frame.f_globals.get("__name__"))
            if asker == "importlib.util" and not imported:
                return
            if asker.partition(".")[0] == "vllm" and imported:
                _imports.append((asker, name))
                return
            frame = frame.f_back


def watch() -> None:
    """From now on, write down who imports a hazard."""
    sys.meta_path.insert(0, _Watch())


def imported(module: str, package: str) -> list[str]:
    """What of a package a module of vLLM has imported itself. Raises CannotAsk where that can't be seen."""
    of_package = [(asker, name) for asker, name in _imports if name.partition(".")[0] == package]
    found = [name for asker, name in of_package if asker == module]
    if not found and package in sys.modules:
        by = next((asker for asker, _ in of_package), "another")
        raise CannotAsk(f"{package} was there already, imported by {by}")
    if not found and importlib.util.find_spec(package) is None:
        raise CannotAsk(f"{package} isn't installed here")
    return found


class _Broken:
    """Finds one package, installed and broken: its library doesn't load."""

    def __init__(self, package: str, asked: list[str]) -> None:
        self._package, self._asked = package, asked

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        mine = name.partition(".")[0] == self._package
        return ModuleSpec(name, self, is_package=True) if mine else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """The usual one."""

    def exec_module(self, module: ModuleType) -> None:
        self._asked.append(module.__name__)
        raise OSError(f"lib{self._package}.so: cannot open shared object file")


@contextlib.contextmanager
def broken(*packages: str) -> Iterator[list[str]]:
    """These packages are installed and don't load, while a block runs; gives the list of those that were imported."""
    asked: list[str] = []
    finders: list[Any] = [_Broken(package, asked) for package in packages]
    real = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in packages}
    for name in real:
        del sys.modules[name]
    sys.meta_path[:0] = finders
    try:
        yield asked
    finally:
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder not in finders]
        for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
            del sys.modules[name]
        sys.modules.update(real)


def import_again(name: str) -> ModuleType:
    """A second copy of a module, imported as the first was; the first stays in its place. Raises what that raises."""
    first, parent = sys.modules.pop(name), sys.modules[name.rpartition(".")[0]]
    try:
        return importlib.import_module(name)
    finally:
        sys.modules[name] = first
        setattr(parent, name.rpartition(".")[2], first)


@contextlib.contextmanager
def without_gpu() -> Iterator[list[str]]:
    """torch answers no question about the GPU while a block runs; gives the list of those that were asked."""
    cuda: Any = importlib.import_module("torch").cuda
    asked: list[str] = []

    def refusing(name: str) -> Any:
        def ask(*_: Any, **__: Any) -> Any:
            asked.append(f"torch.cuda.{name}")
            raise RuntimeError("the GPU isn't asked here")

        return ask

    real = {name: getattr(cuda, name) for name in _PROPERTIES}
    for name in real:
        setattr(cuda, name, refusing(name))
    try:
        yield asked
    finally:
        for name, function in real.items():
            setattr(cuda, name, function)
