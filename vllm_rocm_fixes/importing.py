"""The meta path finder and the loader: a module that isn't loaded yet is compiled from its mended tree.

The stock finders find the module and the stock loader stays behind ours: file name, source, resources and data are
its own. Only the code differs, and that is compiled in memory: the stock .pyc is neither read nor written for it.
A tool whose finder asks all the others, to call hooks after an import say, gets our loader into its own. One thing more
differs: a warning of module scope that names its importer (stacklevel=2) names this file.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

Coder = Callable[[str, Any, str | None], CodeType | None]
Around = Callable[[str], AbstractContextManager[None]]


class Finder:
    """Answers for the modules that are mended or guarded; any other name costs two look-ups in dictionaries.

    coders: for each module to be mended, what gives its code (called with the name, the stock loader and the spec's
    origin; None keeps stock). guards: for each guarded package, the contexts in which it is executed; one that raises
    an ImportError of its name forbids the import, any other error of its own is passed to on_error. executed is
    called with the name of a module whose mended code has run to its end. reminder, where it is set, is called before
    each import, whatever its name; it raises nothing.
    """

    def __init__(
        self,
        coders: Mapping[str, Coder],
        guards: Mapping[str, Sequence[Around]],
        on_error: Callable[[str, Exception], None],
        executed: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.coders, self.guards, self.on_error, self.executed = coders, guards, on_error, executed
        self._busy = threading.local()
        self.reminder: Callable[[], None] | None = None

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The stock spec with our loader before the stock one; None leaves the name to the finders behind us."""
        if self.reminder is not None:
            self.reminder()
        if name not in self.coders and name not in self.guards:
            return None
        spec = self._stock_spec(name, path, target)
        if spec is not None and hasattr(spec.loader, "exec_module") and not _holds_ours(spec.loader):
            spec.loader = Loader(spec, self)  # type: ignore[assignment]
        return spec

    def _stock_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> importlib.machinery.ModuleSpec | None:
        """The first answer of the other finders. One that asks all others comes to us again, and isn't asked twice."""
        asked: list[tuple[str, Any]] = self._busy.__dict__.setdefault("asked", [])
        for finder in list(sys.meta_path):
            ours = isinstance(finder, Finder) or any(a == name and f is finder for a, f in asked)
            if ours or not hasattr(finder, "find_spec"):
                continue
            asked.append((name, finder))
            try:
                spec = finder.find_spec(name, path, target)
            finally:
                asked.pop()
            if spec is not None:
                return spec
        return None


class Loader:
    """Stands before the stock loader of one module; whatever it doesn't do itself, the stock loader does.

    isinstance() takes it for the stock loader, and a copy or a pickle is one of that.
    """

    def __init__(self, spec: importlib.machinery.ModuleSpec, finder: Finder) -> None:
        self.stock: Any = spec.loader
        self._origin, self._finder = spec.origin, finder

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.stock)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stock, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.stock.__reduce_ex__(protocol)

    def get_code(self, name: str) -> CodeType | None:
        """The mended code, or the stock loader's where stock is kept."""
        code: CodeType | None = self._code(name) or self.stock.get_code(name)
        return code

    def exec_module(self, module: ModuleType) -> None:
        """Execute the mended code inside the guards; where stock is kept, let the stock loader do it."""
        name = module.__name__
        code = self._code(name)
        with ExitStack() as guards:
            for guard in self._finder.guards.get(name, ()):
                self._enter(guard, name, guards)
            if code is None:
                self.stock.exec_module(module)
            else:
                binder = module.__dict__.get("_rocm_fixes_late")
                for late in binder.__defaults__[0] if binder else ():  # a reload binds anew what stock imports here
                    module.__dict__.pop(late, None)
                exec(code, module.__dict__)
                self._finder.executed(name)

    def _enter(self, guard: Around, name: str, guards: ExitStack) -> None:
        """Enter a guard, whose own errors reach on_error and not the importer; see Finder for what forbids."""
        try:
            context = guard(name)
            context.__enter__()
        except Exception as error:
            if isinstance(error, ImportError) and error.name == name:  # another one says that the guard's file is gone
                raise
            self._finder.on_error(name, error)
        else:
            guards.callback(self._leave, context, name)

    def _leave(self, context: AbstractContextManager[None], name: str) -> None:
        try:
            context.__exit__(None, None, None)
        except Exception as error:
            self._finder.on_error(name, error)

    def _code(self, name: str) -> CodeType | None:
        coder = self._finder.coders.get(name)
        return coder(name, self.stock, self._origin) if coder else None


def _holds_ours(loader: Any, depth: int = 8) -> bool:
    """Whether a loader is ours, or a tool's that holds ours or another tool's."""
    if type(loader) is Loader or not depth or not hasattr(loader, "exec_module"):
        return type(loader) is Loader
    held = getattr(loader, "__wrapped__", None), *getattr(loader, "__dict__", {}).values()
    return any(_holds_ours(value, depth - 1) for value in held)


def source_of(name: str, loader: Any, origin: str | None) -> tuple[bytes | str, str]:
    """A module's source, and the file name that goes into code objects.

    Bytes where there is a file, so that its encoding is the parser's business. Raises what reading raises, and
    ImportError where there is no source.
    """
    compiles = getattr(type(loader), "source_to_code", None)
    if compiles and not compiles.__module__.startswith(("importlib.", "_frozen_importlib")):
        raise ImportError(f"{type(loader).__name__}, somebody else's loader, changes the source by itself")
    if origin and origin.endswith(".py") and os.path.isfile(origin):
        return Path(origin).read_bytes(), origin
    source: str | None = loader.get_source(name) if hasattr(loader, "get_source") else None
    if source is None:
        raise ImportError("there is no source, only compiled code")
    return source, origin or f"<{name}>"
