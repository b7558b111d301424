"""kernel_warmup and what it calls: nothing is imported before a warm-up runs, and none for models that aren't there."""

import __future__

import ast
import sys
import textwrap
import types

import pytest
from on_release import NIGHTLY, report
from releases import tree

from vllm_rocm_fixes.mend import mend
from vllm_rocm_fixes.patches import kernel_warmup
from vllm_rocm_fixes.patches.warmup_searches import QWEN_VL, STEP5

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


def forked(release, *edits, file="kernel_warmup.py"):
    """A real file with these edits of a fork."""
    text = (tree(release) / "vllm/model_executor/warmup" / file).read_text()
    for before, after in edits:
        assert before in text
        text = text.replace(before, after, 1)
    return text


IMPORT = """    from vllm.model_executor.warmup.minimax_m3_msa_warmup import (
        minimax_m3_msa_warmup,
    )
"""
CALL = "    minimax_m3_msa_warmup(worker)\n"
IPC = "    if envs.VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC:\n"
IPC_CALL = "        flashinfer_pcie_ipc_all_reduce.warmup_flashinfer_pcie_ipc_allreduce(worker)\n"
NIGHTLY_IPC = "    warmup_flashinfer_pcie_ipc_allreduce(worker)\n"
TO_MODULE = ("import torch\n", f"import torch\n{IMPORT.replace('    from', 'from')}")
UNKNOWN = {
    "a second name, used elsewhere": (
        "0.33.0",
        (IMPORT, IMPORT.replace("    )", "        minimax_m3_indexer_warmup,\n    )")),
        (CALL, f"{CALL}    minimax_m3_indexer_warmup(worker)\n"),
    ),
    "a second name at module scope": (
        "0.33.0",
        (IMPORT, ""),
        (TO_MODULE[0], TO_MODULE[1].replace(")", "    minimax_m3_indexer_warmup,\n)")),
    ),
    "what it returns is read": (
        "0.33.0",
        (CALL, f"    compiled = {CALL.lstrip()}    if compiled:\n        logger.info(compiled)\n"),
    ),
    "in a condition": ("0.33.0", (CALL, f"    if not {CALL.strip()}:\n        return\n")),
    "in a table": (
        "0.33.0",
        (IMPORT, ""),
        TO_MODULE,
        (CALL, "    for f in (minimax_m3_msa_warmup,):\n        f(worker)\n"),
    ),
    "another helper": (
        "0.33.0",
        (IMPORT, IMPORT.replace("_msa", "")),
        (CALL, CALL.replace("_msa", "")),
    ),
    "another helper at module scope": (
        "0.33.0",
        (IMPORT, ""),
        (TO_MODULE[0], TO_MODULE[1].replace("_msa", "")),
        (CALL, CALL.replace("_msa", "")),
    ),
    "PCIe IPC, and what it returns is read": (NIGHTLY, (NIGHTLY_IPC, f"    worker.tuned = {NIGHTLY_IPC.lstrip()}")),
    "PCIe IPC below its gate, and what it returns is read": (
        "0.33.0",
        (IPC_CALL, f"        worker.tuned = {IPC_CALL.lstrip()}"),
    ),
    "PCIe IPC in a table": (
        NIGHTLY,
        (NIGHTLY_IPC, "    for f in (warmup_flashinfer_pcie_ipc_allreduce,):\n        f(worker)\n"),
    ),
}


@pytest.mark.unit
@pytest.mark.parametrize("case", UNKNOWN)
def test_a_use_that_may_not_be_left_out_is_not_gated(case):
    release, *edits = UNKNOWN[case]
    assert verdict(forked(release, *edits)).kind == "unknown"


@pytest.mark.unit
def test_a_helper_that_only_cuda_imports_is_left_alone():
    import_, call = (text.replace("_msa", "") for text in (IMPORT, CALL))
    on_cuda = "    if current_platform.is_cuda():\n" + textwrap.indent(import_ + call, "    ")
    fork = forked("0.33.0", (IMPORT, ""), (CALL, on_cuda))
    typed = fork.replace("if TYPE_CHECKING:\n", "if TYPE_CHECKING:\n    from vllm.models.minimax_m3 import Model\n")
    for text in (fork, typed):
        assert "MiniMax" not in verdict(text).reason
        assert mend(text, "fork.py", [kernel_warmup.PATCH]).outcomes[0].applied


CONDITIONS = {
    "one more": "    if enable_jit_warmup and envs.VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC:",
    "an exception": "    if envs.VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC and (not worker.use_v2_model_runner):",
    "turned round": "    if not envs.VLLM_NO_FLASHINFER_PCIE_IPC:",
    "of the worker": "    if worker.VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC:",
}


@pytest.mark.unit
@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_condition_of_a_fork_stays(condition):
    fork = forked("0.33.0", (IPC.rstrip("\n"), CONDITIONS[condition]))
    mended = ast.unparse(mend(fork, "fork.py", [kernel_warmup.PATCH]).tree)
    assert f"{CONDITIONS[condition]}\n" in mended
    assert f"        if pcie_ipc_chosen():\n    {IPC_CALL}" in mended


@pytest.mark.unit
@pytest.mark.parametrize(
    "gate",
    [
        "if current_platform.is_cuda():\n    {}",
        "if current_platform.is_cuda() and worker.m3:\n    {}",
        "if current_platform.is_cpu():\n        return\n{}",
        "if not current_platform.is_cuda():\n        return\n{}",
        "if worker.m3:\n        def on_rocm(): return 1\n{}",
    ],
)
def test_an_import_that_is_above_a_forks_own_gate_moves_below_it(gate):
    source = (tree("0.24.0") / "vllm/model_executor/warmup/kernel_warmup.py").read_text()
    call = "    minimax_m3_msa_warmup(worker)\n"
    assert source.count(call) == 1
    done = mend(source.replace(call, f"    {gate.format(call)}"), "m.py", [kernel_warmup.PATCH])
    assert done.outcomes[0].applied, done.outcomes[0]


@pytest.mark.unit
def test_what_else_stands_below_the_gate_is_not_left_out():
    fork = forked("0.33.0", (IPC_CALL, f"{IPC_CALL}        warm_another(worker)\n"))
    mended = ast.unparse(mend(fork, "fork.py", [kernel_warmup.PATCH]).tree)
    assert f"        if pcie_ipc_chosen():\n    {IPC_CALL}        warm_another(worker)\n" in mended
    assert IPC in mended


# The searches for a model's class, which two of the warm-ups begin with

VISION = "vllm.model_executor.models.qwen3_vl"
QWEN = f"    from {VISION} import Qwen3_VisionTransformer\n"
HEAD = "def _warm_vision(model: torch.nn.Module, device: torch.device) -> None:\n"
SEARCH = f"""{HEAD}{QWEN}
    for visual in model.modules():
        if not isinstance(visual, Qwen3_VisionTransformer):
            continue
"""
LISTED = f"""def _towers(model):
{QWEN}
    return [m for m in model.modules() if isinstance(m, Qwen3_VisionTransformer)]


{HEAD}    for visual in _towers(model):
"""
WARMS = "    _warm_vision(model, runner.device)\n"
INLINED = f"""{QWEN}
    for visual in model.modules():
        if isinstance(visual, Qwen3_VisionTransformer):
            _warm_vision(visual, runner.device)
"""


def searched(*edits):
    return forked("0.33.0", *edits, file="qwen_vl_triton_warmup.py")


def functions(text, **names):
    """The functions of a module that may be imported nowhere, with what they read."""
    body = [s for s in ast.parse(text).body if isinstance(s, ast.FunctionDef)]
    for function in body:
        function.decorator_list = []
    code = compile(ast.Module(body, []), "fork.py", "exec", __future__.annotations.compiler_flag)
    exec(code, names)
    return names


def mended_search(text, patch=QWEN_VL):
    done = mend(text, "fork.py", [patch])
    assert done.outcomes[0].applied, done.outcomes[0]
    mended = ast.unparse(done.tree)
    assert patch.examine(ast.parse(mended)).kind == "clear"
    return mended


class _Tower:
    """What stands for a model, and for its vision tower."""

    def modules(self):
        return [self]


@pytest.mark.unit
def test_a_search_that_returns_what_it_found_returns_nothing_found(monkeypatch):
    made = functions(mended_search(searched((SEARCH, LISTED))))
    model = _Tower()
    monkeypatch.delitem(sys.modules, VISION, raising=False)
    assert made["_towers"](model) == []
    monkeypatch.setitem(sys.modules, VISION, types.ModuleType(VISION))
    assert made["_towers"](model) == []
    monkeypatch.setattr(sys.modules[VISION], "Qwen3_VisionTransformer", _Tower, raising=False)
    assert made["_towers"](model) == [model]


@pytest.mark.unit
def test_what_follows_a_search_goes_on(monkeypatch):
    monkeypatch.delitem(sys.modules, VISION, raising=False)
    made = functions(mended_search(searched((SEARCH, f"{HEAD}    for visual in [model]:\n"), (WARMS, INLINED))))
    warmed = []
    made |= {"_warm_mrope": lambda runner, model: warmed.append(model), "_synchronize_device": warmed.append}
    made["qwen_vl_triton_warmup"](types.SimpleNamespace(get_model=_Tower, device="cpu"))
    assert len(warmed) == 2


STEP = "isinstance(impl, Step5DSAAttentionImpl)"


@pytest.mark.unit
def test_which_searches_are_known():
    asked = "isinstance(visual, Qwen3_VisionTransformer)"
    mended_search(searched((asked, "isinstance(visual, (int, (Qwen3_VisionTransformer, str)))")))
    mended_search(searched((QWEN, QWEN.replace("\n", " as Tower\n")), (asked, "isinstance(visual, Tower)")))
    mended_search(forked("0.33.0", (STEP, f"{STEP} and impl.adapter"), file="step5_dsa_warmup.py"), STEP5)
    for other in (
        "isinstance(Qwen3_VisionTransformer, type)",
        "isinstance(visual, Qwen3_VisionTransformer | int)",
        "isinstance(visual, kinds(Qwen3_VisionTransformer))",
        "isinstance(visual, Qwen3_VisionTransformer.Base)",
    ):
        assert QWEN_VL.examine(ast.parse(searched((asked, other)))).kind == "unknown", other


@pytest.mark.unit
@pytest.mark.parametrize(
    "asks", ["{!r} not in sys.modules", "sys.modules.get({!r}) is None", "not sys.modules.get({!r})"]
)
def test_a_search_that_returns_where_the_file_is_not_loaded_is_left_alone(asks):
    for file, then, kind in (
        (VISION, "return", "clear"),
        (VISION, "logger.debug('not loaded')", "needed"),
        ("vllm.another", "return", "needed"),
    ):
        fork = searched((QWEN, f"    if {asks.format(file)}:\n        {then}\n{QWEN}"))
        assert QWEN_VL.examine(ast.parse(fork)).kind == kind, then
