"""What stock vLLM and the mended one do on the stand-in node: one process for a release, forks for sides and checks.

`report` starts this file as a script in a process of the node. That process imports vllm.config of a stock release, and
nothing of ours; the side "ours" is a fork of it in which both doors are called, and each check is a fork of its side,
so that none sees what another one imported. A check is a function of this file; it returns what it saw.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import json
import logging
import os
import subprocess
import sys
import tempfile
import traceback
import types
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

NIGHTLY = "0.28.1.dev202609011116"  # kernel_warmup imports FlashInfer's helper at module scope
# For each check the releases on both sides of its patch's borders.
WANTED = {
    "kernel_warmup": ("0.23.0", "0.24.0", NIGHTLY, "0.33.0"),
    "tests_utils": ("0.14.1", "0.23.0", "0.24.0", "0.33.0"),
    "mhc": ("0.27.1", "0.30.0", "0.33.0"),
    "jit_monitor": ("0.26.0", "0.27.1"),
    "quark": ("0.14.1", "0.25.1"),
    "platform_memory": ("0.14.1", "0.23.0", "0.24.0", "0.33.0"),
    "fa_utils": ("0.14.1", "0.25.1", "0.33.0"),
    "tilelang_jit": ("0.30.0",),
    "layer_imports": ("0.14.1", "0.20.2", "0.21.0", "0.30.0", "0.33.0"),
    "flashinfer_comm": ("0.14.1", "0.22.1", "0.33.0"),
    "regressions": ("0.23.0", "0.27.1", "0.33.0"),
}
RELEASES = tuple(dict.fromkeys(release for releases in WANTED.values() for release in releases))
HAZARDS = ("aiter", "tilelang", "tvm", "mori", "deep_ep", "nixl_ep", "moonep", "flashinfer", "flash_attn")


# In the process of the tests


@functools.cache
def _jobs() -> dict[str, Future]:
    from shared import once

    pool = ThreadPoolExecutor(2)
    return {release: pool.submit(once, f"release-{release}", functools.partial(_run, release)) for release in RELEASES}


def report(release: str, check: str) -> tuple[dict, dict]:
    """What stock and ours showed; all releases are started with the first question, two at a time."""
    answers = _jobs()[release].result()
    return answers["stock"][check], answers["ours"][check]


def _run(release: str) -> dict:
    from releases import tree

    from vllm_rocm_fixes import node

    checks = [check for check, releases in WANTED.items() if release in releases]
    with tempfile.TemporaryDirectory() as folder:
        built = node.build(f"{folder}/node", version=release, vllm=tree(release), packages=node.EVERYTHING)
        env = {k: v for k, v in os.environ.items() if not k.startswith(("ROCM_FIXES", "VLLM_PLUGINS"))}
        env = built.environment(env, VLLM_PLUGINS="", HOME=folder, ROCM_FIXES_SKIP="tilelang_pair")
        command = [sys.executable, __file__, folder, ",".join(checks)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1500)
        answer = Path(folder, "answer.json")
        assert done.returncode == 0 and answer.exists(), f"{release}:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        return json.loads(answer.read_text())


# On the node


def main(folder: str, checks: list[str]) -> None:
    import torch

    torch.set_num_threads(1)
    importlib.import_module("vllm.config")
    from on_node import in_fork

    answers = {side: in_fork(one_side, side, folder, checks) for side in ("stock", "ours")}
    Path(folder, "answer.json").write_text(json.dumps(answers))


def one_side(side: str, folder: str, checks: list[str]) -> dict:
    from on_node import in_fork

    states = {}
    if side == "ours":
        import vllm_rocm_fixes

        vllm_rocm_fixes.prepare()
        vllm_rocm_fixes.register()
        states = {name: result.state for name, result in vllm_rocm_fixes.current().results.items()}
    assert side == "ours" or "vllm_rocm_fixes" not in sys.modules
    done = {}
    for check in checks:
        place = Path(folder, side, check)
        place.mkdir(parents=True)
        done[check] = in_fork(globals()[check], place) | {"state": states.get(check)}
    return done


def events() -> list[str]:
    """The hazards that this process imported, and what it asked torch's GPU for: `import NAME` and `gpu NAME`."""
    log = Path(os.environ["ROCM_STANDIN_LOG"])
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    mine = [e for e in lines if e["pid"] == os.getpid() and e["kind"] in ("import", "gpu")]
    return [f"{e['kind']} {e['name']}" for e in mine if e["kind"] == "gpu" or e["name"].split(".")[0] in HAZARDS]


def seen(action, *arguments) -> dict:
    """What an action returned or raised, and which hazards it met."""
    start = len(events())
    result: dict = {"returned": None, "raised": None}
    try:
        result["returned"] = action(*arguments)
    except BaseException as error:
        result["raised"] = f"{type(error).__name__}: {error}"
        result["where"] = traceback.format_exc().splitlines()[-12:]
    return result | {"events": list(dict.fromkeys(events()[start:]))}


def loaded(*words: str) -> list[str]:
    return sorted(name for name in sys.modules if any(word in name for word in words))


@contextlib.contextmanager
def listening():
    """Collects what vLLM's loggers say in this process."""
    said: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())

    ear, logger = Ear(), logging.getLogger("vllm")
    logger.addHandler(ear)
    yield said
    logger.removeHandler(ear)


class Nothing:
    """A worker's attributes that nobody looks at: false, empty, zero, and callable."""

    def __init__(self, **known):
        vars(self).update(known)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()

    def __call__(self, *args, **kwargs):
        return Nothing()

    def __iter__(self):
        return iter(())

    def __bool__(self):
        return False

    def __len__(self):
        return 0

    def __index__(self):
        return 0

    def __lt__(self, other):
        return False

    __gt__ = __le__ = __ge__ = __lt__


# The checks


def kernel_warmup(place: Path) -> dict:
    import torch
    from on_node import in_fork

    done = {"import": seen(lambda: bool(importlib.import_module(_WARMUP)))}
    module = sys.modules[_WARMUP]
    done["helpers"] = loaded("warmup.qwen", "flashinfer_pcie_ipc_all_reduce")
    worker = Nothing(vllm_config=Nothing(kernel_config=Nothing(enable_flashinfer_autotune=False)))
    worker.get_model = lambda: torch.nn.Linear(1, 1)
    done["run"] = seen(lambda: module.kernel_warmup(worker) and None)
    done["minimax"] = loaded("minimax_m3")
    if importlib.util.find_spec(_PCIE):
        done["pcie"] = {
            case: in_fork(_pcie, module, worker, case) for case in ("no group", "none", "disabled", "chosen")
        }
    done["names"] = {
        name: seen(lambda name=name: callable(getattr(module, name)))["returned"]
        for name in ("qwen_triton_warmup", "warmup_flashinfer_pcie_ipc_allreduce")
    }
    return done


def _pcie(module, worker, case: str) -> bool:
    """Whether the PCIe IPC warm-up runs, with the variable set, for what the communicator decided."""
    import vllm.distributed.parallel_state as state

    class Minimax:  # stock's import of it can't be had here, and isn't asked about
        minimax_m3_msa_warmup = staticmethod(lambda worker: None)

    sys.modules["vllm.model_executor.warmup.minimax_m3_msa_warmup"] = Minimax
    for name in ("qwen_vl_triton_warmup", "step5_dsa_warmup"):
        helper = type(name, (), {name: staticmethod(lambda *args: None)})
        sys.modules[f"vllm.model_executor.warmup.{name}"] = helper
    os.environ["VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC"] = "1"
    chosen = {"none": None, "disabled": Nothing(disabled=True), "chosen": Nothing(disabled=False)}
    if case in chosen:
        state._TP = Nothing(device_communicator=Nothing(fi_pcie_ipc_ar_comm=chosen[case]))
    ran = []
    helper = importlib.import_module(_PCIE)
    helper.warmup_flashinfer_pcie_ipc_allreduce = ran.append
    if "warmup_flashinfer_pcie_ipc_allreduce" in vars(module):
        module.warmup_flashinfer_pcie_ipc_allreduce = ran.append
    if "qwen_vl_triton_warmup" in vars(module):
        module.qwen_vl_triton_warmup = lambda runner: None
    module.kernel_warmup(worker)
    return bool(ran)


_PCIE = "vllm.distributed.device_communicators.flashinfer_pcie_ipc_all_reduce"
_WARMUP = "vllm.model_executor.warmup.kernel_warmup"


def tests_utils(place: Path) -> dict:
    """What the processes that vLLM's test helpers start find in PYTHONPATH, from a polluted one."""
    own = place / "own"
    own.mkdir()
    (place / "bin").mkdir()
    server = place / "bin" / "vllm"
    server.write_text('#!/bin/sh\nprintf %s "$PYTHONPATH" > "$TOLD"\n')
    server.chmod(0o755)
    (own / "spawned_test.py").write_text(
        "import os\nopen(os.environ['TOLD'], 'w').write(os.environ['PYTHONPATH'])\nos._exit(0)\n"
    )
    tvm = str(place / "site" / "tilelang" / "3rdparty" / "tvm" / "python")
    similar = [tvm + "-extra", f"{tvm}/plugin", tvm.replace("/tilelang/", "/my-tilelang/"), str(own)]
    before = os.pathsep.join([tvm, *similar, tvm + "/", os.environ["PYTHONPATH"]])
    told = place / "told"
    os.environ |= {"PATH": f"{place / 'bin'}:{os.environ['PATH']}", "TOLD": str(told), "PYTHONPATH": before}
    importlib.import_module("amdsmi").amdsmi_get_gpu_vram_usage = lambda handle: {}
    for name in ("orjson", "torchvision"):  # what the entry points of the newest releases import, and nothing here uses
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = types.ModuleType(name)
    utils = importlib.import_module("tests.utils")
    utils.requires_spawn_multiprocessing = lambda: False  # a spawned child would import tests.utils once more

    def plain(model, *others):
        raise RuntimeError(told.write_text(os.environ.get("PYTHONPATH", "")))

    def remote(kind, *start):
        made = object.__new__(getattr(utils, kind))
        made.child_process_fxn = write_path
        made._start_server("model", [], *start)
        made.proc.wait() if hasattr(made.proc, "wait") else made.proc.join()

    def download():
        utils.AsyncEngineArgs = Nothing(from_cli_args=plain)
        utils.RemoteOpenAIServer("organisation/model", [])

    def forked(action):
        utils.fork_new_process_for_each_test(action)()

    def spawned():
        def test(): ...

        test.__module__, test.__qualname__ = "spawned_test", "test"
        utils.spawn_new_process_for_each_test(test)()

    def over_ray():
        class ray:
            @staticmethod
            def init(runtime_env):
                path = runtime_env.get("env_vars", {}).get("PYTHONPATH")
                env = os.environ if path is None else {**os.environ, "PYTHONPATH": path}
                subprocess.run([str(server)], env=env, check=True)
                raise RuntimeError("that was all")

        sys.modules["ray"] = ray
        utils.multi_process_parallel(None, 1, 1, None)

    actions = {
        "server": lambda: remote("RemoteOpenAIServer", None),
        "server with its own": lambda: remote("RemoteOpenAIServer", {"PYTHONPATH": before}),
        "server process": lambda: remote("RemoteOpenAIServerCustom", None),
        "download that fails": download,
        "forked test": lambda: forked(write_path),
        "forked test that fails": lambda: forked(lambda: plain(None)),
        "spawned test": spawned,
        "test over Ray": over_ray,
    }
    done = {}
    for name, action in actions.items():
        told.unlink(missing_ok=True)
        os.environ["PYTHONPATH"] = before
        outcome = seen(action)
        found = told.read_text().split(os.pathsep) if told.exists() else None
        done[name] = {
            "raised": outcome["raised"],
            "tvm": found and [e for e in found if e.rstrip("/") == tvm],
            "others": found and [e for e in before.split(os.pathsep) if e not in found and e.rstrip("/") != tvm],
            "as before": os.environ["PYTHONPATH"] == before,
        }
    return {"processes": done}


def write_path(*arguments) -> None:
    Path(os.environ["TOLD"]).write_text(os.environ.get("PYTHONPATH", ""))


def mhc(place: Path) -> dict:
    """What layers/mhc.py finds out about several AITERs: as it is imported, and asked again for other sources."""
    from on_node import in_fork

    module = "vllm.model_executor.layers.mhc"
    done = {"import": seen(lambda: bool(importlib.import_module(module)))}
    found = vars(sys.modules[module])
    done["answers"] = {n: v for n, v in found.items() if n.startswith("HAS_") and isinstance(v, bool)}
    if "_has_aiter_mhc_fused" in found:
        done["sources"] = {case: in_fork(_ask_mhc, found, place, case) for case in _MHC}
    return done


_GUARD = "def torch_compile_guard(**k):\n    return lambda f: lambda *args, **kwargs: None\n"
_NORM = "x, norm_weight=None, norm_eps=1e-6"
_MHC = {
    "none": None,
    "empty": "",
    "pre only": f"{_GUARD}def mhc_pre_fake({_NORM}): ...\n@torch_compile_guard()\ndef mhc_pre({_NORM}): ...",
    "fused without norm": f"{_GUARD}@torch_compile_guard()\ndef mhc_fused_post_pre(x): ...\ndef mhc_pre({_NORM}): ...",
    "no fake": f"{_GUARD}@torch_compile_guard()\ndef mhc_fused_post_pre({_NORM}): ...",
    "both": f"{_GUARD}def mhc_fused_post_pre_fake({_NORM}): ...\n@torch_compile_guard()\ndef mhc_fused_post_pre(): 0",
    "not a function": "mhc_fused_post_pre = 3",
    "from elsewhere": "from .other import mhc_fused_post_pre, mhc_pre",
}


def _ask_mhc(found, place: Path, case: str) -> dict:
    package = place / case / "aiter"
    (package / "ops").mkdir(parents=True)
    (package / "__init__.py").write_text("import sys\nsys.aiter_ran = True\n")
    (package / "ops" / "__init__.py").touch()
    (package / "ops" / "other.py").write_text(f"def mhc_fused_post_pre({_NORM}): ...\ndef mhc_pre(x): ...\n")
    if _MHC[case] is not None:
        (package / "ops" / "mhc.py").write_text(_MHC[case])
    for name in [n for n in sys.modules if n.partition(".")[0] == "aiter"]:
        del sys.modules[name]
    sys.path.insert(0, str(package.parent))
    importlib.invalidate_caches()
    norm = found["_aiter_mhc_op_accepts_norm"]
    answers = [found["_has_aiter_mhc_fused"](), norm("mhc_pre"), norm("mhc_fused_post_pre")]
    return {"answers": answers, "ran": hasattr(sys, "aiter_ran")}


def jit_monitor(place: Path) -> dict:
    from on_node import in_fork

    monitor = importlib.import_module("vllm.utils.jit_monitor")
    return {case: in_fork(_watch, monitor, case) for case in ("not loaded", "loaded", "another platform")}


def _watch(monitor, case: str) -> dict:
    """Activate the monitor, and build a TileLang kernel afterwards."""
    import vllm.platforms

    if case == "another platform":
        vllm.platforms.current_platform.is_rocm = lambda: False
    kernel = type("JITKernel", (), {"__init__": lambda self, func, **more: None})
    if case == "loaded":
        for name in ("tilelang", "tilelang.jit", "tilelang.jit.kernel"):
            importlib.import_module(name)
        sys.modules["tilelang.jit.kernel"].JITKernel = kernel
    done = seen(lambda: monitor.activate())
    with listening() as said:
        kernel(func=_watch)
    return done | {"told": [line for line in said if "_watch" in line]}


def quark(place: Path) -> dict:
    from on_node import in_fork

    cases = {
        "emulating": {},
        "native": {"mx": True},
        "unsupported GPU": {"mx": True, "fails": "RuntimeError"},
        "unsupported GPU, emulating": {"fails": "RuntimeError"},
        "unknown GPU": {"mx": True, "fails": "KeyError"},
        "failed build": {"mx": True, "fails": "SystemExit"},
        "no AITER": {"mx": True, "there": False},
    }
    return {case: in_fork(_scheme, options) for case, options in cases.items()}


def _scheme(options: dict) -> dict:
    """Import the OCP-MX scheme, make one for MXFP4, and quantise weights on the fly."""
    import torch

    if options.get("fails"):
        os.environ |= {"ROCM_STANDIN_AITER_FAILS": options["fails"], "ROCM_STANDIN_AITER_FAILS_AT": "package"}
    if not options.get("there", True):
        sys.path[:] = [p for p in sys.path if not os.path.exists(os.path.join(p, "aiter"))]
        sys.path_importer_cache.clear()
        importlib.invalidate_caches()
    name = "vllm.model_executor.layers.quantization.quark.schemes.quark_ocp_mx"
    with listening() as said:
        done = {"import": seen(lambda: bool(importlib.import_module(name)))}
        if done["import"]["raised"] is None:
            module = sys.modules[name]
            done["operator"] = hasattr(torch.ops.vllm, "gemm_with_dynamic_quant")
            module.current_platform.supports_mx = lambda: bool(options.get("mx"))
            module.get_current_vllm_config = Nothing  # 0.26.0 on
            spec = {"dtype": "fp4", "is_dynamic": True}
            made = []
            done["make"] = seen(lambda: made.append(module.QuarkOCP_MX(spec, spec)))
            if made and hasattr(made[0], "process_dynamic_mxfp4_weights_after_loading"):
                module.dynamic_mxfp4_quant = lambda weight: (weight, weight)
                layer = torch.nn.Linear(2, 2)
                done["quantise"] = seen(lambda: made[0].process_dynamic_mxfp4_weights_after_loading(layer))
    return done | {"said": [line for line in said if "AITER" in line or "aiter" in line]}


def platform_memory(place: Path) -> dict:
    from on_node import in_fork

    cases = {
        "Instinct, driver": {"banks": [(1, 192 << 30), (2, 0), (4, 1 << 16)], "smi": 192 << 30},
        "Instinct, no driver": {"smi": 192 << 30},
        "APU": {"banks": [(1, 110 << 30)], "smi": 512 << 20, "gfx": "gfx1151"},
        "APU, no driver": {"smi": 512 << 20, "gfx": "gfx1151"},
        "another card's banks": {"banks": [(1, 300 << 30)], "smi": 192 << 30, "location": 0x600},
        "no amdsmi": {"smi": None},
    }
    return {case: in_fork(_memory, place / case, options) for case, options in cases.items()}


def _memory(place: Path, options: dict) -> dict:
    """The total memory that the platform gives, and whether HIP was initialised for it."""
    import amdsmi
    import vllm.platforms.rocm as rocm

    for number, (simds, location, banks) in enumerate([(0, 0, [(0, 1 << 40)]), (304, 0, options.get("banks", []))]):
        node = place / str(number)
        for bank, (heap, size) in enumerate(banks):
            (node / "mem_banks" / str(bank)).mkdir(parents=True)
            text = f"heap_type {heap}\nsize_in_bytes {size}\nflags 0\nwidth 8192\nmem_clk_max 1300\n"
            (node / "mem_banks" / str(bank) / "properties").write_text(text)
        node.mkdir(exist_ok=True, parents=True)
        location = options.get("location", 0x500)
        (node / "properties").write_text(f"cpu_cores_count 0\nsimd_count {simds}\nlocation_id {location}\ndomain 0\n")
    if "vllm_rocm_fixes" in sys.modules:
        from vllm_rocm_fixes.patches import platform_memory as patch

        patch.topology = place if "banks" in options else place / "missing"

    def total(handle, kind):
        if options["smi"] is None:
            raise amdsmi.AmdSmiException("amdsmi isn't there")
        return options["smi"]

    def asic(handle):
        return {"target_graphics_version": options.get("gfx", "gfx942")}

    for module in (amdsmi, rocm):
        module.amdsmi_get_gpu_memory_total, module.amdsmi_get_gpu_asic_info = total, asic
    return seen(lambda: rocm.RocmPlatform.get_device_total_memory(0))


def fa_utils(place: Path) -> dict:
    from on_node import in_fork

    cases = {"works": "", "ImportError": "", "OSError": "", "RuntimeError": "", "SystemExit": "", "KeyError": ""}
    done = {case: in_fork(_flash_attention, {"FLASH_ATTN_FAILS": case} if case != "works" else {}) for case in cases}
    aiter = {"FLASH_ATTN": "aiter"}
    done["needs AITER"] = in_fork(_flash_attention, aiter)
    done["needs AITER that fails"] = in_fork(
        _flash_attention, aiter | {"AITER_FAILS": "RuntimeError", "AITER_FAILS_AT": "package"}
    )
    done["missing"] = in_fork(_flash_attention, {"missing": "1"})
    return done


def _flash_attention(options: dict) -> dict:
    """Import fa_utils, ask whether there is a flash-attention, take the function, call it."""
    if options.pop("missing", ""):
        sys.path[:] = [p for p in sys.path if not os.path.exists(os.path.join(p, "flash_attn"))]
        sys.path_importer_cache.clear()
    os.environ |= {f"ROCM_STANDIN_{name}": value for name, value in options.items()}
    name = "vllm.v1.attention.backends.fa_utils"
    with listening() as said:
        done = {"import": seen(lambda: bool(importlib.import_module(name)))}
        module = sys.modules.get(name)
        if module is not None:
            done["available"] = seen(module.is_flash_attn_varlen_func_available)
            done["take"] = seen(lambda: bool(importlib.import_module(name).flash_attn_varlen_func))
            done["call"] = seen(lambda: bool(module.flash_attn_varlen_func(1)))
            done["other"] = seen(lambda: hasattr(module, "nothing_of_that_name"))
    return done | {"said": [line for line in said if "flash_attn" in line]}


def tilelang_jit(place: Path) -> dict:
    """A late TileLang kernel, with the stand-in's tilelang.jit replaced by one that counts."""
    utils = importlib.import_module("vllm.tilelang_utils")
    done: dict = {"decorate": seen(lambda: bool(utils.tilelang_jit(_kernel)))}
    kernel = utils.tilelang_jit(_kernel)
    done["name"], done["doc"] = kernel.__name__, kernel.__doc__
    made: list[str] = []

    class Implementation:
        def __init__(self, function):
            made.append(function.__name__)
            self._kernel_cache = {}

        def __call__(self, x):
            return ("called", x)

        def compile(self, x):
            return ("compiled", x)

    tilelang = importlib.import_module("tilelang")
    tilelang.jit = lambda pass_configs: Implementation
    done["compile"] = seen(lambda: kernel.compile(3))
    done["cache"] = seen(lambda: kernel._kernel_cache)
    done["call"] = seen(lambda: kernel(4))
    done["missing"] = seen(lambda: kernel.nothing)
    return done | {"made": made}


def _kernel(x):
    """A kernel."""


def layer_imports(place: Path) -> dict:
    import on_layers

    return on_layers.layer_imports(place)


def flashinfer_comm(place: Path) -> dict:
    import on_layers

    return on_layers.flashinfer_comm(place)


def regressions(place: Path) -> dict:
    """What upstream asked tests for: the failures behind #54869, #51151, #47992 and #44823, as a start meets them."""
    from on_node import in_fork

    return {
        "start": in_fork(_start, place),
        "registered": in_fork(_registered, place),
        "child": in_fork(_child, place),
    }


def _start(place: Path) -> dict:
    """A configuration, and what a worker imports: which hazards that met."""
    done = {"config": seen(_configure, place)}
    done["worker"] = seen(lambda: bool(importlib.import_module("vllm.v1.worker.gpu_worker")))
    done["kernel_warmup"] = seen(lambda: bool(importlib.import_module(_WARMUP)))
    return done


def _configure(place: Path):
    from rocm_standin import models
    from vllm.engine.arg_utils import EngineArgs

    folder = place / "models"
    if not folder.exists():
        folder.mkdir()
        models.make(folder)
    for name in ("dense", "fp8"):
        if (folder / name).exists():
            args = EngineArgs(
                model=str(folder / name), max_model_len=256, skip_tokenizer_init=True, enable_prefix_caching=False
            )
            args.create_engine_config()


def _registered(place: Path) -> dict:
    """A model that was registered here: how children are started after a configuration, and whether they know it."""
    from vllm import ModelRegistry
    from vllm.utils.system_utils import _maybe_force_spawn

    ModelRegistry.register_model("RegisteredHereForCausalLM", f"{__name__}:Nothing")
    os.environ.pop("VLLM_WORKER_MULTIPROC_METHOD", None)
    done = {"config": seen(_configure, place)}
    _maybe_force_spawn()
    import multiprocessing

    import vllm.envs as envs

    done["method"] = method = envs.VLLM_WORKER_MULTIPROC_METHOD
    context = multiprocessing.get_context(method)
    answer = context.SimpleQueue()
    child = context.Process(target=_knows, args=(answer,))
    child.start()
    child.join(120)
    return done | {"known": None if answer.empty() else answer.get()}


def _knows(answer) -> None:
    from vllm import ModelRegistry

    answer.put("RegisteredHereForCausalLM" in ModelRegistry.get_supported_archs())


def _child(place: Path) -> dict:
    """A child of a process that imported TileLang: what it finds in its environment, and whether it can import tvm."""
    importlib.import_module("tilelang")
    probe = "import importlib.util, json, os, sys; print(json.dumps([os.environ.get('PYTHONPATH', ''), sys.path, "
    probe += "importlib.util.find_spec('tvm') is not None]))"
    out = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout
    variable, path, tvm = json.loads(out.splitlines()[-1])
    return {"variable": "tilelang" in variable, "path": [p for p in path if "tilelang" in p], "tvm": tvm}


if __name__ == "__main__":
    sys.modules["on_release"] = sys.modules["__main__"]
    main(sys.argv[1], sys.argv[2].split(","))
