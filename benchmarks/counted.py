"""2. and 4. again, counted: what Python calls in a start and in a request doesn't depend on a machine's pace."""

from __future__ import annotations

import statistics
from functools import partial

from measure import Table, child, environment, goal, interleaved, ratio

REPEAT = 2
TOKENS = 40
COUNT = """
import cProfile, json, os, pstats, sys
def counted(work):
    profile = cProfile.Profile()
    profile.runcall(work)
    found = pstats.Stats(profile)
    assert ("vllm_rocm_fixes" in sys.modules) == bool(os.environ["VLLM_PLUGINS"]), "the wrong side"
    ours = [entry for (file, *_), entry in found.stats.items() if "/vllm_rocm_fixes/" in file]
    return found.total_calls, sum(entry[1] for entry in ours), 1000 * sum(entry[2] for entry in ours)
"""
START = """
def work():
    from vllm.plugins import load_general_plugins
    load_general_plugins()
    import vllm.entrypoints.openai.api_server, vllm.v1.engine.core, vllm.v1.worker.cpu_worker
    import vllm.v1.worker.cpu_model_runner, vllm.model_executor.models.llama
print(json.dumps(counted(work)))
"""
REQUEST = """
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], max_model_len=512, enforce_eager=True, dtype="bfloat16", gpu_memory_utilization=0.3,
          distributed_executor_backend="uni")
tokens = int(sys.argv[2])
sampling = SamplingParams(temperature=0.7, top_k=20, top_p=0.9, seed=7, min_tokens=tokens, max_tokens=tokens)
def work():
    llm.generate(["What is the capital of France?"], sampling, use_tqdm=False)
work()
print(json.dumps(counted(work)))
"""
ALONE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def run(repeat: int = REPEAT) -> list[Table]:
    """The table of this benchmark."""
    import model
    import serve

    folder = str(model.make())
    table = Table(
        "Counted: calls of Python functions, by cProfile, in one process",
        (
            "work",
            *(f"{what}, least to most" for what in ("without", "with", "with : without")),
            "in the overlay's own files",
        ),
    )
    for what, code, arguments in (
        ("imports of server, engine and worker", START, ()),
        (f"a request of {TOKENS} tokens, after one like it", REQUEST, (folder, str(TOKENS))),
    ):
        sides = {
            plugins: partial(
                child, COUNT + code, *arguments, env=environment(VLLM_PLUGINS=plugins, **ALONE, **serve.ENVIRONMENT)
            )
            for plugins in ("", "rocm_fixes")
        }
        for side in sides.values():
            side()  # caches, .pyc files and kept code are there in both
        found = interleaved(sides, repeat)
        without, ours = ([calls for calls, *_ in runs] for runs in found.values())
        ratios = ratio(ours, without)
        own, spent = (statistics.median(run[number] for run in found["rocm_fixes"]) for number in (1, 2))
        sums = [f"{statistics.median(calls):,.0f} ({min(calls):,} to {max(calls):,})" for calls in (without, ours)]
        middle = f"{statistics.median(ratios):.4f} ({min(ratios):.4f} to {max(ratios):.4f})"
        table.rows.append((what, *sums, middle, f"{own:,.0f} calls, {spent:.1f} ms with the profiler's own"))
        table.goals.append(goal(f"{what}: ratio 1.00", max(ratios) <= 1.005))
    return [table]
