"""The vLLM of an environment or a folder, found and read without running any of it."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from typing import NamedTuple

from .patch import Patch, Verdict, absent, unknown

_VERSION = r"v?(\d+(?:\.\d+)*)[.-]?(?:(a|b|rc)\.?(\d+))?(?:\.?post(\d+))?(?:\.?dev(\d+))?"


class Metadata(NamedTuple):
    """One installed distribution that holds vllm/, by its own metadata."""

    name: str
    version: str
    folder: Path


class Installation(NamedTuple):
    """A vLLM on disk: the folder that holds vllm/, what vllm/_version.py says, and what metadata says."""

    root: Path
    version: str | None
    metadata: tuple[Metadata, ...] = ()

    @property
    def doubt(self) -> str | None:
        """Why the version can't be believed, in words; None where the files and all metadata agree."""
        if self.version is None:
            return "vllm/_version.py names no version"
        others = sorted({m.version for m in self.metadata if _public(m.version) != _public(self.version)})
        if others:
            return f"the files say {self.version}, the metadata says {', '.join(others)}"
        return None


def find(folder: Path | None = None) -> Installation:
    """The vLLM in a folder, or the one this process would import, which isn't executed.

    Raises LookupError, in words for a user, where there is none or it has no files.
    """
    root = _installed_root() if folder is None else folder.absolute()
    if not (root / "vllm" / "__init__.py").is_file():
        hint = " (it is vllm/ itself: name the folder above)" if (root / "_version.py").is_file() else ""
        raise LookupError(f"no vllm/__init__.py in {root}{hint}: --vllm takes the folder that holds vllm/")
    metadata = _metadata(root)
    if folder is None and not metadata:
        metadata = _metadata_elsewhere()
    return Installation(root, version(root), metadata)


def version(root: Path) -> str | None:
    """What vllm/_version.py below root says, read and not run; None where it says nothing."""
    try:
        tree = ast.parse((root / "vllm" / "_version.py").read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant):
            names = {target.id for target in statement.targets if isinstance(target, ast.Name)}
            if names & {"__version__", "version"} and isinstance(statement.value.value, str):
                return statement.value.value
    return None


def belongs(module: str, root: Path) -> bool:
    """Whether a module below root can be this vLLM's: in site-packages a `tests` folder is somebody else's."""
    return module.partition(".")[0] == "vllm" or _is_checkout(root)


def path_of(root: Path, module: str) -> Path | None:
    """The source file of a module below root, such as vllm.config.vllm or tests.utils; None where it has none."""
    if not belongs(module, root):
        return None
    stem = root.joinpath(*module.split("."))
    for path in (stem / "__init__.py", stem.with_name(f"{stem.name}.py")):
        if path.is_file():
            return path
    return None


def missing(patch: Patch, root: Path, release: str | None) -> Verdict:
    """The verdict on a module without a source file below root: absent where that is as it should be, else unknown."""
    top = patch.module.partition(".")[0]
    if not belongs(patch.module, root) or (top != "vllm" and not (root / top).is_dir()):
        return absent(f"this vLLM comes without its {top}/")
    place = f"{patch.module} isn't in {root}"
    if release is None:
        return unknown(f"{place}, and vLLM's release isn't known")
    if older(release, patch.since):
        return absent(f"{patch.module} came later than {release}")
    if patch.until is not None and not older(release, patch.until):
        return absent(f"{patch.module} is gone; the defect was mended in {patch.until}")
    return unknown(f"{place}: it moved, or has no source")


def older(one: str, other: str) -> bool:
    """Whether one version comes before the other, in the order of PEP 440; local parts such as +rocm don't count."""
    return _order(one) < _order(other)


def _order(text: str) -> tuple[tuple[int, ...], tuple[str, int], int, tuple[int, int]]:
    match = re.match(_VERSION, text, re.IGNORECASE)
    if match is None:
        return (), ("", 0), 0, (0, 0)
    release, kind, number, post, dev = match.groups()
    parts = tuple(int(part) for part in release.split("."))
    while parts and parts[-1] == 0:
        parts = parts[:-1]
    # A bare .dev comes before alpha, alpha before the release; a post release after it.
    pre = (kind.lower(), int(number)) if kind else ("", 0) if dev and not post else ("z", 0)
    return parts, pre, int(post) if post else -1, (0, int(dev)) if dev else (1, 0)


def _is_checkout(root: Path) -> bool:
    return (root / "setup.py").is_file()


def _public(text: str) -> str:
    return text.partition("+")[0]


def _installed_root() -> Path:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise LookupError("no vLLM in this Python environment: install one, or name its folder with --vllm DIR")
    origin = Path(spec.origin)
    if not origin.is_file():
        raise LookupError(f"vLLM lies in an archive ({origin}): unpack it, and name the folder with --vllm DIR")
    return origin.parent.parent


def _metadata(root: Path) -> tuple[Metadata, ...]:
    found = []
    for folder in sorted([*root.glob("vllm*.dist-info"), *root.glob("vllm*.egg-info")]):
        name, release = _headers(folder / ("METADATA" if folder.suffix == ".dist-info" else "PKG-INFO"))
        if name and release and (name == "vllm" or _holds_vllm(folder)):
            found.append(Metadata(name, release, folder))
    return tuple(found)


def _metadata_elsewhere() -> tuple[Metadata, ...]:
    """An editable installation has its files in one folder and its metadata in another."""
    from importlib.metadata import distributions

    return tuple(
        Metadata("vllm", d.version, Path(str(d.locate_file("")))) for d in distributions(name="vllm") if d.version
    )


def _headers(path: Path) -> tuple[str | None, str | None]:
    try:
        head = path.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:
        return None, None
    fields = dict(line.split(": ", 1) for line in head.splitlines() if line.startswith(("Name: ", "Version: ")))
    return fields.get("Name"), fields.get("Version")


def _holds_vllm(folder: Path) -> bool:
    try:
        return "\nvllm/__init__.py," in "\n" + (folder / "RECORD").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
