"""What stock vLLM and the mended one do with optional packages on the stand-in node.

`report` starts this file as a script in a process of the node, where deep_ep and mori are stand-ins that import, and
nixl_ep is a real package whose native library doesn't load. There is one process for a release: it imports stock vLLM
up to its import_utils, and each side goes on from there in a fork.

stock: nothing of ours is loaded. mended: vLLM calls our doors. live: they are called in the stock side, at its end.
unguarded: the guard hip is skipped. late: it is skipped after the module was imported, as a Ray worker learns it.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import types
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from unittest.mock import MagicMock

# One on each side of every change in these modules; the verdicts are tested on all, the starts by the contract.
RELEASES = ("0.14.1", "0.18.1", "0.20.2", "0.22.1", "0.23.0", "0.27.1", "0.33.0")
NIGHTLIES = ("0.26.1.dev202608050841", "0.28.1.dev202609011116")
UNGUARDED = ("0.20.2", "0.23.0", "0.27.1", "0.33.0")  # TileLang before HIP in all but the last
LAZY = "0.26.1.dev202608050841"
PROBE = "vllm.utils.import_utils"
UTILS = "vllm.model_executor.layers.fused_moe.all2all_utils"
MANAGERS = "vllm.distributed.device_communicators.all2all"
HAZARDS = ("deep_ep", "mori", "nixl_ep", "moonep", "pplx_kernels", "tilelang")
ASKED = (
    *("nothing_of_that_name", "nothing_of_that_name.inner", "json", "pure", "raises_import_error", "raises_other"),
    *("ends_with_exit", "lacks_a_library", "aborts", "illegal"),
)
BACKENDS = {  # what vLLM's configuration says of a chosen back end
    "pplx": "use_pplx_kernels",
    "deepep_high_throughput": "use_deepep_ht_kernels",
    "deepep_low_latency": "use_deepep_ll_kernels",
    "mori": "use_mori_kernels",
    "nixl_ep": "use_nixl_ep_kernels",
    "moonep": "use_moonep_kernels",
}


# In the process of the tests


_pool = ThreadPoolExecutor(2)


@functools.cache
def _job(release: str) -> Future:
    from shared import once

    return _pool.submit(once, f"expert-parallel-{release}", functools.partial(_run, release))


def report(release: str) -> dict:
    """What the sides of a release did. The next release's process is started too: two run at a time."""
    every = (*RELEASES, *NIGHTLIES)
    job, _ = _job(release), _job(every[(every.index(release) + 1) % len(every)])
    return job.result()


def _run(release: str) -> dict:
    import native
    from releases import tree

    from vllm_rocm_fixes import node

    with tempfile.TemporaryDirectory() as folder:
        built = node.build(
            f"{folder}/node", version=release, vllm=tree(release), packages=("tilelang", "mori", "deep_ep")
        )
        native.packages(built.folder)
        native.native(built.folder, "nixl_ep", "lacks_a_library")
        env = {k: v for k, v in os.environ.items() if not k.startswith(("ROCM_FIXES", "VLLM_"))}
        # The guard looks at what is installed beside the stand-in TileLang, and that is not what is asked here.
        env = built.environment(env, VLLM_PLUGINS="", ROCM_FIXES_SKIP="tilelang_pair")
        command = [sys.executable, __file__, f"{folder}/answer.json", release]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=540)
        answer = Path(folder, "answer.json")
        assert done.returncode == 0 and answer.exists(), f"{release}:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        return json.loads(answer.read_text())


# On the node


def main(answer: str, release: str) -> None:
    import torch
    from on_node import in_fork

    torch.set_num_threads(1)
    importlib.import_module(PROBE)
    importlib.import_module("vllm.config")
    sides = {"stock": in_fork(stock), "mended": in_fork(mended)}
    if release in UNGUARDED:
        sides |= {"unguarded": in_fork(unguarded), "late": in_fork(late)}
    Path(answer).write_text(json.dumps(sides))


def stock() -> dict:
    done = one_side()
    assert "vllm_rocm_fixes" not in sys.modules
    doors()
    done["live"] = {"chosen": choose(broken()), "states": states()}
    return done


def mended() -> dict:
    doors()
    sys.modules[PROBE].has_deep_ep()  # its trial, once for all the forks below: the stand-in takes torch along
    return one_side() | {"states": states()}


def unguarded() -> dict:
    os.environ["ROCM_FIXES_SKIP"] += ",hip"
    return _guarded(lambda: (doors(), importlib.import_module(UTILS)))


def late() -> dict:
    def both_doors() -> None:
        importlib.import_module("vllm_rocm_fixes").prepare()
        importlib.import_module(UTILS)
        os.environ["ROCM_FIXES_SKIP"] += ",hip"
        doors()

    return _guarded(both_doors)


def _guarded(action) -> dict:
    """What an action left: the state of the patch, what was imported, which guards work, and what was said."""
    said: list = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("vllm.rocm_fixes").addHandler(handler)
    action()
    guards = [guard.name for guard in sys.modules["vllm_rocm_fixes"].current().working()]
    return {"state": states()["all2all_utils"], "imported": here(), "guards": guards, "said": said}


def doors() -> None:
    """vLLM loads its plugins, and we are one of them."""
    del os.environ["VLLM_PLUGINS"]
    importlib.import_module("vllm.plugins").load_general_plugins()


def states() -> dict[str, str]:
    results = sys.modules["vllm_rocm_fixes"].current().results
    return {n: results[n].state for n in ("all2all_utils", "all2all", "import_utils") if n in results}


def one_side() -> dict:
    from on_node import in_fork

    probe = sys.modules[PROBE]
    held = {name: getattr(probe, name) for name in vars(probe) if name.startswith("has_")}  # as users hold them
    done: dict = {
        "has": in_fork(ask_all, probe),
        "v2": in_fork(second_interface, probe),
        "forks": in_fork(forks, probe),
    }
    done["own tests"] = in_fork(own_tests, probe)
    done["tilelang"] = in_fork(ask, held["has_tilelang"])
    done["held"] = {n: in_fork(ask, held[n]) for n in ("has_mori", "has_nixl_ep") if n in held}
    before = children()
    done["managers import"] = attempt(importlib.import_module, MANAGERS)
    done["import"] = attempt(importlib.import_module, UTILS)
    done["imported"] = here()
    done["children"] = children() - before
    there = done["import"] is None
    done["names"] = in_fork(names) if there else {}
    done["chosen"] = {backend: in_fork(choose, backend) for backend in BACKENDS} if there else {}
    done["managers"] = {name: in_fork(manage, name) for name in managers()}
    return done


def broken() -> str:
    """A back end of this release whose package isn't there or doesn't load."""
    return "nixl_ep" if hasattr(sys.modules[PROBE], "has_nixl_ep") else "pplx"


def ask_all(probe) -> dict:
    """For each package: the answer, what was raised, and whether the package was imported into this process."""
    from on_node import in_fork

    done = {}
    for name in ASKED:
        try:
            done[name] = in_fork(ask, probe._has_module, name)
        except RuntimeError as error:
            done[name] = {"died": "the fork died" in str(error)}
    return done


def ask(function, *arguments) -> dict:
    said: list = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append([record.levelname, record.getMessage(), bool(record.exc_info)])
    logging.getLogger("vllm").addHandler(handler)
    done = {}
    try:
        done["answer"] = function(*arguments)
    except BaseException as error:
        done["raised"] = f"{type(error).__name__}: {error}"
    imported = [n for n in ASKED if n in sys.modules and n != "json"] + here()
    return done | {"imported": imported, "said": said, "path": os.environ["PYTHONPATH"].count("tvm")}


def own_tests(probe) -> int | None:
    """What vLLM's own tests of the probe say, as pytest's exit code."""
    file = Path(probe.__file__).parents[2] / "tests" / "utils_" / "test_import_utils.py"
    if not file.exists() or "TestHasModule" not in file.read_text():
        return None
    import pytest

    options = ["-q", "--noconftest", "-p", "no:cacheprovider", "--rootdir", tempfile.mkdtemp(), "-o", "addopts="]
    return int(pytest.main([*options, "-k", "TestHasModule", str(file)]))


def second_interface(probe) -> dict:
    """DeepEP's second interface, with a deep_ep that has it not, has it, or makes it when asked."""
    from on_node import in_fork

    if not hasattr(probe, "has_deep_ep_v2"):
        return {}
    probe._get_runtime_nccl_version = lambda: 99999
    made = "def __getattr__(name):\n    if name == 'ElasticBuffer':\n        return 1\n    raise AttributeError(name)\n"
    done = {}
    for kind, source in {"without": "", "with": "class ElasticBuffer: ...\n", "made": made}.items():
        folder = Path(tempfile.mkdtemp())
        (folder / "deep_ep.py").write_text(source)
        sys.path.insert(0, str(folder))
        done[kind] = in_fork(ask, probe.has_deep_ep_v2)
    return done


def forks(probe) -> dict:
    """An answer that a fork inherits, and what is answered where no child can be started."""
    from on_node import in_fork

    first = ask(probe._has_module, "lacks_a_library")["answer"] if "vllm_rocm_fixes" in sys.modules else None
    sys.executable = "/nonexistent/python"
    probe._has_module.cache_clear()
    done = {"first": first, "inherited": in_fork(ask, probe._has_module, "lacks_a_library") if first is False else {}}
    return done | {"no child": {n: in_fork(ask, probe._has_module, n) for n in ("pure", "raises_other")}}


def here() -> list[str]:
    return [name for name in HAZARDS if sys.modules.get(name) is not None]


def children() -> int:
    """How many trials this process made so far; each began with a child."""
    trial = sys.modules.get("vllm_rocm_fixes.trial")
    return len(trial._known) if trial else 0


def attempt(function, *arguments) -> str | None:
    try:
        function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def names() -> dict:
    """What other modules get that ask for a name of a back end."""
    module = importlib.import_module(UTILS)
    done = {}
    for name in ("MoriPrepareAndFinalize", "DeepEPHTPrepareAndFinalize", "DEEPEP_QUANT_BLOCK_SHAPE"):
        space: dict = {}
        try:
            exec(f"from {UTILS} import {name}", space)
            done[name] = [getattr(space[name], "__module__", repr(space[name])).rpartition(".")[2], here()]
        except ImportError as error:
            done[name] = str(error)
    done["broken"] = hasattr(module, "NixlEPPrepareAndFinalize") or hasattr(module, "PplxPrepareAndFinalize")
    done["unknown"] = hasattr(module, "nothing_of_that_name")
    return done


class Chosen(types.SimpleNamespace):
    """A configuration of a mixture of experts that chose one back end."""

    def __getattr__(self, name: str):
        if name.startswith("use_"):
            return name in (self.chosen, "use_all2all_kernels")
        return MagicMock()


def choose(backend: str) -> dict:
    """Make the prepare-and-finalize object of a back end: its class, or what was raised."""
    module = importlib.import_module(UTILS)
    import torch

    before = here()
    numbers = {"max_num_tokens": 8, "hidden_dim": 256, "num_experts": 4, "num_local_experts": 4, "dp_size": 1}
    moe = Chosen(chosen=BACKENDS[backend], in_dtype=torch.bfloat16, experts_per_token=2, **numbers)
    moe.moe_parallel_config = moe
    manager = MagicMock(world_size=1, dp_world_size=1, rank=0, max_num_ep_ranks=1, internode=False)
    module.get_ep_group = lambda: MagicMock(device_communicator=MagicMock(all2all_manager=manager))
    try:
        made = module.maybe_make_prepare_finalize(moe, MagicMock(block_shape=None, use_mxfp4_w4a4=False))
        return {"made": type(made).__name__, "before": before, "after": here()}
    except Exception as error:
        cause = error.__cause__
        return {
            "raised": f"{type(error).__name__}: {error}",
            "cause": f"{type(cause).__name__}: {cause}" if cause else None,
            "before": before,
        }


def managers() -> list[str]:
    module = importlib.import_module(MANAGERS)
    wanted = ("PPLXAll2AllManager", "DeepEPHTAll2AllManager", "NixlEPAll2AllManager", "MoonEPAll2AllManager")
    return [name for name in (*wanted, "DeepEPV2All2AllManager", "MoriAll2AllManager") if hasattr(module, name)]


def manage(name: str) -> str | None:
    """Make the manager of a back end whose package is broken or missing, as far as it asks for the package."""
    import inspect

    module = importlib.import_module(MANAGERS)
    kind = getattr(module, name)
    folder = Path(tempfile.mkdtemp())
    for package in ("deep_ep", "mori"):
        sys.modules.pop(package, None)
        (folder / f"{package}.py").write_text("raise OSError('libmpi.so.40: cannot open shared object file')\n")
    sys.path.insert(0, str(folder))
    sys.modules[PROBE]._has_module.cache_clear()
    if name != "NixlEPAll2AllManager":
        wanted = list(inspect.signature(kind).parameters)[1:]
        return attempt(kind, MagicMock(), *[MagicMock() for n in wanted if n == "all2all_backend"])
    manager = kind.__new__(kind)
    manager.__dict__.update(max_num_ep_ranks=1, world_size=1)
    kind.max_num_ep_ranks = 1
    kind._buffer = None
    module.get_current_vllm_config = MagicMock()
    return attempt(manager._init_buffer, 8, 256, 1)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(*sys.argv[1:])
