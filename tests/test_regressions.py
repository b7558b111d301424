"""The tests that upstream's reviews asked for and that upstream did not write, against stock sources.

Importing kernel_warmup initialises no GPU (#54869, #47539); a start on ROCm imports no TileLang and no expert-parallel
package (#51151, #51176); a model registered in the parent is known in a forked child (#47992); a child of a process
that imported TileLang is clean (#44823).
"""

import pytest
from on_release import WANTED, report

RELEASES = WANTED["regressions"]
EXPERTS = ("mori", "deep_ep", "nixl_ep", "moonep")


def met(seen, *packages):
    return [e for e in seen["events"] if e.startswith("import") and e.split()[1].split(".")[0] in packages]


@pytest.mark.parametrize("release", RELEASES)
def test_importing_kernel_warmup_initialises_no_gpu(release):
    stock, ours = report(release, "regressions")
    for seen in (ours["start"]["worker"], ours["start"]["kernel_warmup"]):
        assert seen["raised"] is None
        assert [e for e in seen["events"] if e.startswith("gpu")] == []
    assert any(e.startswith("gpu") for step in stock["start"].values() for e in step["events"])


@pytest.mark.parametrize("release", RELEASES)
def test_a_start_imports_no_tilelang_and_no_expert_parallel_package(release):
    stock, ours = report(release, "regressions")
    for step, seen in ours["start"].items():
        assert seen["raised"] is None, step
        assert met(seen, *EXPERTS, "tilelang", "tvm") == [], step
    in_stock = [e for seen in stock["start"].values() for e in met(seen, *EXPERTS, "tilelang", "tvm")]
    assert "import mori" in in_stock
    if release != "0.33.0":
        assert "import tilelang" in in_stock


@pytest.mark.parametrize("release", RELEASES)
def test_a_model_registered_in_the_parent_is_known_in_a_child(release):
    stock, ours = report(release, "regressions")
    assert ours["registered"]["config"]["raised"] is None
    assert ours["registered"]["method"] == "fork"
    assert ours["registered"]["known"] is True
    assert stock["registered"]["method"] == "spawn"
    assert stock["registered"]["known"] is False


@pytest.mark.parametrize("release", RELEASES)
def test_a_child_of_a_process_that_imported_tilelang_is_clean(release):
    stock, ours = report(release, "regressions")
    assert stock["child"]["variable"] and stock["child"]["path"] and stock["child"]["tvm"]
    assert ours["child"] == {"variable": False, "path": [], "tvm": False}
