"""What is done to the process, and not to vLLM."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass


@dataclass(frozen=True)
class Guard:
    """A context in which a package's __init__ is executed.

    around is entered just before and left just after, whatever happens; an ImportError from entering it forbids the
    import. state says in words what the guard did and found in this process.
    """

    name: str
    packages: tuple[str, ...]
    around: Callable[[str], AbstractContextManager[None]]
    summary: str
    origin: tuple[str, ...]
    state: Callable[[], str]


GUARDS: tuple[Guard, ...] = ()
