"""The series in a process: its names at once, the file of a patch when the patch has to look at a tree.

Where everything is mended already, and the code lies in the store, a start reads none of the patches' files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import store
from .patch import Patch


def load() -> tuple[Patch, ...]:
    """The patches, in order; those of a warm start import their files when they are first asked."""
    try:
        key = store.digest("series")
    except OSError:  # the overlay lies in an archive
        return _real()
    rows = store.recall(key)
    if rows is None:
        series = _real()
        told = [(p.name, p.module, p.summary, p.origin, p.since, p.until) for p in series]
        store.keep(key, [(row, bool(patch.refuse)) for row, patch in zip(told, series, strict=True)])
        return series
    return tuple(_late(told, refuses) for told, refuses in rows)


def _real() -> tuple[Patch, ...]:
    from .patches import SERIES  # type: ignore[import-not-found]  # a folder of that name only once it is installed

    series: tuple[Patch, ...] = SERIES
    return series


def _late(told: tuple[str, str, str, tuple[str, ...], str, str | None], refuses: bool) -> Patch:
    def asking(field: str) -> Callable[[Any], Any]:
        """A function of the patch; the call raises LookupError where an upgrade in place has taken the patch away."""

        def ask(argument: Any) -> Any:
            for patch in _real():
                if patch[:2] == told[:2]:
                    function = getattr(patch, field)
                    return function(argument) if function else None
            raise LookupError("the overlay was replaced since this process began, by one without that patch")

        return ask

    return Patch(*told, asking("examine"), asking("mend"), asking("refuse") if refuses else None)
