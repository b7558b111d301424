"""What would change, as a patch: a unified diff for each patch of the series, under a header in the form of DEP-3.

`git apply` and `patch -p1` take it, from the folder that holds vllm/. The diffs stand in the order of the series, each
on top of those before it.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from . import __version__
from .mend import mend
from .patch import Outcome, Patch, Site
from .rewrite import rewrite, same
from .survey import Surveyed, modules

_PACKAGE = __package__ or "vllm_rocm_fixes"
_PROJECTS = {
    "vllm": "vllm-project/vllm",
    "aiter": "ROCm/aiter",
    "tilelang": "tile-ai/tilelang",
    "mori": "ROCm/mori",
    "rocm-systems": "ROCm/rocm-systems",
}
# In the series these two modules hold nothing else: there are no doors without the overlay.
_BARE = {
    _PACKAGE: f'"""What the mended vLLM calls; from vllm-rocm-fixes {__version__}."""\n',
    f"{_PACKAGE}.patches": '"""For each patch, what the mended code calls."""\n',
}


@dataclass(frozen=True)
class Difference:
    """One file before and after one patch; path is relative to the folder that holds vllm/."""

    patch: Patch
    path: PurePosixPath
    before: bytes
    after: bytes


def differences(
    root: Path, series: Sequence[Patch], release: str | None, skipped: frozenset[str] = frozenset()
) -> tuple[list[Difference], list[Outcome]]:
    """What each patch that is needed changes, and what became of every one, both in the order of the series.

    Raises ValueError where a mended tree can't be written as text.
    """
    order = {patch.name: number for number, patch in enumerate(series)}
    found: list[Difference] = []
    outcomes: list[Outcome] = []
    for surveyed in modules(root, series, release, skipped):
        outcomes += surveyed.mended.outcomes
        found += _steps(surveyed, Site(root, release, skipped), root)
    found.sort(key=lambda difference: order[difference.patch.name])
    return found, sorted(outcomes, key=lambda outcome: order[outcome.patch.name])


def _steps(surveyed: Surveyed, site: Site, root: Path) -> list[Difference]:
    """A module's patches one after the other; together they must give the tree that they give at once."""
    if surveyed.path is None or surveyed.source is None or surveyed.mended.tree is None:
        return []
    path = PurePosixPath(surveyed.path.relative_to(root).as_posix())
    applied = [outcome.patch for outcome in surveyed.mended.outcomes if outcome.applied]
    found, text = [], surveyed.source
    for patch in applied:
        tree = surveyed.mended.tree if len(applied) == 1 else mend(text, str(surveyed.path), [patch], site).tree
        if tree is not None:
            after = rewrite(text, tree)
            found.append(Difference(patch, path, text, after))
            text = after
    if len(applied) > 1 and not same(ast.parse(text), surveyed.mended.tree):
        raise ValueError(f"{surveyed.module}: the patches give another tree one by one than they give together")
    return found


def unified(path: PurePosixPath, before: bytes | None, after: bytes) -> bytes:
    """The unified diff of one file; before is None for a file that is new."""
    old, new = (re.findall(rb"[^\n]*\n|[^\n]+", content) for content in (before or b"", after))
    names = b"/dev/null" if before is None else f"a/{path}".encode(), f"b/{path}".encode()
    lines = difflib.diff_bytes(difflib.unified_diff, old, new, *names, lineterm=b"\n")
    return b"".join(line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n" for line in lines)


def header(patch: Patch) -> bytes:
    """The patch's record in the form of DEP-3, which ends with an empty line."""
    record = (patch.file.__doc__ or "").strip().partition("\n")[2].strip("\n")
    return _header(patch.summary, record, patch.origin, patch.until or "no")


def series(found: Sequence[Difference]) -> dict[str, bytes]:
    """The files of a quilt series: `series`, and numbered patches that need no overlay beside them.

    The first adds the package vllm_rocm_fixes with what the mended code calls; vLLM's pyproject.toml packages every
    `vllm*` folder (0.14.0 to 0.33.0).
    """
    parts = [("runtime", _runtime_patch(found))]
    for patch in dict.fromkeys(difference.patch for difference in found):
        own = b"".join(unified(d.path, d.before, d.after) for d in found if d.patch is patch)
        parts.append((patch.name, header(patch) + own))
    files = {f"{number:04}-{name}.patch": content for number, (name, content) in enumerate(parts, 1)}
    return {"series": "".join(f"{name}\n" for name in files).encode(), **files}


def text(found: Iterable[Difference]) -> bytes:
    """One text for all differences."""
    return b"\n".join(header(d.patch) + unified(d.path, d.before, d.after) for d in found)


def address(origin: str) -> str:
    """Where an origin such as "vLLM #44823" is read; the text itself where the project isn't known."""
    match = re.fullmatch(r"([\w-]+) #(\d+)", origin)
    project = match and _PROJECTS.get(match[1].lower())
    return f"https://github.com/{project}/issues/{match[2]}" if match and project else origin


def runtime(found: Iterable[Difference]) -> dict[PurePosixPath, bytes]:
    """The modules that the mended code needs of this package, with all that they import of it themselves."""
    waiting = {name for difference in found for name in _imported(difference.after, "")}
    files: dict[PurePosixPath, bytes] = {}
    known: set[str] = set()
    while waiting:
        name = waiting.pop()
        known.add(name)
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            spec = None
        if spec is None or spec.origin is None:
            continue  # a name that a module holds, and no module
        path = PurePosixPath(*name.split("."))
        is_package = spec.submodule_search_locations is not None
        source = _BARE[name].encode() if name in _BARE else Path(spec.origin).read_bytes()
        files[path / "__init__.py" if is_package else path.with_suffix(".py")] = source
        waiting |= _imported(source, name if is_package else name.rpartition(".")[0]) - known
    return dict(sorted(files.items()))


def _runtime_patch(found: Sequence[Difference]) -> bytes:
    record = "Taken from vllm-rocm-fixes, under the Apache License 2.0. Not for a vLLM beside which that is installed."
    files = runtime(found)
    added = b"".join(unified(path, None, content) for path, content in files.items())
    return _header("what the patches of this series call", record, (), "no") + added


def _header(summary: str, record: str, origins: Sequence[str], applied: str) -> bytes:
    lines = [f"Description: {summary}", *(f" {line}".rstrip() or " ." for line in record.splitlines())]
    lines += [f"Origin: vendor, vllm-rocm-fixes {__version__}", *(f"Bug: {address(origin)}" for origin in origins)]
    return "\n".join([*lines, f"Applied-Upstream: {applied}", "", ""]).encode()


def _imported(source: bytes, package: str) -> set[str]:
    """The modules of this package that a source imports, in functions too, with the packages they lie in."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    ours = [name.split(".") for name in names if name.split(".")[0] == _PACKAGE]
    return {".".join(parts[:end]) for parts in ours for end in range(1, len(parts) + 1)}
