"""The build backend: setuptools', and then archives that say nothing of the machine and the moment they were made.

Built twice, the same bytes: members are sorted, owners, times and the umask's part of the modes are gone. The time is
SOURCE_DATE_EPOCH where that is set.
"""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import time
import zipfile
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  (the hooks that stay as they are)

EPOCH = 315532800  # 1980-01-01, the first moment that a zip can name


def build_wheel(directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    """PEP 517: the file name of the wheel in `directory`."""
    name = build_meta.build_wheel(directory, config_settings, metadata_directory)
    path = Path(directory, name)
    with zipfile.ZipFile(path) as archive:
        members = sorted(
            (info.filename, _mode(info.external_attr >> 16), archive.read(info)) for info in archive.infolist()
        )
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, mode, data in members:
            info = zipfile.ZipInfo(member, time.gmtime(_time())[:6])
            info.external_attr = (0o100000 | mode) << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, data)
    return name


def build_sdist(directory: str, config_settings: Any = None) -> str:
    """PEP 517: the file name of the sdist in `directory`."""
    name = build_meta.build_sdist(directory, config_settings)
    path = Path(directory, name)
    with tarfile.open(path) as stock:
        members = {info.name: (info, stock.extractfile(info)) for info in stock.getmembers()}
        with io.BytesIO() as plain:
            with tarfile.open(fileobj=plain, mode="w") as archive:
                for _, (info, data) in sorted(members.items()):
                    new = tarfile.TarInfo(info.name)
                    new.type, new.size, new.mtime, new.mode = info.type, info.size, _time(), _mode(info.mode)
                    archive.addfile(new, data)
            packed = gzip.compress(plain.getvalue(), mtime=_time())
    path.write_bytes(packed)
    return name


def _time() -> int:
    return int(os.environ.get("SOURCE_DATE_EPOCH", EPOCH))


def _mode(mode: int) -> int:
    """0755 for what can be run or entered, 0644 for the rest."""
    return 0o755 if mode & 0o100 else 0o644
