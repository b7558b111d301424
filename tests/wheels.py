"""Packages that the tests put beside torch without installing them: wheels, unzipped into a folder for PYTHONPATH."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename
from releases import cache, fetch, packages

# What TileLang needs at import besides torch and what vLLM needs anyway; z3 4.15.5 and later don't fit its libraries.
TILELANG_NEEDS = ("z3-solver==4.15.4.0", "torch-c-dlpack-ext==0.1.5", "ml-dtypes==0.5.4")
# Versions of TileLang, each with the tvm-ffi that vLLM or its own metadata pairs it with.
TILELANG = {"0.1.10": "0.1.10", "0.1.12": "0.1.11", "0.1.15": "0.1.12"}


def wheel(project: str, version: str) -> Path:
    """The wheel of a project that fits this interpreter best, from the registry."""
    order = {tag: place for place, tag in enumerate(sys_tags())}
    fitting = []
    for package in packages(project):
        if package.package_type == "wheel" and package.version == version:
            places = [order[tag] for tag in parse_wheel_filename(package.filename)[3] if tag in order]
            if places:
                fitting.append((min(places), package.filename, package))
    if not fitting:
        raise LookupError(f"the package registry has no wheel of {project} {version} for this interpreter")
    return fetch(min(fitting)[2])


def site(*requirements: str) -> Path:
    """A folder that holds these wheels unzipped, like a site-packages; requirements look like NAME==VERSION."""
    name = "+".join(requirements).replace("==", "-")
    target = cache() / "sites" / f"{sysconfig.get_config_var('SOABI')}" / name
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    unpacked = Path(tempfile.mkdtemp(dir=target.parent))
    try:
        for requirement in requirements:
            with zipfile.ZipFile(wheel(*requirement.split("=="))) as archive:
                archive.extractall(unpacked)
        try:
            unpacked.rename(target)
        except OSError:  # another process was faster
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(unpacked, ignore_errors=True)
    return target


def tilelang(version: str, tvm_ffi: str | None = None) -> Path:
    """A folder with real TileLang and all it needs beside torch."""
    return site(f"tilelang=={version}", f"apache-tvm-ffi=={tvm_ffi or TILELANG[version]}", *TILELANG_NEEDS)


if __name__ == "__main__":
    for wanted in sys.argv[1:] or TILELANG:
        print(wanted, tilelang(wanted), os.sep)
