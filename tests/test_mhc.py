"""layers/mhc.py: the same answers about AITER's kernels as stock gives, and AITER stays unimported."""

import ast
import sys
import types

import pytest
from on_release import report

from vllm_rocm_fixes.mend import mend
from vllm_rocm_fixes.patches import mhc

# Where the source binds a name without defining it, stock's own way is gone.
UNTOLD = {"not a function", "from elsewhere"}


@pytest.mark.parametrize("release", ["0.30.0", "0.33.0"])
def test_importing_it_imports_no_aiter_and_finds_the_same(release):
    stock, ours = report(release, "mhc")
    assert ours["state"] == "waiting"
    assert "import aiter" in stock["import"]["events"]
    assert "gpu torch.cuda.get_device_properties" in stock["import"]["events"]
    assert [e for e in ours["import"]["events"] if e.startswith(("import aiter", "gpu"))] == []
    assert len(stock["answers"]) >= 5
    assert stock["answers"] == ours["answers"]


@pytest.mark.parametrize("release", ["0.30.0", "0.33.0"])
def test_every_source_gets_stocks_answer(release):
    stock, ours = report(release, "mhc")
    answers = {case: found["answers"] for case, found in stock["sources"].items()}
    assert answers == {case: found["answers"] for case, found in ours["sources"].items()}
    assert len({tuple(answer) for answer in answers.values()}) >= 5, "the cases don't tell anything apart"
    assert all(found["ran"] for found in stock["sources"].values())
    assert {case for case, found in ours["sources"].items() if found["ran"]} == UNTOLD


def test_a_release_without_these_probes_is_left_alone():
    stock, ours = report("0.27.1", "mhc")
    assert ours["state"] == "clear"
    assert stock["answers"] == ours["answers"]


@pytest.mark.unit
def test_a_stand_in_for_aiter_without_a_spec_is_left_to_stocks_way(monkeypatch):
    monkeypatch.setitem(sys.modules, "aiter", types.ModuleType("aiter"))
    assert mhc.has_kernel("mhc_fused_post_pre") is None and mhc.takes_norm("mhc_pre") is None
    monkeypatch.setitem(sys.modules, "aiter", None)
    assert mhc.has_kernel("mhc_fused_post_pre") is False and mhc.takes_norm("mhc_pre") is False


@pytest.mark.unit
def test_a_probe_that_is_not_known_is_left_alone():
    head = "class MHCPreOp: ...\n"
    new = head + "def has_new():\n    from aiter.ops import mhc\n    return hasattr(mhc, 'new')\nHAS_NEW = has_new()\n"
    assert mhc.examine(ast.parse(new)).kind == "unknown"
    assert mhc.examine(ast.parse(head + "import aiter\n")).kind == "unknown"
    assert mhc.examine(ast.parse("x = 1")).kind == "unknown"
    used = head + "def forward(x):\n    from aiter.ops.mhc import mhc_pre\n    return mhc_pre(x)\n"
    assert mend(used, "mhc.py", [mhc.PATCH]).outcomes[0].verdict.kind == "clear"
