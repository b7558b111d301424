"""The vLLM of an environment or a folder, found without running any of it, and what its metadata says."""

from __future__ import annotations

import importlib.util
from email import message_from_bytes
from importlib.metadata import distributions
from pathlib import Path
from typing import NamedTuple

from .installed import version


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
    return Installation(root, version(root), _metadata(root) or (_metadata_elsewhere() if folder is None else ()))


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
        says = message_from_bytes(_content(folder / "METADATA") or _content(folder / "PKG-INFO"))
        name, release = says["Name"], says["Version"]
        if name and release and (name == "vllm" or b"\nvllm/__init__.py," in b"\n" + _content(folder / "RECORD")):
            found.append(Metadata(str(name), str(release), folder))
    return tuple(found)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _metadata_elsewhere() -> tuple[Metadata, ...]:
    """An editable installation has its files in one folder and its metadata in another."""
    return tuple(
        Metadata("vllm", d.version, Path(str(d.locate_file("")))) for d in distributions(name="vllm") if d.version
    )
