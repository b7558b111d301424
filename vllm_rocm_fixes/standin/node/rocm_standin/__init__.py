"""What the stand-in packages share: the event log, and names that stand for anything.

A stand-in module begins with `arrive(__name__)`. That writes one line to the event log, with the chain of frames that
led to it, and lets the module answer for every name it doesn't define, so that the start goes on.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import json
import os
import sys
import time
from typing import Any

LOG = "ROCM_STANDIN_LOG"
OPTIONS = "ROCM_STANDIN_"
_HERE = os.path.dirname(os.path.abspath(__file__))


def option(name: str) -> str:
    """The value of one option of the node, such as AITER_FAILS; an empty string where it isn't set."""
    return os.environ.get(OPTIONS + name, "")


def chain(skip: int = 1) -> list[str]:
    """The frames that led here, outermost first, as `file:line function`; the import system's and ours are left out."""
    frame: Any = sys._getframe(skip)
    found: list[str] = []
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(("<frozen importlib", _HERE)) and "/importlib/" not in file:
            found.append(f"{file}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return found[::-1]


def write(kind: str, name: str, detail: str = "") -> None:
    """Append one event to the log: a single write, so that lines of several processes don't mix.

    The option STEP labels it: what is going on, for those who run several things in one log.
    """
    path = os.environ.get(LOG)
    if not path:
        return
    event = {
        "kind": kind,
        "name": name,
        "detail": detail,
        "step": option("STEP"),
        "pid": os.getpid(),
        "ppid": os.getppid(),
        "time": time.time(),
        "argv": sys.argv[:3] if hasattr(sys, "argv") else [],
        "chain": chain(2),
    }
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, (json.dumps(event) + "\n").encode())
    finally:
        os.close(descriptor)


class Anything:
    """Stands for a class, a function, a type or a value of a package that isn't here."""

    def __init__(self, name: str = "Anything") -> None:
        self.__name__ = self.__qualname__ = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Itself: a decorator, a class or a function, all the same."""
        return self

    def __getitem__(self, item: Any) -> Any:
        return self

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (object,)

    def __repr__(self) -> str:
        return f"<stand-in {self.__name__}>"


def arrive(name: str) -> None:
    """To be called first in a stand-in module: record that it runs, and answer for the names it won't define."""
    module = sys.modules[name]
    write("import", name)

    def answer(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        where = getattr(module, "__path__", None)
        if where and importlib.machinery.PathFinder.find_spec(f"{name}.{attribute}", where) is not None:
            return importlib.import_module(f"{name}.{attribute}")
        return Anything(f"{name}.{attribute}")

    module.__getattr__ = answer  # type: ignore[method-assign]


def fail(how: str, name: str) -> None:
    """Raise what a broken package raises, by the name of the exception; nothing for an empty name."""
    if not how:
        return
    if how == "CalledProcessError":
        import subprocess

        raise subprocess.CalledProcessError(1, ["hipcc", name])
    if how == "SystemExit":
        raise SystemExit(f"[aiter] build {name} failed")
    import builtins

    raise getattr(builtins, how)(f"stand-in failure of {name}")
