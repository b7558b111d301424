"""fa_utils: flash-attention is imported when it is asked for, and one that fails, however it does, counts as absent."""

import ast

import pytest
from on_release import report
from releases import tree

from vllm_rocm_fixes.mend import mend
from vllm_rocm_fixes.patches import fa_utils

RELEASES = ["0.14.1", "0.25.1", "0.33.0"]
FAILURES = ("OSError", "RuntimeError", "SystemExit", "KeyError", "needs AITER that fails")


@pytest.mark.parametrize("release", RELEASES)
def test_it_is_imported_when_it_is_asked_for(release):
    stock, ours = report(release, "fa_utils")
    assert ours["state"] == "waiting"
    assert "import flash_attn" in stock["works"]["import"]["events"]
    assert "import aiter" in stock["needs AITER"]["import"]["events"]
    for case in ("works", "needs AITER"):
        assert ours[case]["import"]["events"] == []
        for question in ("available", "take", "call", "other"):
            assert ours[case][question]["returned"] == stock[case][question]["returned"]
        asked = [*ours[case]["available"]["events"], *ours[case]["take"]["events"]]
        assert "import flash_attn" in asked


@pytest.mark.parametrize("release", RELEASES)
def test_one_that_fails_counts_as_absent(release):
    stock, ours = report(release, "fa_utils")
    for case in FAILURES:
        assert stock[case]["import"]["raised"] is not None
        assert ours[case]["import"]["raised"] is None
        assert ours[case]["available"]["returned"] is False
        assert ours[case]["take"]["returned"] is True
        assert "requires upstream flash-attn" in ours[case]["call"]["raised"]
        said = [line for line in ours[case]["said"] if "counts as absent" in line]
        assert len(said) == 1


@pytest.mark.parametrize("release", RELEASES)
def test_a_missing_one_is_not_worth_a_line(release):
    stock, ours = report(release, "fa_utils")
    assert ours["missing"]["said"] == []
    assert ours["missing"]["available"]["returned"] is False
    assert "requires upstream flash-attn" in ours["missing"]["call"]["raised"]
    if release == "0.14.1":
        assert "requires upstream flash-attn" in stock["missing"]["import"]["raised"]
    else:
        assert ours["missing"]["call"]["raised"] == stock["missing"]["call"]["raised"]


@pytest.mark.unit
@pytest.mark.parametrize("again", ["", "from vllm.other import current_platform\n"])
def test_the_platform_that_is_asked_late_is_the_one_that_stock_asks(again):
    source = (tree("0.33.0") / "vllm/v1/attention/backends/fa_utils.py").read_text()
    done = mend(f"{source}\n{again}", "m.py", [fa_utils.PATCH])
    assert done.outcomes[0].applied != bool(again)
    assert not again or "moves what reads current_platform" in done.outcomes[0].failed


@pytest.mark.unit
def test_shapes():
    ask = "def is_flash_attn_varlen_func_available(): ...\n"
    assert fa_utils.examine(ast.parse("x = 1")).kind == "unknown"
    assert fa_utils.examine(ast.parse(ask)).kind == "clear"
    own = "from vllm.{} import flash_attn_varlen_func\n"
    assert fa_utils.examine(ast.parse(ask + own.format("vllm_flash_attn"))).kind == "clear"
    assert fa_utils.examine(ast.parse(ask + own.format("v1.attention.ops.rocm_flash_attn"))).kind == "unknown"
    assert fa_utils.examine(ast.parse(ask + "from flash_attn import flash_attn_varlen_func\n")).kind == "unknown"
