"""kernel_warmup and what it calls: nothing is imported before a warm-up runs, and none for models that aren't there."""

import ast

import pytest
from on_release import NIGHTLY, report
from releases import tree

from vllm_rocm_fixes.mend import mend
from vllm_rocm_fixes.patches import kernel_warmup

MINIMAX = "vllm.models.minimax_m3.amd"
PCIE = "vllm.distributed.device_communicators.flashinfer_pcie_ipc_all_reduce"


@pytest.mark.parametrize("release", ["0.24.0", NIGHTLY, "0.33.0"])
def test_the_warm_up_imports_no_helper_it_does_not_run(release):
    stock, ours = report(release, "kernel_warmup")
    assert ours["state"] == "waiting"
    assert stock["run"]["raised"] is not None, "stock imports MiniMax-M3's NVIDIA model, which can't be had here"
    assert MINIMAX in stock["minimax"]
    assert ours["run"]["raised"] is None, ours["run"]
    assert MINIMAX not in ours["minimax"]
    assert ours["helpers"] == []
    assert (stock["helpers"] != []) == (release != "0.24.0")


@pytest.mark.parametrize("release", [NIGHTLY, "0.33.0"])
def test_an_engine_without_torchvision_warms_up(release):
    stock, ours = report(release, "kernel_warmup")
    assert "torchvision" in stock["run"]["raised"]
    assert ours["run"]["raised"] is None, ours["run"]


def test_a_release_without_the_helpers_is_left_alone():
    stock, ours = report("0.23.0", "kernel_warmup")
    assert ours["state"] == "clear"
    assert stock["run"] == ours["run"]


def test_importing_it_initialises_no_gpu():
    stock, ours = report(NIGHTLY, "kernel_warmup")
    assert PCIE in stock["helpers"]
    assert "gpu torch.cuda.get_device_capability" in stock["import"]["events"]
    assert [e for e in ours["import"]["events"] if e.startswith("gpu")] == []
    assert [e for e in ours["import"]["events"] if "flashinfer" in e] == []


def test_names_that_others_import_still_resolve():
    for release in (NIGHTLY, "0.33.0"):
        stock, ours = report(release, "kernel_warmup")
        assert stock["names"] == ours["names"]
        assert ours["names"]["qwen_triton_warmup"]


@pytest.mark.parametrize("release", [NIGHTLY, "0.33.0"])
def test_pcie_ipc_is_warmed_up_where_the_communicator_chose_it(release):
    stock, ours = report(release, "kernel_warmup")
    assert ours["pcie"] == {"no group": False, "none": False, "disabled": False, "chosen": True}
    if release == "0.33.0":  # the variable is read a second time, and the communicator's answer doesn't count
        assert stock["pcie"] == {"no group": True, "none": True, "disabled": True, "chosen": True}


# The source alone


def verdict(text):
    return kernel_warmup.examine(ast.parse(text))


RUN = "from vllm.platforms import current_platform\ndef kernel_warmup(worker):\n    "


@pytest.mark.unit
def test_shapes_of_forks():
    fork = f"from vllm.model_executor.layers.fla.ops import chunk\n{RUN}chunk(worker)\n"
    assert verdict(fork).kind == "needed"
    mended = ast.unparse(mend(fork, "fork.py", [kernel_warmup.PATCH]).tree)
    assert mended.index("def kernel_warmup") < mended.index("need(globals(), 'chunk')")
    early = f"from vllm.model_executor.warmup.minimax_m3_msa_warmup import minimax_m3_msa_warmup\n{RUN}"
    outcome = mend(early + "minimax_m3_msa_warmup(worker)\n", "fork.py", [kernel_warmup.PATCH])
    assert outcome.outcomes[0].applied
    assert verdict("if TYPE_CHECKING:\n    from x.qwen_warmup import y\n" + RUN + "pass").kind == "clear"
    assert verdict("if not TYPE_CHECKING:\n    from x.qwen_warmup import y\n" + RUN + "pass").kind != "clear"
    twice = (
        RUN + "from a.minimax_m3_msa_warmup import minimax_m3_msa_warmup as m, minimax_m3_msa_warmup\n    m(worker)\n"
    )
    assert verdict(twice).kind == "unknown"
    assert verdict("def another(): ...").kind == "unknown"
    kept = f"from vllm.x import qwen_warmup\nHELPERS = [qwen_warmup]\n{RUN}pass\n"
    assert mend(kept, "fork.py", [kernel_warmup.PATCH]).outcomes[0].failed  # stock is kept, and it is said


@pytest.mark.unit
def test_nightlies():
    for nightly in (NIGHTLY, "0.26.1.dev202608050841"):
        source = (tree(nightly) / "vllm/model_executor/warmup/kernel_warmup.py").read_bytes()
        assert mend(source, "kernel_warmup.py", [kernel_warmup.PATCH]).outcomes[0].applied
