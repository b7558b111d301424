"""Builds the fake HIP runtime and what is linked against it, with the machine's compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent
CC = os.environ.get("CC", "gcc")


def build(out: Path) -> Path:
    """Fill the folder out: runtimes in out/torch and out/other, the rest in out itself.

    As in ROCm, the file has a long version, SONAME and development name are links to it. The libraries find out/torch
    by their own search path, whatever LD_LIBRARY_PATH says.
    """
    for name, mark in ("torch", 0x7001), ("other", 0x0DD1):
        folder = out / name
        folder.mkdir(parents=True)
        script = f"-Wl,-soname,libamdhip64.so.7,--version-script={HERE / 'runtime.map'}"
        _gcc(folder / "libamdhip64.so.7.2.70200", "runtime.c", f"-DMARK={mark}", script)
        for link in "libamdhip64.so.7", "libamdhip64.so":
            (folder / link).symlink_to("libamdhip64.so.7.2.70200")
    needs = [f"-L{out / 'torch'}", "-lamdhip64", "-Wl,--disable-new-dtags,-rpath,$ORIGIN/torch"]
    _gcc(out / "libtorch_like.so", "torch_like.c", *needs)
    shutil.copy(out / "libtorch_like.so", out / "libc10_hip.so")
    _gcc(out / "extension.so", "extension.c", "-DOWNERS", "-Wl,-z,now", *needs)
    _gcc(out / "extension_lazy.so", "extension.c", "-Wl,-z,lazy", *needs)
    _gcc(out / "extension_free.so", "extension.c", "-DOWNERS", "-Wl,-z,now")
    include = sysconfig.get_paths()["include"]
    _gcc(out / f"hip_extension{sysconfig.get_config_var('EXT_SUFFIX')}", "python_extension.c", f"-I{include}", *needs)
    return out


def _gcc(target: Path, source: str, *flags: str) -> None:
    subprocess.run([CC, "-shared", "-fPIC", "-O1", "-w", "-o", target, HERE / source, *flags], check=True)
