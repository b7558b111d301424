"""`make unit`: the tests that need sources but no vLLM installed, on every supported Python that is on this machine."""

import os
from pathlib import Path

import nox

PYENV = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
if PYENV.is_dir():  # its shims find a Python only where its version is switched on
    os.environ["PYENV_VERSION"] = ":".join(sorted((p.name for p in PYENV.iterdir()), reverse=True))

nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = False
nox.options.reuse_existing_virtualenvs = True
# No vLLM and no torch: the overlay itself and what the tests read sources with.
NEEDS = ("pytest", "hypothesis", "pypi-simple", "packaging")


@nox.session(python=["3.10", "3.11", "3.12", "3.13", "3.14"])
def unit(session: nox.Session) -> None:
    """Install the overlay alone, and run the tests that are marked unit."""
    pins = [line.split("#")[0].strip() for line in Path("requirements/test.txt").read_text().splitlines()]
    session.install("--quiet", *(pin for pin in pins if pin.split("==")[0] in NEEDS))
    session.install("--quiet", "--no-deps", ".")
    files = [str(path) for path in sorted(Path("tests").glob("test_*.py")) if "pytest.mark.unit" in path.read_text()]
    session.run("pytest", "-q", "-m", "unit", "-p", "no:cacheprovider", *files, *session.posargs)
