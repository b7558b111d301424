"""4. A request: forward_hip of 0.33.0 with a stand-in AITER op, mended against upstream's own."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable

from measure import Table, child, environment, goal, interleaved, quartiles, ratio, spread

REPEAT = 9
RELEASE = "0.33.0"
BATCHES = (1, 256)
# The op does nothing: what is measured is the way to it.
CODE = """
import json, sys, time
import torch
torch.set_num_threads(1)
from vllm.plugins import load_general_plugins
load_general_plugins()
import vllm.config
import vllm.v1.sample.ops.topk_topp_sampler as module
import aiter.ops.sampling
sampler = module.TopKTopPSampler()
done = []
for batch in map(int, sys.argv[1:]):
    logits, k, p = torch.rand(batch, 512), torch.full((batch,), 20), torch.full((batch,), 0.9)
    tokens = torch.zeros(batch, dtype=torch.long)
    class Ops:
        def __getattr__(self, name):
            return lambda *arguments, **named: tokens
    sampler.aiter_ops = Ops()
    times = []
    for _ in range(300):
        begun = time.perf_counter()
        sampler.forward_hip(logits, {}, k, p)
        times.append(time.perf_counter() - begun)
    done.append(1e6 * sorted(times)[len(times) // 2])
mended = sys.modules.get("vllm_rocm_fixes")
print(json.dumps([done, mended is not None and mended.current().results["sampler"].state]))
"""

WHY = (
    "a call of its own, with `try`, `with` and an import statement that finds what a module before it loaded, "
    "beside a kernel that does nothing"
)


def run(repeat: int = REPEAT) -> list[Table]:
    """The tables of this benchmark."""
    from releases import tree

    from vllm_rocm_fixes import node

    with tempfile.TemporaryDirectory() as folder:
        built = node.build(f"{folder}/node", version=RELEASE, vllm=tree(RELEASE), packages=("aiter",))

        def side(**switches: str) -> Callable[[], list[float]]:
            def once() -> list[float]:
                env = built.environment(environment(ROCM_FIXES_CACHE=folder), **switches)
                times, state = child(CODE, *map(str, BATCHES), env=env)
                if (state == "applied") == bool(switches):
                    raise RuntimeError(f"the sampler is {state} with {switches}")
                return list(times)

            return once

        found = interleaved({"stock": side(VLLM_PLUGINS=""), "ours": side()}, repeat)
    table = Table(f"A request: forward_hip, {RELEASE}", ("batch", "stock", "ours", "ours : stock"))
    for number, batch in enumerate(BATCHES):
        stock, ours = ([run[number] for run in found[name]] for name in ("stock", "ours"))
        ratios = ratio(ours, stock)
        table.rows.append((str(batch), spread(stock, 1, "µs"), spread(ours, 1, "µs"), spread(ratios, 3)))
        low, _ = quartiles(ratios)
        met = min(low, statistics.median(ratios)) <= 1.005
        table.goals.append(goal(f"ratio 1.00 at batch {batch}", met, WHY))
    return [table]
