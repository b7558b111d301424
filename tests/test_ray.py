"""vLLM over Ray, the real one: a local cluster of two workers, which has none of the switches in its environment.

That is how a cluster stands: `ray start` ran on each node before, and the switches are set where the driver starts.

How far vLLM's own executor goes here (0.32.0, CPU build): CpuPlatform names no Ray resource, so the executor says
"does not support ray" before it starts a worker. With a platform plugin of the test that names one and is otherwise
CpuPlatform, RayExecutorV2 goes all the way: it starts two RayWorkerProc actors with tensor parallelism 2, hands the
driver's variables on, loads a model of two layers and answers a request that is sampled with top-k and top-p. With
pipeline parallelism 2 both workers start, and the CPU model runner of 0.32.0 fails at the first request. What stays for
an AMD cluster: RocmPlatform's devices, RCCL, several nodes, and the older executor with compiled graphs (to 0.32.0).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

HEAD = """
import sys
import ray
made = ray.init(num_cpus=2, num_gpus=2, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
print(made.address_info["gcs_address"], flush=True)
sys.stdin.read()
ray.shutdown()
"""
# CpuPlatform, but for the name of a resource: the two GPUs of the cluster are a number and nothing more.
PLATFORM = """
from vllm.platforms.cpu import CpuPlatform
class RayCpuPlatform(CpuPlatform):
    ray_device_key = "GPU"
def plugin():
    return "ray_cpu_platform.RayCpuPlatform"
"""
MODEL = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 256},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2, "vocab_size": 512},
    **{"max_position_embeddings": 128, "hidden_act": "silu", "rms_norm_eps": 1e-5, "bos_token_id": 1},
    **{"eos_token_id": 2, "tie_word_embeddings": False},
}
SKIPPED = "sampler"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The environment of a driver; the cluster's own has no switch, and ends with the module."""
    folder = tmp_path_factory.mktemp("ray")
    (folder / "run").mkdir(mode=0o700)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    plugin = folder / "plugin"
    info = plugin / "ray_cpu_platform-0.dist-info"
    info.mkdir(parents=True)
    (plugin / "ray_cpu_platform.py").write_text(PLATFORM)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ray_cpu_platform\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[vllm.platform_plugins]\nray_cpu = ray_cpu_platform:plugin\n")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("ROCM_FIXES", "VLLM_", "RAY_"))}
    env |= {"XDG_RUNTIME_DIR": str(folder / "run"), "MODEL": str(folder / "model")}
    env |= {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(plugin)])}  # what Ray's workers import
    env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    env |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    if "ROCM_FIXES_CACHE" in os.environ:  # where mended code is kept: no switch of a patch
        env["ROCM_FIXES_CACHE"] = os.environ["ROCM_FIXES_CACHE"]
    with (folder / "head.log").open("w") as log:
        head = subprocess.Popen(
            [sys.executable, "-c", HEAD], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )
        try:
            address = head.stdout.readline().strip()
            assert address, (folder / "head.log").read_text()[-3000:]
            yield {**env, "RAY_ADDRESS": address, "ROCM_FIXES_SKIP": SKIPPED}
        finally:
            head.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                head.wait(30)
            head.kill()
            head.wait()


def driver(env, what):
    script = Path(__file__).with_name("on_ray.py")
    done = subprocess.run([sys.executable, script, what], env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


def states(process):
    return {name: patch["state"] for name, patch in process["patches"].items()}


@pytest.fixture(scope="module")
def plain(cluster):
    return driver({**cluster, "VLLM_PLUGINS": "rocm_fixes,cpu"}, "plain")


@pytest.mark.parametrize("kind", ["task", "actor"])
def test_a_task_and_an_actor_that_load_the_plugins_are_mended_and_shown(plain, kind):
    assert plain["stock"]["states"] == {}, "without plugins nothing is mended"
    said = plain[kind]
    assert said["states"]["import_utils"] == "applied" and said["states"]["all2all_utils"] == "waiting"
    shown = plain["ps"][kind]
    assert shown["role"].startswith("Ray worker") and states(shown) == said["states"]


@pytest.mark.parametrize("kind", ["task", "actor"])
def test_the_switches_reach_them_by_the_names_that_the_platform_hands_on(plain, kind):
    assert plain[kind]["skip"] == SKIPPED and plain[kind]["states"]["sampler"] == "skipped"
    assert "ROCM_FIXES_SKIP" in plain[kind]["handed"] and plain["stock"]["skip"] is None


def test_the_cpu_platform_has_no_executor_over_ray(cluster):
    said = driver({**cluster, "VLLM_PLUGINS": "rocm_fixes"}, "cpu")
    assert "does not support ray" in said["error"]


@pytest.mark.skipif(
    "RAY_EXECUTOR" not in os.environ,
    reason="vLLM's executor over Ray sometimes never starts on two busy cores: RAY_EXECUTOR=1 runs it",
)
def test_vllms_own_executor_answers_with_two_mended_workers(cluster):
    """The workers import vLLM before the driver's variables reach them, and the switches are followed all the same."""
    said = driver(cluster, "executor")
    assert said["tokens"] == 4
    workers = [p for p in said["ps"] if "Ray" in p["role"]]
    assert len(workers) == 2, [p["role"] for p in said["ps"]]
    for worker in workers:
        found = states(worker)
        assert found["import_utils"] == "applied" and found["sampler"] == "skipped", worker
    assert {"EngineCore"} < {p["role"] for p in said["ps"]} and len(said["ps"]) >= 4
    assert {states(p)["sampler"] for p in said["ps"] if p["patches"]} == {"skipped"}
