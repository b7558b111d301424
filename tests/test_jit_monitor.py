"""jit_monitor: no worker imports TileLang to watch it; where it is loaded, or off ROCm, it is watched as in stock."""

import ast

import pytest
from on_release import report

from vllm_rocm_fixes.patches import jit_monitor


@pytest.mark.parametrize("release", ["0.26.0", "0.27.1"])
def test_activating_it_imports_no_tilelang(release):
    stock, ours = report(release, "jit_monitor")
    assert ours["state"] == "waiting"
    assert "import tilelang" in stock["not loaded"]["events"]
    assert [e for e in ours["not loaded"]["events"] if "tilelang" in e or "tvm" in e] == []
    assert ours["not loaded"]["raised"] is None


@pytest.mark.parametrize("release", ["0.26.0", "0.27.1"])
def test_where_tilelang_is_loaded_it_is_watched(release):
    stock, ours = report(release, "jit_monitor")
    assert len(stock["loaded"]["told"]) == 1
    assert stock["loaded"]["told"] == ours["loaded"]["told"]
    assert "import tilelang" in ours["another platform"]["events"]


@pytest.mark.unit
def test_shapes():
    hook = "def _setup_tilelang_jit_hook():\n    m = importlib.import_module('tilelang.jit')\n"
    asks = "def activate():\n    _setup_tilelang_jit_hook()\n"
    guarded = "def activate():\n    if not current_platform.is_rocm():\n        _setup_tilelang_jit_hook()\n"
    verdicts = {
        hook + asks: "needed",
        hook + guarded: "clear",
        "def activate(): ...": "clear",
        "def other(): ...": "unknown",
        "def activate():\n    importlib.import_module('tilelang')\n": "unknown",
        "def _setup_tilelang_jit_hook():\n    import_it()\n" + asks: "unknown",
    }
    assert {text: jit_monitor.examine(ast.parse(text)).kind for text in verdicts} == verdicts
