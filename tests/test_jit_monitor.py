"""jit_monitor: no worker imports TileLang to watch it; where it is loaded, or off ROCm, it is watched as in stock."""

import ast

import pytest
from on_release import report
from releases import tree

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


HOOK = "def _setup_tilelang_jit_hook()"
ASKS = "not current_platform.is_rocm()"
GUARD = f"    if {ASKS}:\n        _setup_tilelang_jit_hook()\n"
KERNEL = 'importlib.import_module("tilelang.jit.kernel")'
FORKS = {
    "renamed, by a name": (
        {GUARD: "    _watch()\n", HOOK: "def _watch()", "importlib.import_module(": "import_module("}, "unknown",
    ),
    "renamed, by a constant": (
        {GUARD: "    _watch()\n", HOOK: '_JIT = "tilelang.jit"\n\n\ndef _watch()',
         KERNEL: "importlib.import_module(_JIT)",
         'importlib.import_module("tilelang.jit")': "importlib.import_module(_JIT)"}, "unknown",
    ),
    "on CUDA alone": ({ASKS: "current_platform.is_cuda()"}, "clear"),
    "on ROCm too": ({ASKS: "current_platform.is_cuda_alike()"}, "needed"),
    "asked in the hook": (
        {GUARD: "    _setup_tilelang_jit_hook()\n",
         "if _tilelang_hook_installed:": "if _tilelang_hook_installed or current_platform.is_rocm():"}, "unknown",
    ),
    "asked nowhere": ({GUARD: "    _setup_tilelang_jit_hook()\n"}, "needed"),
}  # fmt: skip


@pytest.mark.unit
@pytest.mark.parametrize("fork", FORKS)
def test_who_decides_whether_tilelang_is_watched(fork):
    changes, kind = FORKS[fork]
    source = (tree("0.33.0") / "vllm" / "utils" / "jit_monitor.py").read_text()
    for old, new in changes.items():
        assert old in source
        source = source.replace(old, new)
    verdict = jit_monitor.examine(ast.parse(source))
    assert verdict.kind == kind, verdict
