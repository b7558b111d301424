"""What a start knows from the last one: the names of the series, and what its patches found.

Where everything is mended already, and the code lies in the store, a start reads neither a patch's file nor, of the
modules that aren't loaded, a stock one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import store
from .patch import Outcome, Patch, Site, Verdict, by_module


def load() -> tuple[Patch, ...]:
    """The patches, in order; those of a warm start import their files when they are first asked."""
    try:
        key = store.digest("series")
    except OSError:  # the overlay lies in an archive
        return real()
    rows = store.recall(key)
    if rows is None:
        series = real()
        store.keep(key, [(patch[:6], bool(patch.refuse)) for patch in series])  # what comes before examine
        return series
    return tuple(_late(told, refuses) for told, refuses in rows)


def real() -> tuple[Patch, ...]:
    """The patches, in order, with their files imported."""
    from .patches import SERIES  # type: ignore[import-not-found]  # a folder of that name only once it is installed

    series: tuple[Patch, ...] = SERIES
    return series


def _late(told: tuple[str, str, str, tuple[str, ...], str, str | None], refuses: bool) -> Patch:
    def asking(field: str) -> Callable[[Any], Any]:
        """A function of the patch; the call raises LookupError where an upgrade in place has taken the patch away."""

        def ask(argument: Any) -> Any:
            for patch in real():
                if patch[:2] == told[:2]:
                    function = getattr(patch, field)
                    return function(argument) if function else None
            raise LookupError("the overlay was replaced since this process began, by one without that patch")

        return ask

    return Patch(*told, asking("examine"), asking("mend"), asking("refuse") if refuses else None)


def remembered(patches: Sequence[Patch], site: Site) -> list[Outcome]:
    """What survey() finds, but a file that is as it was at the last start, by size and time, isn't read again.

    That decides what is said. What is done is decided by the source, when the module is imported.
    """
    root = site.root or Path()
    key = None
    if not site.skipped:  # a refusal may look at more than size and time
        beside = [os.path.exists(os.path.join(root, name)) for name in ("setup.py", "tests")]
        with contextlib.suppress(OSError):  # the overlay lies in an archive
            key = store.digest("survey", str(root), site.version, beside)
    known: dict[str, Any] = (store.recall(key) if key else None) or {}
    files = {module: _stamp(root, module) for module in by_module(patches)} if key else {}
    same = {
        module
        for module, own in by_module(patches).items()
        if module in known and known[module][0] == files[module]
        if [name for name, *_ in known[module][1]] == [patch.name for patch in own]
    }
    named = {patch.name: patch for patch in patches}
    outcomes = [Outcome(named[n], Verdict(*verdict)) for module in same for n, *verdict in known[module][1]]
    changed = [patch for patch in patches if patch.module not in same]
    if not changed:
        return outcomes
    from .survey import modules  # a warm start has no use for it

    fresh = {}
    for found in modules(root, changed, site.version, site.skipped, how=store.mended):
        outcomes += found.mended.outcomes
        if all(o.lasts for o in found.mended.outcomes):
            fresh[found.module] = files.get(found.module), [(o.patch.name, *o.verdict) for o in found.mended.outcomes]
    if key and fresh:
        store.keep(key, known | fresh)
    return outcomes


def _stamp(root: Path, module: str) -> tuple[str, int, int] | None:
    """What tells whether a module's source file is still the same, as Python's own .pyc does; None where it has none.

    In whole seconds: the layers of an image keep no more.
    """
    stem = os.path.join(root, *module.split("."))
    for path in (os.path.join(stem, "__init__.py"), f"{stem}.py"):
        with contextlib.suppress(OSError):
            status = os.stat(path)
            return path, status.st_size, int(status.st_mtime)
    return None
