"""Quark OCP-MX: AITER is imported by the scheme that needs a kernel, and a broken one is answered as absent."""

import ast
import sys
import types

import pytest
from on_release import report

from vllm_rocm_fixes.mend import mend
from vllm_rocm_fixes.patches import quark

BROKEN = ("unsupported GPU", "unknown GPU", "failed build")
# 0.14.x dies of the first of these too: its except clause lacks RuntimeError.
CAUGHT = {"0.25.1": {"unsupported GPU"}, "0.14.1": set()}


def aiter(seen):
    return [e for e in seen["events"] if e.startswith("import aiter")]


@pytest.mark.parametrize("release", ["0.14.1", "0.25.1"])
def test_aiter_is_imported_when_a_kernel_is_needed(release):
    stock, ours = report(release, "quark")
    assert ours["state"] == "waiting"
    for case in ("emulating", "native"):
        assert aiter(stock[case]["import"]), "stock imports AITER with the module"
        assert not aiter(ours[case]["import"])
        assert ours[case]["operator"] and stock[case]["operator"]
        assert ours[case]["make"]["raised"] is None
    assert not aiter(ours["emulating"]["make"])
    assert "import aiter.ops.triton.gemm_afp4wfp4" in aiter(ours["native"]["make"])


@pytest.mark.parametrize("release", ["0.14.1", "0.25.1"])
def test_an_aiter_that_fails_counts_as_absent(release):
    stock, ours = report(release, "quark")
    for case in BROKEN:
        assert (stock[case]["import"]["raised"] is None) == (case in CAUGHT[release])
        assert ours[case]["import"]["raised"] is None
        assert "requires AITER" in ours[case]["make"]["raised"]
        assert any("counts as absent" in line for line in ours[case]["said"])
    assert ours["unsupported GPU, emulating"]["make"]["raised"] is None
    assert not aiter(ours["unsupported GPU, emulating"]["make"])


@pytest.mark.parametrize("release", ["0.14.1", "0.25.1"])
def test_without_aiter_it_is_as_in_stock(release):
    stock, ours = report(release, "quark")
    assert ours["no AITER"]["operator"] is stock["no AITER"]["operator"] is False
    assert ours["no AITER"]["make"]["raised"] == stock["no AITER"]["make"]["raised"]
    assert "requires AITER" in ours["no AITER"]["make"]["raised"]


@pytest.mark.unit
def test_a_stand_in_for_aiter_without_a_spec_is_left_to_the_import(monkeypatch):
    monkeypatch.setitem(sys.modules, "aiter", types.ModuleType("aiter"))
    assert quark.aiter_is_installed()
    monkeypatch.setitem(sys.modules, "aiter", None)
    assert not quark.aiter_is_installed()


@pytest.mark.unit
def test_shapes():
    assert quark.examine(ast.parse("class Other: ...")).kind == "unknown"
    loose = "from aiter.ops.shuffle import shuffle_weight\nclass QuarkOCP_MX: ...\n"
    assert quark.examine(ast.parse(loose)).kind == "unknown"
    other = "try:\n    from aiter import x\nexcept ImportError:\n    x = None\nclass QuarkOCP_MX: ...\n"
    assert quark.examine(ast.parse(other)).kind == "unknown"
    used = "class QuarkOCP_MX:\n    def f(self):\n        from aiter import x\n        return x\n"
    assert mend(used, "q.py", [quark.PATCH]).outcomes[0].verdict.kind == "clear"
