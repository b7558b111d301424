"""`vllm-rocm-fixes verify`: real starts of stock vLLM, without and with the overlay, and what it says of a claim."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import types

import pytest
from releases import tree

from vllm_rocm_fixes import behaviour, importing, node
from vllm_rocm_fixes.cli import verify
from vllm_rocm_fixes.patch import Result, Site
from vllm_rocm_fixes.patches import SERIES
from vllm_rocm_fixes.process import Process
from vllm_rocm_fixes.start import STEPS

VERIFY = [sys.executable, "-m", "vllm_rocm_fixes", "verify", "--json"]
_RUNS = {
    "stand-in": (["--vllm", "0.23.0", "--step", "sampler", "--step", "all2all_utils"], {}),
    "skipped": (["--vllm", "0.23.0", "--step", "sampler"], {"ROCM_FIXES_SKIP": "sampler"}),
    "real": (["--real", "--step", "config dense"], {}),
}


@functools.cache
def run(name):
    """The exit status and the report of one of the runs; each takes a minute of a processor."""
    arguments, extra = _RUNS[name]
    arguments = [str(tree(a)) if a == "0.23.0" else a for a in arguments]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("ROCM_FIXES", "VLLM_"))}
    env |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", **extra}
    done = subprocess.run([*VERIFY, *arguments], env=env, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def what(report, side, step):
    return {seen["what"] for seen in report[side]["seen"].get(step, ())}


def test_a_start_without_and_with_the_overlay():
    status, report = run("stand-in")
    assert report["vllm"]["version"] == "0.23.0" and not report["real"]
    assert "aiter" in what(report, "without", "sampler") and "mori" in what(report, "without", "all2all_utils")
    assert what(report, "with", "sampler") == what(report, "with", "all2all_utils") == set()
    assert set(report["with"]["outcomes"].values()) == {"ok"}
    [aiter] = [s for s in report["without"]["seen"]["sampler"] if s["what"] == "aiter"]
    assert aiter["by"].startswith("vllm/v1/sample/ops/topk_topp_sampler.py:") and len(aiter["chain"]) >= 1
    applied = {name for name, patch in report["patches"].items() if patch["state"] == "applied"}
    assert {"sampler", "aiter_ops", "all2all_utils", "import_utils"} <= applied
    assert report["wrong"] == [] and status == 0


def test_a_claim_that_is_not_so():
    status, report = run("skipped")
    assert "aiter" in what(report, "with", "sampler")
    [line] = [line for line in report["wrong"] if "aiter" in line]
    assert line.startswith("with the overlay, sampler still imports aiter, in vllm/v1/sample/ops/topk_topp_sampler.py")
    assert status == 1


def test_this_machines_own_platform():
    """The CPU platform of the vLLM that is installed: the same steps, told by the tracer."""
    status, report = run("real")
    assert report["real"] and report["gpu"]["platform"] == "CpuPlatform" and "no AMD GPU" in report["node"]
    assert report["without"]["outcomes"] == report["with"]["outcomes"] == {"vllm.config": "ok", "config dense": "ok"}
    assert report["patches"]["platform_memory"]["note"].startswith("stock can't import its module here either (")
    asked = {name: report["patches"][name]["asked"] for name in ("sampler", "import_utils", "all2all", "fa_utils")}
    assert asked == dict.fromkeys(asked, "yes") | {"fa_utils": "this isn't ROCm, and flash_attn isn't asked for"}
    assert report["unproven"].startswith("Nothing here is proven on an AMD node or with a real /dev/kfd")
    assert report["wrong"] == [] and status == 0


def test_a_module_that_ends_the_process_costs_only_its_own_answer(tmp_path):
    """As a native library does that is loaded twice: nothing of Python's catches that."""
    module = next(patch.module for patch in SERIES if patch.name == "sampler")
    finder = f"""
import os, sys
class Ends:
    def find_spec(self, name, *_):
        if name == "{module}":
            os.abort()
sys.meta_path.insert(0, Ends())
"""
    (tmp_path / "sitecustomize.py").write_text(finder)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("ROCM_FIXES", "VLLM_"))}
    skipped = ",".join(patch.name for patch in SERIES if patch.name not in ("sampler", "import_utils"))
    env |= {"PYTHONPATH": str(tmp_path), "ROCM_FIXES_SKIP": skipped}
    told = verify._patches(env, tmp_path, 300)["patches"]
    said = "stock can't import its module here either (it ends the process, SIGABRT)"
    assert (told["sampler"]["note"], told["sampler"]["wrong"]) == (said, None)
    assert (told["import_utils"]["asked"], told["import_utils"]["wrong"]) == ("yes", None)


def test_lines_for_a_person():
    _, report = run("skipped")
    sides = {side: verify.Side(report[side]["outcomes"], _seen(report[side])) for side in ("without", "with")}
    text = "\n".join(verify._lines({**report, **sides, "cost": {"tilelang": {"seconds": 0.63, "megabytes": 86}}}))
    assert "tilelang 0.63 s and 86 MB" in text and "STEP" in text
    assert "NOT SO: with the overlay, sampler still imports aiter" in text
    assert "Nothing here is proven on an AMD node or with a real /dev/kfd" in text
    [line] = [line for line in text.splitlines() if line.startswith("aiter_ops ")]
    assert line.endswith(" applied, the code in memory is the mended one; its own check passes")


def test_the_behaviour_checks_can_fail(tmp_path):
    """The same checks, in a process of stock vLLM on the stand-in node."""
    built = node.build(tmp_path / "node", version="0.23.0", vllm=tree("0.23.0"))
    code = """
import importlib, json, sys
importlib.import_module("vllm.plugins").load_general_plugins()
from vllm_rocm_fixes.patches import aiter_ops, all2all_utils, sampler
said = {"aiter_ops": aiter_ops.behaves(), "sampler": None}
for name in [name for name in sys.modules if name.split(".")[0] == "aiter"]:
    del sys.modules[name]
said["sampler"] = sampler.behaves()
importlib.import_module(all2all_utils.PATCH.module)
print(json.dumps(said | {"all2all_utils": all2all_utils.behaves()}))
"""
    env = built.environment({k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}, ROCM_FIXES="off")
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "aiter_ops": "check_aiter_fused_qk_rmsnorm imported AITER",
        "sampler": "making a sampler imported AITER",
        "all2all_utils": "mori was imported, and no back end was chosen",
    }


def _seen(side):
    return {
        step: [verify.Seen(**{**s, "chain": tuple(s["chain"])}) for s in seen] for step, seen in side["seen"].items()
    }


@pytest.mark.unit
@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({}, None),
        ({"outcomes": {"sampler": "RuntimeError: no"}}, "with the overlay, sampler fails: RuntimeError: no"),
        ({"outcomes": {}}, "with the overlay, sampler fails: it did not end"),
        ({"seen": {"sampler": [verify.Seen("GPU", "vllm/x.py:1 f", ())]}}, "sampler still asks for the GPU"),
        ({"patches": {"p": {"state": "unknown", "reason": "r", "wrong": None}}}, "p is unknown: r"),
        (
            {"patches": {"p": {"state": "applied", "reason": "r", "wrong": "f runs stock's code"}}},
            "f runs stock's code",
        ),
        ({"doors": []}, "vLLM didn't load the overlay's plugin"),
        ({"gpu": {"works": True, "works_after_tilelang": False}}, "multiplies wrongly after TileLang"),
    ],
)
def test_what_counts_as_wrong(change, line):
    side = verify.Side(change.get("outcomes", {"sampler": "ok"}), change.get("seen", {}))
    report = {"without": verify.Side({"sampler": "ok"}), "with": side, "patches": {}, "doors": ["registered"], **change}
    found = list(verify.wrong(report))
    assert [line in f for f in found] == ([True] if line else [])


@pytest.mark.unit
def test_a_module_that_runs_stock_code_is_found_out(monkeypatch):
    """Real source, loaded as stock and claimed to be applied: the functions in memory tell."""
    name = "vllm.v1.core.sched.utils_of_this_test"
    source = "def asked():\n    return 'stock'\n\n\ndef other():\n    return 1\n"
    module = types.ModuleType(name)
    stock = compile(source, f"{name}.py", "exec", dont_inherit=True)
    exec(stock, vars(module))
    monkeypatch.setitem(sys.modules, name, module)

    import ast

    from vllm_rocm_fixes.patch import Patch, clear, needed

    def edit(tree):
        for constant in ast.walk(tree):
            if isinstance(constant, ast.Constant) and constant.value == "stock":
                constant.value = "mended"

    patch = Patch(
        *("p", name, "s", (), "0.14.0", None),
        examine=lambda tree: needed("it") if "'stock'" in ast.unparse(tree) else clear("it"),
        mend=edit,
    )

    class Source:
        def get_source(self, _):
            return source

    module.__spec__ = importing.importlib.machinery.ModuleSpec(name, Source(), origin=f"{name}.py")
    process = Process([patch], [])
    process.site = Site()
    process.results["p"] = Result(patch, "applied", "claimed")
    assert behaviour.holds(process, module) == "asked runs stock's code"
    mended = compile(source.replace("stock", "mended"), f"{name}.py", "exec", dont_inherit=True)
    exec(mended, vars(module))
    assert behaviour.holds(process, module) is None
    exec(compile(source.replace("stock", "else"), f"{name}.py", "exec"), vars(module))
    assert behaviour.holds(process, module) == "asked runs neither stock's code nor the mended one"
    process.results["p"] = Result(patch, "clear", "nothing to do")
    assert behaviour.holds(process, module) == "its module was imported, and the patch wasn't applied"


@pytest.mark.unit
@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"ROCM_FIXES": "off"}, "ROCM_FIXES=off switches vllm-rocm-fixes off: unset it"),
        ({"VLLM_PLUGINS": "foo"}, "VLLM_PLUGINS=foo keeps vllm-rocm-fixes out: add rocm_fixes to it, or unset it"),
        ({"VLLM_PLUGINS": ""}, "VLLM_PLUGINS= keeps vllm-rocm-fixes out: add rocm_fixes to it, or unset it"),
        (
            {"ROCM_FIXES_SKIP": ",".join(patch.name for patch in SERIES)},
            "ROCM_FIXES_SKIP names every patch, so nothing is mended: name fewer, or unset it",
        ),
    ],
    ids=["off", "other plugins", "no plugins", "all skipped"],
)
def test_where_nothing_is_claimed_nothing_is_checked(variables, reason):
    """In one line, and at once: no patch is accused, and nothing is called so."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("ROCM_FIXES", "VLLM_"))} | variables
    command = [*VERIFY, "--vllm", str(tree("0.23.0"))]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)
    said = f"vllm-rocm-fixes: nothing was checked, because nothing is claimed here: {reason}\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


@pytest.mark.unit
def test_help_names_every_step():
    command = [sys.executable, "-m", "vllm_rocm_fixes", "verify", "--help"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"only this step: {', '.join(STEPS)}" in " ".join(told.split())


def test_bad_input_is_one_line(tmp_path):
    command = [sys.executable, "-m", "vllm_rocm_fixes", "verify", "--vllm", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
