"""What every patch finds in a vLLM on disk, and the mended tree of every module: read, and nothing changed or run."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import store
from .installed import belongs, missing, path_of, version
from .patch import Mended, Outcome, Passing, Patch, Site, Verdict

Way = Callable[[bytes, str, Sequence[Patch], Site], Mended]


class Surveyed(NamedTuple):
    """One module and what became of its patches; path and source are None where the module has no source file."""

    module: str
    path: Path | None
    source: bytes | None
    mended: Mended


def modules(
    root: Path,
    series: Sequence[Patch],
    release: str | None = None,
    skipped: frozenset[str] = frozenset(),
    *,
    read: Callable[[Path], bytes] = Path.read_bytes,
    how: Way | None = None,
) -> Iterator[Surveyed]:
    """Every module of the series below root, the folder that holds vllm/, in the order of the series.

    release is what the files say of themselves, read where it isn't given. A patch named in skipped is left out; the
    others are told what is skipped. read gives the source of a file, how the mended module (mend() by default).
    """
    if how is None:
        from .mend import mend  # a warm start has no use for it

        how = mend
    site = Site(root, release or version(root), skipped)
    for module, patches in by_module(p for p in series if p.name not in skipped).items():
        path, source = path_of(root, module), None
        if path is None:
            mended = Mended(tuple(Outcome(patch, missing(patch, root, site.version)) for patch in patches))
        else:
            try:
                source = read(path)
                mended = how(source, str(path), patches, site)
            except OSError as error:
                verdict = Passing("unknown", f"{path} can't be read: {error.strerror}")
                mended = Mended(tuple(Outcome(patch, verdict) for patch in patches))
        yield Surveyed(module, path, source, mended)


def survey(
    root: Path, series: Sequence[Patch], release: str | None = None, skipped: frozenset[str] = frozenset()
) -> list[Outcome]:
    """The outcome of every patch on the vLLM below root, in the order of the series; the same arguments as modules."""
    order = {patch.name: number for number, patch in enumerate(series)}
    found = modules(root, series, release, skipped, how=store.mended)
    outcomes = [o for surveyed in found for o in surveyed.mended.outcomes]
    return sorted(outcomes, key=lambda outcome: order[outcome.patch.name])


def remembered(series: Sequence[Patch], site: Site) -> list[Outcome]:
    """As survey, but a file that is as it was at the last start, by size and time, isn't read again.

    That decides what is said. What is done is decided by the source, when the module is imported.
    """
    root = site.root or Path()
    try:  # a refusal may look at more than size and time
        key = None if site.skipped else store.digest("survey", str(root), site.version)
    except OSError:  # the overlay lies in an archive
        key = None
    if key is None:
        return survey(root, series, site.version, site.skipped)
    known: dict[str, Any] = store.recall(key) or {}
    files = {module: _stamp(root, module) for module in by_module(series)}
    unchanged = {module for module, file in files.items() if file and module in known and known[module][0] == file}
    named = {patch.name: patch for patch in series}
    outcomes = [Outcome(named[n], Verdict(*verdict)) for m in unchanged for n, *verdict in known[m][1]]
    fresh = {}
    changed = [patch for patch in series if patch.module not in unchanged]
    for found in modules(root, changed, site.version, read=Path.read_bytes, how=store.mended):
        outcomes += found.mended.outcomes
        if files[found.module] and all(o.lasts for o in found.mended.outcomes):
            fresh[found.module] = files[found.module], [(o.patch.name, *o.verdict) for o in found.mended.outcomes]
    if fresh:
        store.keep(key, known | fresh)
    return outcomes


def by_module(patches: Iterable[Patch]) -> dict[str, list[Patch]]:
    """The patches of each module, in the order given."""
    modules: dict[str, list[Patch]] = {}
    for patch in patches:
        modules.setdefault(patch.module, []).append(patch)
    return modules


def _stamp(root: Path, module: str) -> tuple[str, int, int] | None:
    """What tells whether a module's source file is still the same, as Python's own .pyc does; None where it has none.

    In whole seconds: the layers of an image keep no more.
    """
    stem = os.path.join(root, *module.split("."))
    package = os.path.join(stem, "__init__.py")
    path = package if os.access(package, os.F_OK) else f"{stem}.py"
    try:
        status = os.stat(path)
    except OSError:
        return None
    return (path, status.st_size, int(status.st_mtime)) if belongs(module, root) else None
