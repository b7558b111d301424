"""What every patch finds in a vLLM on disk, and the mended tree of every module: read, and nothing changed or run."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from . import store
from .installed import missing, path_of, version
from .patch import Mended, Outcome, Passing, Patch, Site, by_module

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
    found = modules(root, series, release, skipped, how=store.mended)
    outcomes = {o.patch.name: o for surveyed in found for o in surveyed.mended.outcomes}
    return [outcomes[patch.name] for patch in series if patch.name in outcomes]
