"""What runs on a Ray cluster of the tests: a driver of plain tasks and actors, and one of vLLM's own executor.

python on_ray.py plain|executor|cpu: connects to the cluster in RAY_ADDRESS, and prints one line of JSON at the end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def report() -> dict:
    """What the overlay says of the process that this runs in, once vLLM's own loader has loaded the plugins."""
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    import vllm.v1.sample.ops.topk_topp_sampler  # noqa: F401  # mended as it is imported, where it isn't skipped

    states = {}
    if "vllm_rocm_fixes" in sys.modules:
        states = {name: r.state for name, r in sys.modules["vllm_rocm_fixes"].current().results.items()}
    handed = [name for name in current_platform.additional_env_vars if name.startswith("ROCM_FIXES")]
    return {"pid": os.getpid(), "states": states, "handed": handed, "skip": os.environ.get("ROCM_FIXES_SKIP")}


def shown() -> dict[int, dict]:
    """Those of this cluster's and this driver's processes that `vllm-rocm-fixes ps` shows, by process id."""
    command = [sys.executable, "-m", "vllm_rocm_fixes", "ps", "--json"]
    services = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)["services"]
    processes = [process for service in services for process in service["processes"]]
    return {process["pid"]: process for process in processes if ours(process)}


def ours(process: dict) -> bool:
    """A child of this process, whose title may have overwritten its environment, or one that knows the cluster."""
    if process["parent"] == os.getpid():
        return True
    try:
        return os.environ["RAY_AUTH_TOKEN"].encode() in Path(f"/proc/{process['pid']}/environ").read_bytes()
    except OSError:  # it has ended, and was somebody else's
        return False


def plain() -> dict:
    """An actor and a task with the driver's variables, as vLLM's executor chooses them, and a task without plugins."""
    import ray
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins
    from vllm.ray.ray_env import get_env_vars_to_copy

    load_general_plugins()
    names = get_env_vars_to_copy(additional_vars=set(current_platform.additional_env_vars))
    variables = {name: os.environ[name] for name in names if name in os.environ}

    class Holder:
        def ask(self) -> dict:
            return report()

    ray.init(log_to_driver=False)
    handed = {"num_cpus": 1, "runtime_env": {"env_vars": variables}}
    stock = {"num_cpus": 1, "runtime_env": {"env_vars": {"VLLM_PLUGINS": ""}}}
    actor = ray.remote(**handed)(Holder).remote()
    asked = {"actor": actor.ask.remote(), "task": ray.remote(**handed)(report).remote()}
    answers = {name: ray.get(reference) for name, reference in asked.items()}
    processes = shown()
    answers["stock"] = ray.get(ray.remote(**stock)(report).remote())
    ray.shutdown()
    return {**answers, "ps": {name: processes.get(answer["pid"]) for name, answer in answers.items()}}


def executor() -> dict:
    """vLLM's engine with its executor over Ray: two workers, an answer, and what `ps` shows meanwhile."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=os.environ["MODEL"],
        distributed_executor_backend="ray",
        tensor_parallel_size=2,
        max_model_len=64,
        max_num_seqs=2,
        enforce_eager=True,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
    )
    request = SamplingParams(max_tokens=4, temperature=0.8, top_k=20, top_p=0.9, seed=1, detokenize=False)
    tokens = llm.generate([{"prompt_token_ids": [1, 2, 3]}], request)[0].outputs[0].token_ids
    return {"tokens": len(tokens), "ps": list(shown().values())}


def cpu() -> dict:
    """What vLLM's executor says on the CPU platform as it is, before it starts a worker."""
    from vllm.config import ParallelConfig
    from vllm.v1.executor.ray_utils import initialize_ray_cluster

    try:
        initialize_ray_cluster(ParallelConfig())
    except ValueError as error:
        return {"error": str(error)}
    return {}


if __name__ == "__main__":
    print(json.dumps({"plain": plain, "executor": executor, "cpu": cpu}[sys.argv[1]]()))
