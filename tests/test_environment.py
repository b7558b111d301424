"""The first command on a fresh machine: what it lacks is said in a line, and what was done isn't done again."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    target = tmp_path_factory.mktemp("checkout")
    for folder in ("tools", "requirements"):
        shutil.copytree(ROOT / folder, target / folder)
    for name in ("pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, target)
    return target


def make(checkout, **environment):
    """Run it where no package registry answers; what it prints, and what it complains of."""
    nowhere = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "1"}
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    done = subprocess.run(
        [sys.executable, checkout / "tools" / "environment.py", "serve"],
        env={**kept, **nowhere, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    return done.stdout, done.stderr


def test_without_a_compiler(checkout):
    assert make(checkout, PATH="/nowhere") == ("", "error: there is no gcc; on Debian: apt-get install gcc libc6-dev\n")


def test_without_a_network_and_again(checkout):
    said, error = make(checkout)
    assert "[1/7] python environment" in said
    assert "[2/7] torch 2.13.0" in said
    assert error.startswith("error: the package registry can't be reached;")
    assert error.count("\n") == 1
    said, error = make(checkout)
    assert "[1/7]" not in said  # done before
    assert "[2/7] torch 2.13.0" in said
    assert error.startswith("error: the package registry can't be reached;")


def test_with_an_environment_that_was_broken(checkout):
    make(checkout)
    (checkout / ".venv" / "bin" / "python").unlink()
    _, error = make(checkout)
    assert "make clean" in error
    assert error.count("\n") == 1
