"""TopKTopPSampler on stock releases: what AITER does to it, without us and with us, in really sampled tokens."""

import ast
import functools
import importlib
import sys
import threading
import types

import pytest
from on_node import DOORS, FAILURES, RELEASES, report
from packaging.version import Version
from releases import NIGHTLIES, releases, tree

from vllm_rocm_fixes.mend import mend
from vllm_rocm_fixes.patches import sampler
from vllm_rocm_fixes.patches.sampler import PATCH
from vllm_rocm_fixes.syntax import function

MENDED = [(release, side) for release in RELEASES for side in ("live", "import")] + [(r, "doors") for r in DOORS]
each_side = pytest.mark.parametrize(("release", "side"), MENDED)

# Read off stock: when it imports, when it uses AITER's sampler at all, and which failures it survives.
EAGER = [r for r in RELEASES if Version(r) < Version("0.24.0")]
UNUSED = [r for r in RELEASES if Version(r) < Version("0.23.0")]
ENDED_BY_IMPORT = {r: set(FAILURES) - {"ImportError"} for r in RELEASES} | {"0.33.0": {"SystemExit"}}
ENDED_BY_CALL = {r: set() if r in UNUSED else set(FAILURES) for r in RELEASES} | {"0.33.0": {"KeyError", "SystemExit"}}


def stock(release):
    return report(release, "stock")


def answers(done):
    """What the caller gets and finds afterwards, without what AITER did for it."""
    return {name: value for name, value in done.items() if name != "events"}


@each_side
def test_the_patch_is_applied(release, side):
    state, reason = report(release, side)["states"]["sampler"]
    assert state == "applied"
    assert ("live" in reason) == (side == "live")
    assert ("making a sampler" in reason) == (release in EAGER)


@each_side
def test_making_a_sampler_imports_nothing(release, side):
    assert bool(stock(release)["requests"]["made"]) == (release in EAGER)
    assert report(release, side)["requests"]["made"] == []


@each_side
def test_answers_and_seeds_are_those_of_stock(release, side):
    without, with_us = stock(release)["requests"], report(release, side)["requests"]
    assert without["signature"] == with_us["signature"]
    kinds = [kind for kind, done in without.items() if isinstance(done, dict) and "tokens" in done]
    assert len(kinds) >= 11
    for kind in kinds:
        assert answers(with_us[kind]) == answers(without[kind]), kind


@each_side
def test_aiter_is_imported_by_the_first_request_that_can_use_it(release, side):
    done = report(release, side)["requests"]
    for kind in ("none", "generators", "all generators", "processed_logits", "processed_logprobs", "fp64"):
        assert done.get(kind, {"events": []})["events"] == [], kind
    used = [f"{filters} {batch}" for filters in ("k", "p", "kp") for batch in (1, 5)]
    calls = {kind: [e for e in done[kind]["events"] if e.startswith("call")] for kind in used}
    assert calls == {
        kind: [e for e in stock(release)["requests"][kind]["events"] if e.startswith("call")] for kind in used
    }
    assert all(len(c) == (release not in UNUSED) for c in calls.values())
    imported = [kind for kind in used if "import aiter.ops.sampling" in done[kind]["events"]]
    assert imported == ([] if release in UNUSED else ["k 1"])


def survived(done, how):
    """A failure cost no request: native answers from the first on, once said, with no second try."""
    assert done["raised"] is None, how
    for request in ("first", "second", "past"):
        assert answers(done[request]) == answers(done["native"]), (how, request)
    assert done["later"] == []
    return True


@each_side
@pytest.mark.parametrize("how", FAILURES)
def test_a_failed_import_costs_no_request(release, side, how):
    without = stock(release)["failed_imports"][how]
    assert without["raised"] == (how if how in ENDED_BY_IMPORT[release] else None)
    done = report(release, side)["failed_imports"][how]
    assert survived(done, how)
    if release in UNUSED:
        assert (done["events"], done["said"]) == ([], [])
        return
    assert "import aiter.ops.sampling" in done["first"]["events"]
    assert done["stays native"]
    [(level, said)] = done["said"]
    assert level == "WARNING" and how in said and "import" in said


@each_side
@pytest.mark.parametrize("how", FAILURES)
@pytest.mark.parametrize("when", ["failed calls", "failed later"])
def test_a_failed_kernel_costs_no_request(release, side, how, when):
    """The first call, or one after a request that AITER had answered."""
    without = stock(release)["requests"][when][how]
    assert without["raised"] == (how if how in ENDED_BY_CALL[release] else None)
    done = report(release, side)["requests"][when][how]
    assert survived(done, how)
    if release in UNUSED:
        assert (done["events"], done["said"]) == ([], [])
        return
    calls = ["call aiter.ops.sampling.top_k_top_p_sampling_from_probs"]
    assert done["events"] == (calls if when == "failed calls" else 2 * calls)
    assert done["stays native"]
    [(level, said)] = done["said"]
    assert level == "WARNING" and how in said and "kernel" in said


@each_side
def test_native_gets_the_logits_that_a_failed_kernel_got(release, side):
    assert (stock(release)["requests"]["spoilt"]["raised"] is None) == (release in [*UNUSED, "0.33.0"])
    assert survived(report(release, side)["requests"]["spoilt"], "spoilt")


@each_side
def test_what_stops_the_process_still_stops_it(release, side):
    done = report(release, side)
    wanted = None if release in UNUSED else "KeyboardInterrupt"
    assert done["failed_imports"]["KeyboardInterrupt"]["raised"] == wanted
    assert done["requests"]["failed calls"]["KeyboardInterrupt"]["raised"] == wanted
    assert done["requests"]["failed later"]["KeyboardInterrupt"]["raised"] == wanted
    wanted = None if release in UNUSED else "SystemExit"
    assert done["failed_imports"]["signal"]["raised"] == wanted
    assert done["requests"]["signal"]["raised"] == wanted


@each_side
def test_the_switch_turns_off_the_sampler_alone(release, side):
    assert bool(stock(release)["switched_off"]["events"])
    done = report(release, side)["switched_off"]
    assert survived(done, "off")
    assert done["events"] == []
    if release not in UNUSED:
        assert done["stays native"]
        [(level, said)] = done["said"]
        assert level == "INFO" and "ROCM_FIXES_AITER_SAMPLER" in said


@pytest.mark.parametrize("side", ["live", "import", "doors"])
def test_the_kernel_of_gfx1250(side):
    without, done = stock("0.33.0")["requests"]["gfx1250"], report("0.33.0", side)["requests"]["gfx1250"]
    assert answers(done["fine"]["first"]) == answers(without["fine"]["first"])
    assert not done["fine"]["said"] and not done["fine"]["stays native"]
    assert without["broken"]["raised"] == "SystemExit"
    broken = done["broken"]
    assert broken["raised"] is None and broken["stays native"] and len(broken["said"]) == 1
    seeded = slice(1, 3)  # the rows with a seed of their own
    assert broken["first"]["tokens"][seeded] == broken["native"]["tokens"][seeded]


# The verdict, on every release


@functools.cache
def source(release):
    return (tree(release) / (PATCH.module.replace(".", "/") + ".py")).read_text()


def verdict(text):
    return PATCH.examine(ast.parse(text))


@pytest.mark.unit
@pytest.mark.parametrize("release", [*releases(), *NIGHTLIES])
def test_every_release_is_needed_and_mended_once(release):
    assert Version(release) >= Version(PATCH.since) and PATCH.until is None
    mended = mend(source(release), "sampler.py", [PATCH])
    assert mended.outcomes[0].verdict.kind == "needed" and mended.outcomes[0].applied
    eager = "making a sampler" in mended.outcomes[0].verdict.reason
    assert eager == (Version(release) < Version("0.24.0"))
    again = ast.unparse(mended.tree)
    assert verdict(again).kind == "clear"
    assert mend(again, "sampler.py", [PATCH]).code is None
    before, after = ast.unparse(ast.parse(source(release))).splitlines(), again.splitlines()
    touched = {line.strip() for line in before} ^ {line.strip() for line in after}
    assert len(touched) <= 14 and not any(line.startswith(("def ", "class ")) for line in touched)


CAUGHT = "(ImportError, OSError, RuntimeError, CalledProcessError)"
HANDLER = f"except {CAUGHT} as err:\n"
FORKS = {
    "a handler that counts": ("0.33.0", HANDLER, f"{HANDLER}            self.fallbacks += 1\n"),
    "a handler that raises some again": (
        "0.33.0",
        HANDLER,
        f"{HANDLER}            if 'HIP error' in str(err):\n                raise\n",
    ),
    "a second handler": ("0.33.0", HANDLER, f"except torch.OutOfMemoryError:\n            raise\n        {HANDLER}"),
    "a module from elsewhere": (
        "0.33.0",
        "self.aiter_ops = None",
        "self.aiter_ops = rocm_aiter_ops.load_sampling_ops()",
    ),
    "torch.ops.aiter, not imported": ("0.24.0", "self.aiter_ops = None", "self.aiter_ops = torch.ops.aiter"),
    "another module in the same try": ("0.23.0", "self.aiter_ops = torch.ops.aiter", "self.aiter_ops = vendor.aiter"),
    "the call alone survives SystemExit": ("0.33.0", CAUGHT, "(Exception, SystemExit)"),
    "AITER under another name": ("0.33.0", "aiter", "vendor"),
    "the class renamed": ("0.33.0", "class TopKTopPSampler(", "class VendorSampler("),
    "forward_hip renamed": ("0.23.0", "def forward_hip(", "def forward_rocm("),
    "another import in __init__": ("0.23.0", "import aiter.ops.sampling", "from aiter.ops import sampling"),
    "an import at module scope": ("0.33.0", "import torch\n", "import torch\nimport aiter\n"),
    "a gate of the fork's in the loader": (
        "0.24.0",
        "    def _init_aiter_ops(self) -> bool:\n",
        "    def _init_aiter_ops(self) -> bool:\n        if on_gfx942():\n            return False\n",
    ),
    "a loader that does more": (
        "0.26.0",
        "            return False\n        self.aiter_ops",
        "            count_it()\n            return False\n        self.aiter_ops",
    ),
    "another caller": (
        "0.24.0",
        "def forward_native(",
        "def forward_more(self):\n        self.aiter_sample()\n\n    def forward_native(",
    ),
    "another call": (
        "0.27.1",
        "return self.aiter_sample(logits, k, p, generators), None",
        "return self.aiter_sample(logits, p, k, generators), None",
    ),
    "another importer": (
        "0.33.0",
        "from aiter import mixed",
        "from aiter.fork import mixed_x\n    from aiter import mixed",
    ),
}


@pytest.mark.unit
@pytest.mark.parametrize("skip", ["", "hip", "hip,aiter_locks"])
def test_the_guard_of_lock_files_watches_a_first_call_where_it_is_not_skipped(monkeypatch, skip):
    importlib.import_module("vllm_rocm_fixes.guards")
    monkeypatch.setenv("ROCM_FIXES_SKIP", skip)
    monkeypatch.setattr(sampler, "_first", [True])

    def threads(*_):
        return sum(t.name == "rocm-fixes-aiter-locks" for t in threading.enumerate())

    seen = [sampler.answer(types.SimpleNamespace(), None, {}, None, None, kernel=threads)[0] for _ in range(2)]
    assert seen == [int("aiter_locks" not in skip), 0]


@pytest.mark.unit
@pytest.mark.parametrize("fork", FORKS)
def test_a_shape_that_is_not_known_is_left_alone(fork):
    release, old, new = FORKS[fork]
    assert old in source(release)
    changed = source(release).replace(old, new)
    mended = mend(changed, "sampler.py", [PATCH])
    assert mended.outcomes[0].verdict.kind == "unknown", mended.outcomes[0].verdict
    assert mended.code is None


@pytest.mark.unit
def test_the_other_kernels_answer_says_nothing_of_aiter_sample(monkeypatch):
    """It doesn't load what that needs: the next request of aiter_sample's goes through answer() too."""
    for name in ("aiter", "aiter.ops", "aiter.ops.sampling"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    ours = types.SimpleNamespace(aiter_sample=lambda *_: "tokens")
    assert sampler.answer(ours, None, {}, None, None, kernel=lambda *_: "other") == ("other", None)
    assert not ours._rocm_fixes_served and not hasattr(ours, "aiter_ops")
    assert sampler.answer(ours, None, {}, None, None) == ("tokens", None)
    assert ours._rocm_fixes_served and ours.aiter_ops is not None


@pytest.mark.unit
def test_a_handler_that_raises_again_catches_nothing():
    fixed = source("0.33.0").replace(
        "except Exception as err:\n            # The", "except BaseException as err:  # The"
    )
    fixed = fixed.replace("return _aiter_temp_gumbel_sample(logits, generators), None", "return None")
    assert HANDLER in fixed and verdict(fixed.replace(HANDLER, "except BaseException as err:\n")).kind == "clear"
    raising = "except BaseException as err:\n            raise\n"
    assert verdict(fixed.replace(HANDLER, raising)).kind == "unknown"


@pytest.mark.unit
def test_stocks_import_stays_where_stocks_call_does():
    """gfx1250's kernel alone is mended where import and call of the other survive everything."""
    fixed = source("0.33.0").replace(
        "except Exception as err:\n            # The", "except BaseException as err:  # The"
    )
    mended = mend(fixed.replace(CAUGHT, "(Exception, SystemExit)"), "sampler.py", [PATCH])
    assert mended.outcomes[0].applied, mended.outcomes[0]
    hip = ast.unparse(function(mended.tree, "TopKTopPSampler.forward_hip"))
    assert "kernel=_aiter_temp_gumbel_sample" in hip and "not self._init_aiter_ops()" in hip


@pytest.mark.unit
def test_a_release_that_catches_everything_is_clear():
    fixed = source("0.33.0")
    for old, new in {
        "except Exception as err:\n            # The import": "except BaseException as err:\n            # The import",
        f"except {CAUGHT} as err:": "except (Exception, SystemExit) as err:",
        "return _aiter_temp_gumbel_sample(logits, generators), None": "return None",
    }.items():
        assert old in fixed
        half, fixed = fixed, fixed.replace(old, new)
        assert verdict(half).kind == "needed"
    assert verdict(fixed).kind == "clear"
