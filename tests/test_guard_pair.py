"""Guard tilelang_pair: TileLang beside a tvm-ffi that makes its import abort the interpreter, the real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from releases import tree
from wheels import site, tilelang

from vllm_rocm_fixes.guards.pair import aborts

# TileLang, tvm-ffi, and how an import ends: each measured by importing it, see vllm_rocm_fixes/guards/pair.py.
PAIRS = {
    ("0.1.10", "0.1.10"): "works",
    ("0.1.10", "0.1.11"): "works",
    ("0.1.10", "0.1.12"): "aborts",
    ("0.1.12", "0.1.11"): "works",
    ("0.1.12", "0.1.12"): "aborts",
    ("0.1.15", "0.1.10"): "raises",
    ("0.1.15", "0.1.12"): "works",
}
ASK = """
import importlib.util, logging, sys
logging.basicConfig(format="%(message)s", stream=sys.stdout)
import vllm_rocm_fixes
vllm_rocm_fixes.prepare()
vllm_rocm_fixes.register()
print("spec", importlib.util.find_spec("tilelang") is not None)
try:
    import tilelang.language
    print("imported", tilelang.__version__)
except Exception as error:
    print(type(error).__name__)
"""


def run(versions, code, *folders, **switches):
    """Run code with these versions of TileLang and tvm-ffi first on the path."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ROCM_FIXES", "TVM_", "TL_"))}
    environment |= switches
    path = [site(f"apache-tvm-ffi=={versions[1]}"), tilelang(versions[0]), *folders]
    environment["PYTHONPATH"] = os.pathsep.join(map(str, path))
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("versions", PAIRS)
def test_stock_and_ours(versions):
    ends = PAIRS[versions]
    stock = run(versions, "import tilelang.language")
    assert stock.returncode == {"works": 0, "raises": 1, "aborts": -signal.SIGABRT}[ends], stock.stderr
    ours = run(versions, ASK)
    assert ours.returncode == 0, ours.stderr
    warnings = [line for line in ours.stdout.splitlines() if line.startswith("guard tilelang_pair")]
    if ends == "aborts":
        assert "spec False\nModuleNotFoundError\n" in ours.stdout
        (warning,) = warnings
        assert f"TileLang {versions[0]}" in warning and f"apache-tvm-ffi {versions[1]}" in warning
        fitting = warning.rsplit("apache-tvm-ffi ", 1)[1].split()[0]
        assert PAIRS[versions[0], fitting] == "works"
    else:
        assert "spec True\n" in ours.stdout and not warnings
        assert ("imported" in ours.stdout) == (ends == "works")


def test_skipped():
    assert run(("0.1.10", "0.1.12"), ASK, ROCM_FIXES_SKIP="tilelang_pair").returncode == -signal.SIGABRT


def test_pair_that_turns_up_later():
    """The path grows after the doors were called: the import raises where stock aborts."""
    late = """
import sys
folders = sys.path[1:3]
del sys.path[1:3]
import vllm_rocm_fixes
vllm_rocm_fixes.prepare()
sys.path[1:1] = folders
try:
    import tilelang
except ModuleNotFoundError as error:
    print(error.name, error)
"""
    ours = run(("0.1.10", "0.1.12"), late)
    assert ours.stdout.startswith("tilelang TileLang 0.1.10 counts as absent"), ours.stderr


def test_probe_of_stock_vllm():
    """vLLM 0.23.0 asks by a trial import."""
    code = "{}from vllm.utils.import_utils import has_tilelang\nprint('answer', has_tilelang())"
    bad = ("0.1.10", "0.1.12")
    stock = run(bad, code.format(""), tree("0.23.0"), VLLM_PLUGINS="")
    assert stock.returncode == -signal.SIGABRT and "__ffi_repr__" in stock.stderr
    ours = run(bad, code.format("import vllm, vllm_rocm_fixes\nvllm_rocm_fixes.prepare()\n"), tree("0.23.0"))
    assert "answer False" in ours.stdout, ours.stderr


@pytest.mark.parametrize(
    "tilelang_version, tvm_ffi, expected",
    [
        ("0.1.9", "0.1.15.post2", False),
        ("0.1.10+rocm7", "0.1.12rc0", True),
        ("0.1.11", "0.1.15.post2", True),
        ("0.1.12", "0.1.11", False),
        ("0.1.13", "0.1.15.post2", False),
        ("0.1", "0.1.12", False),
        ("main", "0.1.12", False),
        ("0.1.10", "unknown", False),
    ],
)
def test_version_numbers(tilelang_version, tvm_ffi, expected):
    assert aborts(tilelang_version, tvm_ffi) is expected
