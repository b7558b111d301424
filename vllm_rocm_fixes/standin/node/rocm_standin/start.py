"""python -m rocm_standin.start [--together] [STEP ...]: the import path of a vLLM start, step by step.

The first step imports vllm.config, as every start does. The other steps are forks of that process, so each of them is a
fresh process that has imported vllm.config and nothing else, and none sees what another one did. With --together they
run in that one process, which is faster, and as good where nothing at all must be found. A step that needs a child
forks or spawns one. What happens is in the event log, labelled by step; the end of a step is an event with its outcome.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from . import OPTIONS, gpu, models, write

_EP = "vllm.model_executor.layers.fused_moe.all2all_utils"
_WORKER = "vllm.v1.worker.gpu_worker"
_SAMPLER = "vllm.v1.sample.ops.topk_topp_sampler"


def _label(step: str) -> None:
    os.environ[OPTIONS + "STEP"] = step


def _config(model: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(model=str(model), max_model_len=256, skip_tokenizer_init=True, enable_prefix_caching=False)
    args.create_engine_config()


def _sampler() -> None:
    importlib.import_module(_SAMPLER).TopKTopPSampler()


def _jit_monitor() -> None:
    """What every worker does at the end of its warm-up, in the releases that have it."""
    try:
        monitor = importlib.import_module("vllm.utils.jit_monitor")
    except ModuleNotFoundError:
        return
    monitor.activate()


def _worker() -> None:
    """What a worker does first: the plugins, its modules, a sampler."""
    importlib.import_module("vllm.plugins").load_general_plugins()
    importlib.import_module(_WORKER)
    importlib.import_module(_EP)
    _sampler()


def _forked() -> None:
    """A worker by fork: it must be able to use the GPU, so its parent must not have initialised HIP."""
    _worker()
    import torch

    _label("")  # from here on the GPU is needed
    torch.cuda.get_device_properties(0)


def _spawned() -> None:
    """A worker by spawn: a new interpreter, with the environment and path of its parent."""
    _worker()
    for where, entries in (("PYTHONPATH", os.environ.get("PYTHONPATH", "").split(os.pathsep)), ("path", sys.path)):
        found = [entry for entry in entries if "tilelang" in entry]
        if found:
            raise RuntimeError(f"{where} holds {found[0]}")


def _guarded(step: str, action: Callable[[], None]) -> None:
    _label(step)
    try:
        action()
        outcome = "ok"
    except BaseException as error:
        import traceback

        traceback.print_exc()
        outcome = f"{type(error).__name__}: {error}"
    write("step", step, outcome)
    sys.stdout.flush()
    sys.stderr.flush()


def _in_fork(step: str, action: Callable[[], None], same_process: bool) -> None:
    child = os.fork()
    if child:
        if os.waitpid(child, 0)[1]:
            _label(step)
            write("step", step, "the process died")
        return
    if same_process:
        gpu.keep_context()
    _guarded(step, action)
    os._exit(0)


def _children(model: Path) -> None:
    """From a process that has made a configuration, a worker by fork and one by spawn."""
    _config(model)
    _in_fork("forked child", _forked, same_process=False)
    _label("spawned child")
    child = multiprocessing.get_context("spawn").Process(target=_guarded, args=("spawned child", _spawned))
    child.start()
    child.join()


STEPS: dict[str, str] = {
    "worker": _WORKER,
    "all2all_utils": _EP,
    "kernel_warmup": "vllm.model_executor.warmup.kernel_warmup",
    "fa_utils": "vllm.v1.attention.backends.fa_utils",
}


def main(wanted: list[str], together: bool) -> None:
    """Run the steps that were named, or all of them."""
    _guarded("vllm.config", lambda: (importlib.import_module("vllm.config"), None)[1])
    with tempfile.TemporaryDirectory() as folder:
        models.make(Path(folder))
        actions: dict[str, Callable[[], None]] = {}
        for name in models.MODELS:
            actions[f"config {name}"] = lambda model=Path(folder) / name: _config(model)
        for name, module in STEPS.items():
            actions[name] = lambda module=module: (importlib.import_module(module), None)[1]
        actions["sampler"] = _sampler
        actions["jit_monitor"] = _jit_monitor
        actions["children"] = lambda: _children(Path(folder) / "dense")
        for step, action in actions.items():
            if wanted and step not in wanted:
                continue
            if together:
                _guarded(step, action)
            else:
                _in_fork(step, action, same_process=True)


if __name__ == "__main__":
    main([name for name in sys.argv[1:] if name != "--together"], "--together" in sys.argv)
