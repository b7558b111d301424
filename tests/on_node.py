"""What stock vLLM and the mended one do with AITER on the stand-in node: a process for a release, a fork for a side.

`report` starts this file as a script in a process of the node. That process imports stock vLLM once; each side goes
on from there in a fork, and within it each scenario that must find AITER not yet imported.

stock: nothing of ours is loaded. live: the doors are called after vLLM was imported. import: the doors are called, and
the sampler's module is imported again, through our finder. doors: a process of its own, where vLLM calls the doors.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import traceback
import types
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

FAILURES = ("ImportError", "RuntimeError", "KeyError", "OSError", "CalledProcessError", "SystemExit")
RELEASES = ("0.14.1", "0.18.1", "0.20.2", "0.22.1", "0.23.0", "0.24.0", "0.26.0", "0.27.1", "0.32.0", "0.33.0")
PROBES = ("0.20.2", "0.22.1", "0.23.0", "0.24.0", "0.26.0")  # those that ask for the fused qk-rmsnorm kernel
DOORS = ("0.20.2", "0.23.0", "0.33.0")
AITERS = ("0.1.10", "0.1.13", "0.1.16")  # neither name, the public one, the private one
SAMPLER = "vllm.v1.sample.ops.topk_topp_sampler"
OFF = "ROCM_FIXES_AITER_SAMPLER"


# In the process of the tests


@functools.cache
def _jobs() -> dict[tuple[str, bool], Future]:
    from shared import once

    pool = ThreadPoolExecutor(2)
    wanted = [(release, False) for release in RELEASES] + [(release, True) for release in DOORS]
    return {
        key: pool.submit(once, f"node-{'-'.join(map(str, key))}", functools.partial(_run, *key))
        for key in sorted(wanted)
    }


def report(release: str, side: str) -> dict:
    """What one side of a release did; all processes are started with the first question, two at a time."""
    return _jobs()[release, side == "doors"].result()[side]


def _run(release: str, doors: bool) -> dict:
    from releases import tree

    from vllm_rocm_fixes import node

    with tempfile.TemporaryDirectory() as folder:
        built = node.build(f"{folder}/node", version=release, vllm=tree(release), aiter="0.1.13")
        for aiter in AITERS:
            node.build(f"{folder}/{aiter}", version=release, packages=("aiter",), aiter=aiter)
        env = {k: v for k, v in os.environ.items() if not k.startswith(("ROCM_FIXES", "VLLM_PLUGINS"))}
        env = built.environment(env, **({} if doors else {"VLLM_PLUGINS": ""}))
        command = [sys.executable, __file__, folder, "doors" if doors else "stock,live,import"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=540)
        answer = Path(folder, "answer.json")
        assert done.returncode == 0 and answer.exists(), f"{release}:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        return json.loads(answer.read_text())


# On the node


def main(folder: str, sides: list[str]) -> None:
    import torch

    torch.set_num_threads(1)
    if "doors" not in sides:
        load_vllm()
    answers = {side: in_fork(one_side, side, folder) for side in sides}
    Path(folder, "answer.json").write_text(json.dumps(answers))


def one_side(side: str, folder: str) -> dict:
    if side in ("live", "import"):
        import vllm_rocm_fixes

        loaded = sys.modules.pop(SAMPLER) if side == "import" else None
        vllm_rocm_fixes.prepare()
        vllm_rocm_fixes.register()
        assert loaded is None or SAMPLER not in sys.modules
    module, has_probe = load_vllm()
    done = {
        "states": states(side),
        "failed_imports": in_fork(failed_imports, module),
        "switched_off": in_fork(switched_off, module),
        "requests": in_fork(requests, module),
    }
    if has_probe and side != "import":
        for aiter in AITERS:
            done[f"probe {aiter}"] = in_fork(probe, f"{folder}/{aiter}", False)
            done[f"probe {aiter} loaded"] = in_fork(probe, f"{folder}/{aiter}", True)
    return done


def load_vllm() -> tuple:
    """The sampler's module, and whether the configuration asks for the kernel; loads all that the scenarios need."""
    config = importlib.import_module("vllm.config")
    module = importlib.import_module(SAMPLER)
    module.HAS_TRITON = False  # as where triton finds no driver
    has_probe = hasattr(sys.modules["vllm._aiter_ops"], "check_aiter_fused_qk_rmsnorm")
    if has_probe:
        config.VllmConfig(optimization_level=0)  # doesn't ask
        pass_manager()
    return module, has_probe


def states(side: str) -> dict[str, list[str]]:
    if side == "stock":
        assert "vllm_rocm_fixes" not in sys.modules
        return {}
    import vllm_rocm_fixes

    results = vllm_rocm_fixes.current().results
    return {name: [r.state, r.reason] for name, r in results.items() if name in ("sampler", "aiter_ops")}


def failed_imports(module) -> dict:
    """For each failure of AITER's import: what making a sampler and asking it did."""
    done = {}
    for how in (*FAILURES, "KeyboardInterrupt"):
        for name in [n for n in sys.modules if n.partition(".")[0] == "aiter"]:
            del sys.modules[name]
        with failing(how, "sampling"):
            done[how] = asked(module)
    done["signal"] = asked(module, arm=stopped_while_importing)
    return done


def switched_off(module) -> dict:
    os.environ[OFF] = " Off "
    try:
        return asked(module)
    finally:
        del os.environ[OFF]


def requests(module) -> dict:
    """Requests of each kind to working samplers, in an order in which AITER's import shows, then failing kernels."""
    sampler_class = module.TopKTopPSampler
    start = len(events())
    makers = {mode: sampler_class(mode) for mode in ("raw_logprobs", "processed_logits", "processed_logprobs")}
    done = {"made": events()[start:], "signature": str(inspect.signature(sampler_class.forward_hip))}
    plain = makers["raw_logprobs"]
    done["none"] = one(plain, 5, "")
    done["generators"] = one(plain, 5, "kp", seeds={0: 11, 3: 12})
    done["all generators"] = one(plain, 1, "p", seeds={0: 11})
    for mode in ("processed_logits", "processed_logprobs"):
        done[mode] = one(makers[mode], 5, "kp")
    if "use_fp64_gumbel" in inspect.signature(sampler_class).parameters:
        done["fp64"] = one(sampler_class(use_fp64_gumbel=True), 5, "kp")
    for filters in ("k", "p", "kp"):
        for batch in (1, 5):
            done[f"{filters} {batch}"] = one(plain, batch, filters)
    done["failed calls"], done["failed later"] = {}, {}
    for how in (*FAILURES, "KeyboardInterrupt"):
        with failing(how, "call"):
            done["failed calls"][how] = asked(module)
        with contextlib.ExitStack() as later:

            def answer_once(sampler, how=how, later=later) -> None:
                one(sampler, 5, "kp")
                later.enter_context(failing(how, "call"))

            done["failed later"][how] = asked(module, arm=answer_once)
    done["spoilt"] = asked(module, arm=spoiling_kernel)
    done["signal"] = asked(module, arm=stopped_in_the_kernel)
    if hasattr(plain, "on_gfx1250"):
        done["gfx1250"] = gfx1250(sampler_class)
    return done


def gfx1250(sampler_class) -> dict:
    """The same for 0.33.0's other kernel, which has a row's own generator for a seeded request."""

    def fine(out, logits, exponential, temperatures, eps):
        out.copy_((logits.softmax(-1) / exponential).argmax(-1))

    def broken(*args, eps):
        raise SystemExit("[aiter] build module_sample failed")

    done = {}
    for kernel in (fine, broken):
        sys.modules["aiter"].mixed_sample_outer_exponential = kernel
        sampler = sampler_class()
        sampler.on_gfx1250 = True
        seeds = {1: 21, 2: 22}
        done[kernel.__name__] = told = {"raised": None, "said": [], "native": one(sampler, 5, "", seeds, native=True)}
        with listening(told["said"]):
            try:
                told["first"] = one(sampler, 5, "", seeds)
                told["stays native"] = sampler.forward == sampler.forward_native
            except BaseException as error:
                told["raised"] = type(error).__name__
    return done


def asked(module, arm=None) -> dict:
    """Make a sampler and ask it twice, and once past its forward: what was raised, said, imported and answered."""
    start = len(events())
    done = {"raised": None, "said": []}
    with listening(done["said"]):
        try:
            sampler = module.TopKTopPSampler()
            if arm is not None:
                arm(sampler)
            done["first"] = one(sampler, 5, "kp")
            before = len(events())
            done["second"] = one(sampler, 5, "kp")
            if hasattr(sampler, "aiter_ops"):
                done["past"] = one(sampler, 5, "kp", past=True)
            done["later"] = events()[before:]
            done["native"] = one(sampler, 5, "kp", native=True)
            done["stays native"] = sampler.forward == sampler.forward_native
        except BaseException as error:
            done["raised"] = type(error).__name__
    return done | {"events": events()[start:]}


def one(sampler, batch, filters, seeds=None, native=False, past=False) -> dict:
    """One request, always with the same logits and seeds: tokens, what was returned beside them, what AITER did."""
    import torch

    logits = torch.randn(batch, 32, generator=torch.Generator().manual_seed(1))
    k = torch.tensor([3, 9, 32, 1, 5][:batch], dtype=torch.int32) if "k" in filters else None
    p = torch.tensor([0.5, 0.9, 0.7, 1.0, 0.2][:batch]) if "p" in filters else None
    generators = {i: torch.Generator().manual_seed(seed) for i, seed in (seeds or {}).items()}
    start = len(events())
    torch.default_generator.manual_seed(7)
    forward = sampler.forward_native if native else sampler.forward_hip if past else sampler
    tokens, beside = forward(logits, generators, k, p)
    return {
        "tokens": tokens.tolist(),
        "beside": None if beside is None else beside.tolist(),
        "logits": logits.tolist(),
        "kp": [None if x is None else x.tolist() for x in (k, p)],
        "events": events()[start:],
        "random state": torch.default_generator.get_state().sum().item(),
    }


def spoiling_kernel(sampler) -> None:
    """A kernel that writes into what it was given before it fails."""

    def spoil(probs, *rest, **more):
        probs.zero_()
        raise RuntimeError("invalid configuration argument")

    sampler.aiter_ops = types.SimpleNamespace(top_k_top_p_sampling_from_probs=spoil)


def _stop_once() -> None:
    stopping = False

    def signal_handler(signum, frame):  # as in vLLM's workers: a second signal does nothing
        nonlocal stopping
        if not stopping:
            stopping = True
            raise SystemExit()

    signal.signal(signal.SIGTERM, signal_handler)


def stopped_in_the_kernel(sampler) -> None:
    """SIGTERM comes while a kernel is built."""
    _stop_once()

    def build(*args, **more):
        os.kill(os.getpid(), signal.SIGTERM)

    sampler.aiter_ops = types.SimpleNamespace(top_k_top_p_sampling_from_probs=build)


def stopped_while_importing(sampler) -> None:
    """SIGTERM comes while AITER is imported, and AITER makes an error of its own of it."""
    _stop_once()

    class Stopping:
        def find_spec(self, name, path=None, target=None):
            if name == "aiter.ops.sampling":
                try:
                    os.kill(os.getpid(), signal.SIGTERM)
                except SystemExit:
                    raise SystemExit("[aiter] build failed")
            return None

    sys.meta_path.insert(0, Stopping())
    sampler.aiter_ops = None


def probe(folder: str, loaded: bool) -> dict:
    """What the configuration and the pass manager make of one AITER, and what was imported meanwhile."""
    from vllm.config import VllmConfig, set_current_vllm_config

    sys.path.insert(0, folder)
    if loaded:
        importlib.import_module("aiter.ops")
    start = len(events())
    config = VllmConfig()
    flags = config.compilation_config.pass_config
    done = {"flag": flags.fuse_mla_dual_rms_norm, "events": events()[start:], "cache": cached()}
    for name in vars(flags):
        if name.startswith(("fuse_", "enable_")):
            setattr(flags, name, False)
    flags.fuse_mla_dual_rms_norm = done["flag"]
    added = []
    for asks in (False, True):  # the flag as the configuration left it, and as a user may have set it
        flags.fuse_mla_dual_rms_norm = asks or done["flag"]
        passes = pass_manager()
        with set_current_vllm_config(config):
            manager = passes.PostGradPassManager()
            manager.configure(config)
        added.append("MLADualRMSNormFusionPass" in [type(p).__name__ for p in manager.passes])
    return done | {"passes": added, "all events": events()[start:]}


def cached():
    return sys.modules["vllm._aiter_ops"]._AITER_HAS_FUSED_QK_RMSNORM


def pass_manager():
    """vLLM's pass manager, where its compiled operators are missing: they are only named while it is imported."""
    import torch
    from rocm_standin import Anything

    importlib.import_module("vllm._custom_ops")  # before: it registers the shapes of those that are there
    if not isinstance(vars(torch.ops).get("_C"), Anything):
        torch.ops._C = Anything("_C")
    passes = importlib.import_module("vllm.compilation.passes.pass_manager")
    if "__main__" in passes.MLADualRMSNormFusionPass.__module__:
        return passes

    class MLADualRMSNormFusionPass:
        def __init__(self, config):
            pass

    passes.MLADualRMSNormFusionPass = MLADualRMSNormFusionPass
    return passes


class failing:
    """AITER fails like that while this lasts."""

    def __init__(self, how: str, where: str) -> None:
        self.options = {"ROCM_STANDIN_AITER_FAILS": how, "ROCM_STANDIN_AITER_FAILS_AT": where}

    def __enter__(self) -> None:
        os.environ.update(self.options)

    def __exit__(self, *error: object) -> None:
        for name in self.options:
            del os.environ[name]


class listening(logging.Handler):
    """Collects what the sampler's logger says."""

    def __init__(self, said: list) -> None:
        super().__init__()
        self.said, self.logger = said, logging.getLogger("vllm.rocm_fixes.sampler")

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append([record.levelname, record.getMessage()])

    def __enter__(self) -> None:
        self.logger.addHandler(self)
        self.logger.setLevel("INFO")

    def __exit__(self, *error: object) -> None:
        self.logger.removeHandler(self)


def events() -> list[str]:
    """What AITER did in this process so far: `import NAME` and `call NAME`."""
    log = Path(os.environ["ROCM_STANDIN_LOG"])
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    mine = [e for e in lines if e["pid"] == os.getpid()]
    return [f"{e['kind']} {e['name']}" for e in mine if e["name"].partition(".")[0] == "aiter"]


def in_fork(function, *arguments):
    """What a function returns in a fork of this process. Raises RuntimeError with the fork's traceback."""
    sys.stdout.flush()
    with tempfile.NamedTemporaryFile("r") as file:
        child = os.fork()
        if child == 0:
            try:
                gpu = sys.modules.get("rocm_standin.gpu")
                if gpu is not None:  # the fork stands for a process of its own
                    gpu._Context.forked = gpu._Context.initialised = False
                text = json.dumps([function(*arguments), None])
            except BaseException:
                text = json.dumps([None, traceback.format_exc()])
            Path(file.name).write_text(text)
            os._exit(0)
        os.waitpid(child, 0)
        value, trouble = json.loads(file.read() or '[null, "the fork died"]')
    if trouble:
        raise RuntimeError(f"{function.__name__}{arguments}: {trouble}")
    return value


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2].split(","))
