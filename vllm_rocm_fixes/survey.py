"""What every patch finds in a vLLM on disk, and the mended tree of every module: read, and nothing changed or run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import store
from .installed import missing, path_of, version
from .mend import mend
from .patch import Mended, Outcome, Patch, Site, unknown


@dataclass(frozen=True)
class Surveyed:
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
    how: Callable[[bytes, str, Sequence[Patch], Site], Mended] = mend,
) -> Iterator[Surveyed]:
    """Every module of the series below root, the folder that holds vllm/, in the order of the series.

    release is what the files say of themselves, read where it isn't given. A patch named in skipped is left out; the
    others are told what is skipped. read gives the source of a file, how the mended module.
    """
    site = Site(root, release or version(root), skipped)
    by_module: dict[str, list[Patch]] = {}
    for patch in series:
        if patch.name not in skipped:
            by_module.setdefault(patch.module, []).append(patch)
    for module, patches in by_module.items():
        yield _survey(module, patches, site, read, how)


def survey(
    root: Path, series: Sequence[Patch], release: str | None = None, skipped: frozenset[str] = frozenset()
) -> list[Outcome]:
    """The outcome of every patch on the vLLM below root, in the order of the series; the same arguments as modules."""
    order = {patch.name: number for number, patch in enumerate(series)}
    found = modules(root, series, release, skipped, how=store.mended)
    outcomes = [o for surveyed in found for o in surveyed.mended.outcomes]
    return sorted(outcomes, key=lambda outcome: order[outcome.patch.name])


def _survey(
    module: str,
    patches: Sequence[Patch],
    site: Site,
    read: Callable[[Path], bytes],
    how: Callable[[bytes, str, Sequence[Patch], Site], Mended],
) -> Surveyed:
    root = site.root or Path()
    path = path_of(root, module)
    if path is None:
        return Surveyed(module, None, None, Mended(tuple(Outcome(p, missing(p, root, site.version)) for p in patches)))
    try:
        source = read(path)
    except OSError as error:
        verdict = unknown(f"{path} can't be read: {error.strerror}")
        return Surveyed(module, path, None, Mended(tuple(Outcome(patch, verdict) for patch in patches)))
    return Surveyed(module, path, source, how(source, str(path), patches, site))
