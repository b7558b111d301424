"""Fixes that look right and do harm: what upstream's own attempts and the obvious backports broke, and who watches.

A trap, and the tests that fail where a patch falls into it. Those of this file stand without the file's name.

The fused qk-rmsnorm question (#47992)
- "AITER is enabled" for an answer, as 0.27.0 has it: an MLA model on an AITER without the kernel fails at run time.
    test_an_mla_model_on_an_old_aiter_is_configured_as_on_stock
    test_aiter_ops.py::test_configuration_and_pass_manager_get_stocks_answer
- 0.20 and 0.21 know one of the kernel's two names, and their kernel call does too.
    test_aiter_ops.py::test_configuration_and_pass_manager_get_stocks_answer
- The same function guards the worker from 0.22.0 to 0.26.0: the pass manager must get stock's answer too.
    test_aiter_ops.py::test_configuration_and_pass_manager_get_stocks_answer
- The optimisation levels hold the configuration's function: whoever replaces that one reaches nobody.
    test_an_mla_model_on_an_old_aiter_is_configured_as_on_stock
    test_live.py::test_every_holder_follows
- From 0.27.0 on there is nothing to mend.
    test_aiter_ops.py::test_needed_from_since_to_until
- It is one of three calls that lose fork; the others are mended too, and spawn isn't forced on anybody.
    test_regressions.py::test_a_model_registered_in_the_parent_is_known_in_a_child

Late imports of expert-parallel back ends (#50879, taken back by #51176)
- Without the guard they bring back #51151 from 0.20.0 to 0.27.1.
    test_all2all_utils.py::test_refused_without_the_guard_where_tilelang_gets_in_first
    test_all2all_utils.py::test_without_the_guard_the_imports_stay_early
    test_all2all_utils.py::test_refused_where_nothing_can_be_read
- The guard is switched off when the module is mended already, as over Ray.
    test_all2all_utils.py::test_a_guard_that_is_switched_off_too_late_stays
    test_process.py::test_a_guard_that_an_applied_patch_needs_stays
- A baked vLLM and a printed series have no guard.
    test_bake.py::test_baked_files_have_the_tree_of_the_import_way_and_come_back_to_the_byte
    test_diff.py::test_a_series_gives_the_fixes_without_the_overlay
- A chosen back end isn't used any more, or its names can't be imported any more.
    test_all2all_utils.py::TestOnTheNode::test_chosen
    test_all2all_utils.py::TestOnTheNode::test_names
    test_all2all_utils.py::test_what_vllm_asks_of_the_module_is_still_there
- Mori protected a process by an annotation that was evaluated: an edit must not put evaluation off.
    test_annotations_are_evaluated_where_stock_evaluates_them

Probes that don't import (#51162, #54100)
- The spec alone says yes to a package whose libraries don't load.
    test_import_utils.py::TestOnTheNode::test_answers
- A package that is there and works counts as absent: a slow one, one that this process alone can find, one that stock
  would find where no child can be started.
    test_a_slow_package_is_found
    test_a_package_that_this_process_alone_can_find_is_found
    test_import_utils.py::TestOnTheNode::test_forks
    test_trial.py::test_no_child_no_answer
- has_* are taken by value, and their answers are kept.
    test_import_utils.py::TestOnTheNode::test_functions_held_from_before

The HIP runtime before TileLang's stub (#51151, AITER #4585)
- Promoting it after TileLang changes nothing; that it helped must not be claimed.
    test_guard_hip.py::test_load_order
    test_guard_hip.py::test_too_late_is_said_once_with_what_still_helps
- A runtime that is opened by a path of our own may be a second one.
    test_guard_hip.py::test_stub_that_would_load_a_second_runtime
    test_guard_hip.py::test_several_runtimes
    test_guard_hip.py::test_runtime_whose_file_is_gone
- The stub has another file name from 0.1.12 on, and 0.1.14 repairs one lookup and not the order.
    test_guard_hip.py::test_load_order
    test_guard_hip.py::test_heal_leaves_alone_what_it_does_not_know
- Wheels have no Mori: the guard must do without.
    test_guard_hip.py::test_real_import_keeps_torchs_runtime_first

PYTHONPATH (#44823)
- AITER never imported TileLang: making the sampler late keeps no PYTHONPATH clean.
    test_guard_pythonpath.py::test_everything_is_as_it_was
    test_regressions.py::test_a_child_of_a_process_that_imported_tilelang_is_clean
- What only looks like TileLang's folder is dropped too.
    test_tests_utils.py::test_nothing_but_that_folder_is_removed
- A sampler that is made holds its forward already.
    test_sampler.py::test_aiter_is_imported_by_the_first_request_that_can_use_it
- A fork catches what the kernel raises itself: its own import is still needed there.
    test_sampler.py::test_stocks_import_stays_where_stocks_call_does
- Up to 0.22.1 AITER's sampler is never used, and from 0.23.0 on it is: neither changes by default.
    test_sampler.py::test_answers_and_seeds_are_those_of_stock
    test_sampler.py::test_the_switch_turns_off_the_sampler_alone

Elsewhere
- kernel_warmup: a helper that is needed doesn't run any more, or its name is gone.
    test_kernel_warmup.py::test_pcie_ipc_is_warmed_up_where_the_communicator_chose_it
    test_kernel_warmup.py::test_names_that_others_import_still_resolve
- Quark: names that others import.
    test_quark.py::test_aiter_is_imported_when_a_kernel_is_needed
- amdsmi's number for the memory of an APU is what the BIOS set aside (#46141 on Strix Halo).
    test_platform_memory.py::test_an_apu_gets_what_the_driver_gives
    test_platform_memory.py::test_where_the_driver_does_not_tell_it_is_as_in_stock
- A lock file of AITER's that is removed under a build.
    test_guard_aiter_locks.py::test_a_stale_lock_is_named_where_stock_hangs_in_silence
    test_guard_aiter_locks.py::test_a_build_of_another_process_is_named_and_waited_for
- A flash-attention, a TileLang or a Quark that works counts as absent.
    test_fa_utils.py::test_it_is_imported_when_it_is_asked_for
    test_guard_pair.py::test_stock_and_ours
- A late tilelang.jit without a kernel's attributes (#57192).
    test_tilelang_jit.py::test_a_late_kernel_has_a_kernels_attributes

The plugin
- vLLM calls a plugin unguarded: what it raises ends the process.
    test_process.py::test_the_real_doors_return_none_whatever_happens
- Unknown names that begin with VLLM_ are refused in strict mode; switches must reach Ray's workers.
    test_ray.py::test_the_switches_reach_them_by_the_names_that_the_platform_hands_on
- A vLLM that another overlay has touched is overwritten.
    test_anothers_functions_stay
    test_anothers_file_stays
    test_process.py::test_somebody_elses_function_is_left_alone_and_reported
    test_live.py::test_a_function_that_is_not_stocks_is_left_alone
    test_live.py::test_somebody_elses_function_in_a_branch_is_not_taken_for_one_that_never_ran
- Hooks that another tool calls after an import are lost.
    test_importing.py::test_beside_a_tool_that_calls_hooks_after_an_import
"""

from __future__ import annotations
import __future__

import ast
import functools
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from releases import tree

OLD_AITERS = {"0.20.2": "0.1.10", "0.21.0": "0.1.16"}  # without the name that the release knows


# The list above


@pytest.mark.unit
def test_every_test_that_is_named_is_there():
    named = re.findall(r"^    (?:(test_\w+\.py)::)?(?:(\w+)::)?(test_\w+)$", __doc__, re.MULTILINE)
    assert len(named) > 40
    for file, group, name in named:
        found = ast.parse((Path(__file__).parent / (file or Path(__file__).name)).read_bytes()).body
        if group:
            found = next(node.body for node in found if isinstance(node, ast.ClassDef) and node.name == group)
        assert any(isinstance(node, ast.FunctionDef) and node.name == name for node in found), (file, name)


# An MLA model


@functools.cache
def configured(release):
    """How stock, ours and the literal backport configure an MLA model, with an AITER that lacks the kernel."""
    from vllm_rocm_fixes import node

    with tempfile.TemporaryDirectory() as folder:
        aiter = OLD_AITERS[release]
        built = node.build(f"{folder}/node", version=release, vllm=tree(release), aiter=aiter)
        env = {k: v for k, v in os.environ.items() if not k.startswith(("ROCM_FIXES", "VLLM_"))}
        env = built.environment(env, VLLM_PLUGINS="", HOME=folder)
        command = [sys.executable, __file__, folder]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=540)
        answer = Path(folder, "answer.json")
        assert done.returncode == 0 and answer.exists(), f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        return json.loads(answer.read_text())


@pytest.mark.parametrize("release", OLD_AITERS)
def test_an_mla_model_on_an_old_aiter_is_configured_as_on_stock(release):
    sides = configured(release)
    stock, ours, backport = (sides[side] for side in ("stock", "ours", "backport"))
    assert stock["mla"] and ours["config"] == stock["config"]
    assert (stock["fused"], ours["fused"]) == (False, False)
    assert "import aiter" in stock["imports"] and ours["imports"] == []
    # The trap itself: it is what this test would see.
    assert backport["fused"] is True and backport["config"] != stock["config"]


def main(folder: str) -> None:
    import torch
    from on_node import in_fork
    from rocm_standin import models

    torch.set_num_threads(1)
    importlib.import_module("vllm.engine.arg_utils")
    Path(folder, "models").mkdir()
    models.make(Path(folder, "models"))
    sides = {side: in_fork(configure, side, f"{folder}/models/mla") for side in ("stock", "ours", "backport")}
    Path(folder, "answer.json").write_text(json.dumps(sides))


def configure(side: str, model: str) -> dict:
    from on_node import events
    from vllm.engine.arg_utils import EngineArgs

    if side == "ours":
        overlay = importlib.import_module("vllm_rocm_fixes")
        overlay.prepare()
        overlay.register()
    if side == "backport":
        importlib.import_module("vllm._aiter_ops").check_aiter_fused_qk_rmsnorm = lambda: True
    before = len(events())
    args = EngineArgs(model=model, max_model_len=256, skip_tokenizer_init=True, enable_prefix_caching=False)
    config = args.create_engine_config()
    return {
        "mla": config.model_config.use_mla,
        "fused": config.compilation_config.pass_config.fuse_mla_dual_rms_norm,
        "config": str(config).replace(config.instance_id, ""),
        "imports": events()[before:],
    }


# Annotations


@pytest.mark.unit
@pytest.mark.parametrize("release", ["0.14.1", "0.20.2", "0.23.0", "0.27.1", "0.33.0"])
def test_annotations_are_evaluated_where_stock_evaluates_them(release):
    """The overlay's own `from __future__ import annotations` must not reach the code that it compiles."""
    from vllm_rocm_fixes.installed import path_of
    from vllm_rocm_fixes.mend import mend
    from vllm_rocm_fixes.patches import SERIES

    flags = functools.reduce(int.__or__, (getattr(__future__, n).compiler_flag for n in __future__.all_feature_names))
    seen = 0
    for module in dict.fromkeys(patch.module for patch in SERIES):
        path = path_of(tree(release), module)
        mended = path and mend(path.read_bytes(), str(path), [p for p in SERIES if p.module == module])
        if mended and mended.code:
            stock = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
            assert mended.code.co_flags & flags == stock.co_flags & flags, module
            assert not any(code.co_flags & flags for code in mended.added.values()), module
            seen += 1
    assert seen > 3


# Packages that work


@pytest.mark.unit
def test_a_slow_package_is_found(tmp_path, monkeypatch, caplog):
    from vllm_rocm_fixes import trial
    from vllm_rocm_fixes.patches.import_utils import answer

    (tmp_path / "slow_package.py").write_text("import time\ntime.sleep(1)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(trial, "_PATIENCE", 0.2)
    begun = time.monotonic()
    assert answer("slow_package") is True and time.monotonic() - begun > 1
    assert [r.getMessage().partition(" in ")[0] for r in caplog.records] == ["The import of slow_package"]


@pytest.fixture
def place(tmp_path):
    from shelves import shelf

    return shelf(tmp_path / "shelf")


def started(code, *places, **environ):
    """The facts of a child of vLLM's, with what the code put into `more`."""
    from shelves import environment, run

    return run(f"more = None\n{code}\nprint(json.dumps([facts(), more]))\n", environment(*places, **environ))


@pytest.mark.unit
def test_a_package_that_this_process_alone_can_find_is_found(place):
    code = """
import importlib.util
class Theirs:
    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_loader(name, self) if name == "only_here" else None
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        pass
sys.meta_path.append(Theirs())
start()
import vllm.utils.import_utils as target
more = target._has_module("only_here")
"""
    facts, found = started(code, place)
    assert found is True and facts["mended"]


# Other overlays


@pytest.mark.unit
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["has_mori", "_has_module"])
def test_anothers_functions_stay(place, name, when):
    """Somebody replaces functions of stock's, as ROCm/ATOM does; whoever came first or last, theirs are called."""
    theirs = f"target.{name} = theirs"
    code = f"""
import functools, vllm.utils.import_utils as target
@functools.cache
def theirs(*names):
    return "theirs"
{theirs if when == "before" else ""}
start()
{theirs if when == "after" else ""}
state = sys.modules["vllm_rocm_fixes"].current().results["import_utils"]
said = [text for level, text in said if text.startswith("import_utils: ")]
print(json.dumps([target.has_mori(), target.{name} is theirs, state.state, said]))
"""
    from shelves import environment, run

    answer, kept, state, warnings = run(code, environment(place))
    assert (answer, kept) == ("theirs", True)
    if (name, when) == ("_has_module", "before"):
        assert state == "failed" and len(warnings) == 1
        assert "_has_module isn't stock's any more: something else changed it first" in warnings[0]
        assert warnings[0].endswith("stock is kept")
    else:
        assert (state, warnings) == ("applied", [])


FILES = {
    # what their copy of the file has in place of stock's, and whether it is mended
    "more in it": (None, "\n\ndef theirs():\n    return 'theirs'\n", True),
    "another probe": ("def _has_module(", "def theirs():\n    return 'theirs'\n\n\ndef _has_package(", False),
    "a probe of their own": (
        "importlib.util.find_spec(module_name)",
        "theirs() and importlib.metadata.version(module_name)",
        False,
    ),
}


@pytest.mark.unit
@pytest.mark.parametrize("how", ["in the place of stock's", "by a finder"])
@pytest.mark.parametrize("what", FILES)
def test_anothers_file_stays(place, tmp_path, what, how):
    """A fork's module, or one that a finder of theirs puts in stock's place: what they wrote is what runs."""
    old, new, mended = FILES[what]
    stock = place / "vllm/utils/import_utils.py"
    text = stock.read_text()
    text = text + new if old is None else text.replace(old, new)
    if what == "a probe of their own":
        text += "\n\ndef theirs():\n    return 'theirs'\n"
    assert text != stock.read_text()
    theirs = tmp_path / "theirs.py"
    (stock if how.startswith("in") else theirs).write_text(text)
    code = f"""
import importlib.util
class Theirs:
    def find_spec(self, name, path=None, target=None):
        if name == "vllm.utils.import_utils" and {how == "by a finder"}:
            return importlib.util.spec_from_file_location(name, {str(theirs)!r})
sys.meta_path.insert(0, Theirs())
start()
import vllm.utils.import_utils as target
state = sys.modules["vllm_rocm_fixes"].current().results["import_utils"]
probe = getattr(target, "_has_module", None)
names = probe.__wrapped__.__code__.co_names if probe else []
warnings = [text for level, text in said if text.startswith("import_utils: ")]
print(json.dumps([target.theirs(), target.__file__, state.state, "answer" in names, warnings]))
"""
    from shelves import environment, run

    said, file, state, is_mended, warnings = run(code, environment(place))
    assert (said, file) == ("theirs", str(stock if how.startswith("in") else theirs))
    assert is_mended == mended and state == ("applied" if mended else "unknown")
    assert bool(warnings) != mended and all(w.startswith("import_utils: unknown, ") for w in warnings)


if __name__ == "__main__":
    main(sys.argv[1])
