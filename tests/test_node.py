"""The stand-in node: stock vLLM takes it for an AMD node, and whatever touches a package or the GPU is written down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from releases import tree

from vllm_rocm_fixes import node

# One process does what several tests look at: touches packages in itself, and in children of every kind.
CHILDREN = """
import importlib.util, json, multiprocessing, os, subprocess, sys

def touch():
    import aiter.ops.sampling

def of(method):
    child = multiprocessing.get_context(method).Process(target=touch)
    child.start(); child.join()
    return child.pid

if __name__ == "__main__":
    assert importlib.util.find_spec("aiter") and importlib.util.find_spec("tilelang")
    answer = {"spec only": os.path.exists(os.environ["ROCM_STANDIN_LOG"]), "pid": os.getpid()}
    answer["pids"] = {method: of(method) for method in ("fork", "spawn", "forkserver")}
    answer["pids"]["subprocess"] = int(subprocess.check_output(
        [sys.executable, "-c", "import os, aiter.ops.sampling; print(os.getpid())"]))
    answer["before"] = os.environ["PYTHONPATH"]
    import tilelang, mori
    answer["after"] = os.environ["PYTHONPATH"]
    answer["path"] = sys.path
    answer["child finds"] = subprocess.run([sys.executable, "-c", "import tvm"]).returncode == 0
    mori.ops.EpDispatchCombineOp
    answer["env"] = sorted(name for name in os.environ if name.startswith(("TL_", "TVM_")))
    print(json.dumps(answer))
"""
GPU = """
import json, multiprocessing, torch

def ask():
    torch.cuda.get_device_properties(0)

def of(method):
    child = multiprocessing.get_context(method).Process(target=ask)
    child.start(); child.join()
    return child.exitcode

if __name__ == "__main__":
    answer = {"count": torch.cuda.device_count(), "initialised": [torch.cuda.is_initialized()]}
    answer["fork before"] = of("fork")
    answer["capability"] = torch.cuda.get_device_capability()
    answer["initialised"].append(torch.cuda.is_initialized())
    answer["fork after"] = of("fork")
    answer["spawn after"] = of("spawn")
    try:
        torch.cuda.initial_seed()
    except Exception:  # a CPU build knows no more than that it was asked
        pass
    try:
        torch.zeros(1, device="cuda")
    except Exception as error:
        answer["tensor"] = str(error)
    print(json.dumps(answer))
"""
SAMPLING = """
import json, os, sys, torch
import aiter.ops.sampling
probs = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).repeat(4000, 1)
k, p = torch.full((4000,), 2), torch.full((4000,), 0.65)
ops = torch.ops.aiter
answer = {"both": ops.top_k_top_p_sampling_from_probs(probs, None, k, 0, p, 0.0, deterministic=True)}
answer["top_p"] = ops.top_p_sampling_from_probs(probs, None, None, 0.85, deterministic=True)
answer = {name: torch.bincount(ids.view(-1), minlength=4).tolist() for name, ids in answer.items()}
answer["top_k"] = ops.top_k_renorm_probs(probs[:1], None, 3).tolist()
answer["failures"] = {}
for where in ("package", "sampling", "call"):
    os.environ["ROCM_STANDIN_AITER_FAILS_AT"] = where
    for name in ("ImportError", "RuntimeError", "KeyError", "OSError", "CalledProcessError", "SystemExit"):
        os.environ["ROCM_STANDIN_AITER_FAILS"] = name
        for module in [module for module in sys.modules if module.startswith("aiter")]:
            if where != "call":
                del sys.modules[module]
        try:
            if where == "call":
                ops.top_k_renorm_probs(probs[:1], None, 3)
            else:
                import aiter.ops.sampling
        except BaseException as error:
            answer["failures"][f"{where} {name}"] = type(error).__name__
print(json.dumps(answer))
"""
PLATFORM = """
import json
from vllm.platforms import current_platform
print(json.dumps([type(current_platform).__name__, current_platform.is_rocm(), current_platform.get_device_name()]))
"""


def on(built: node.Node, program: str, **env: str) -> tuple:
    """What the program printed last, and the events of the node."""
    script = built.folder / "program.py"
    script.write_text(program)
    built.clear()
    env = {"VLLM_PLUGINS": "", **env}
    done = subprocess.run(
        [sys.executable, script], env=built.environment(**env), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), built.events()


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> node.Node:
    return node.build(tmp_path_factory.mktemp("node"), version="0.23.0", packages=node.EVERYTHING)


@pytest.fixture(scope="module")
def children(plain):
    return on(plain, CHILDREN)


@pytest.mark.parametrize("release", ["0.14.1", "0.19.1", "0.23.0", "0.33.0"])
def test_stock_vllm_picks_its_rocm_platform(tmp_path, release):
    built = node.build(tmp_path, version=release, vllm=tree(release))
    assert on(built, PLATFORM)[0] == ["RocmPlatform", True, "AMD_Instinct_MI300X"]


def test_a_search_for_a_package_runs_nothing(children):
    assert children[0]["spec only"] is False


def test_an_import_is_written_down_in_every_kind_of_child(plain, children):
    answer, events = children
    imports = {event.pid: event for event in events if event.name == "aiter.ops.sampling"}
    assert set(imports) == set(answer["pids"].values())
    for method, pid in answer["pids"].items():
        asked = [frame for frame in imports[pid].chain if not frame.startswith(str(plain.folder / "aiter"))][-1]
        assert asked.endswith("<string>:1 <module>" if method == "subprocess" else "program.py:5 touch"), method
        assert not any("importlib" in frame for frame in imports[pid].chain)
    assert imports[answer["pids"]["fork"]].ppid == answer["pid"]
    assert {event.package for event in events} >= {"aiter", "tilelang", "tvm", "mori"}


def test_tilelang_does_to_its_process_what_the_real_one_does(plain, children):
    answer, _ = children
    vendored = str(plain.folder / "tilelang" / "3rdparty" / "tvm" / "python")
    assert answer["after"] == f"{vendored}{os.pathsep}{answer['before']}"
    assert answer["path"].index(vendored) < 2
    assert answer["child finds"]
    assert {"TVM_LIBRARY_PATH", "TL_CUTLASS_PATH", "TL_TEMPLATE_PATH"} <= set(answer["env"])


def test_mori_loads_its_library_with_the_first_use_of_its_ops(children):
    names = [event.name for event in children[1] if event.package == "mori"]
    assert names == ["mori", "mori.ops", "mori.cpp"]


def test_the_gpu_is_one_mi300x_and_a_fork_loses_it_once_it_was_asked(plain):
    answer, events = on(plain, GPU)
    assert answer["count"] == 1 and answer["capability"] == [9, 4]
    assert answer["initialised"] == [False, True]
    assert (answer["fork before"], answer["fork after"], answer["spawn after"]) == (0, 1, 0)
    asked = [event for event in events if event.kind == "gpu"]
    assert any(event.chain[-1].endswith("program.py:15 <module>") for event in asked), asked
    hidden = [event.chain[-1].rpartition(" ")[2] for event in asked if event.name == "torch.cuda._lazy_init"]
    assert hidden == ["initial_seed", "<module>"], answer["tensor"]


def test_aiters_sampling_ops_work_and_fail_as_told(plain):
    answer, events = on(plain, SAMPLING)
    assert sum(answer["both"]) == 4000 and answer["both"][2:] == [0, 0] and min(answer["both"][:2]) > 1000
    assert sum(answer["top_p"]) == 4000 and answer["top_p"][3] == 0 and min(answer["top_p"][:3]) > 500
    assert answer["top_k"] == [pytest.approx([4 / 9, 3 / 9, 2 / 9, 0])]
    assert len(answer["failures"]) == 18
    assert all(where.split()[1] == raised for where, raised in answer["failures"].items())
    assert next(event.name for event in events if event.kind == "call").endswith("top_k_top_p_sampling_from_probs")


@pytest.mark.parametrize(
    ("aiter", "names"), [("0.1.10.post3", []), ("0.1.13", ["fused_qk_rmsnorm"]), ("v0.1.16", ["_fused_qk_rmsnorm"])]
)
def test_the_fused_kernel_has_the_name_of_its_release(tmp_path, aiter, names):
    built = node.build(tmp_path, version="0.23.0", packages=["aiter"], aiter=aiter)
    program = "import aiter.ops.fused_qk_norm_rope_cache_quant as m, json\n"
    program += "print(json.dumps([name for name in dir(m) if name.endswith('fused_qk_rmsnorm')]))"
    assert on(built, program)[0] == names


def test_the_machines_own_sitecustomize_runs_too(plain, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['OWN'] = '1'\n")
    env = plain.environment({"PATH": os.defpath, "PYTHONPATH": str(tmp_path)})
    program = "import os, torch; print(os.environ['OWN'], torch.cuda.device_count())"
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["1", "1"], done.stderr


def test_lines_of_many_writers_do_not_mix(plain):
    program = "import os, rocm_standin\nfor _ in range(7): os.fork()\n"
    program += "for _ in range(20): rocm_standin.write('call', 'x' * 3000)\n"
    program += "for _ in range(7):\n  try: os.wait()\n  except ChildProcessError: pass\nprint('[]')"
    events = on(plain, program)[1]
    assert len(events) == 128 * 20 and len({event.pid for event in events}) == 128
    plain.clear()
    assert plain.events() == []


def test_a_package_that_is_not_known_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no torch; it has aiter"):
        node.build(tmp_path / "node", version="0.23.0", packages=["torch"])
    assert not Path(tmp_path / "node").exists()
