"""4. A request: forward_hip of 0.33.0 with a stand-in AITER op, mended against upstream's own."""

from __future__ import annotations

import tempfile

from measure import Table, child, environment, ratio, ratio_goal, spread

REPEAT = 9
RELEASE = "0.33.0"
BATCHES = (1, 256)
# The op does nothing: what is measured is the way to it. Both sides take turns in one process: in two of them the same
# work differs by more than what is measured here.
CODE = """
import importlib.util, json, sys, time
import torch
torch.set_num_threads(1)
from vllm.plugins import load_general_plugins
load_general_plugins()
import vllm.config
import vllm.v1.sample.ops.topk_topp_sampler as module
import aiter.ops.sampling
spec = importlib.util.spec_from_file_location("stock_sampler", module.__file__)
stock = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stock)
samplers = [source.TopKTopPSampler() for source in (stock, module)]
done = []
for batch in map(int, sys.argv[1:]):
    logits, k, p = torch.rand(batch, 512), torch.full((batch,), 20), torch.full((batch,), 0.9)
    tokens = torch.zeros(batch, dtype=torch.long)
    class Ops:
        def __getattr__(self, name):
            return lambda *arguments, **named: tokens
    times = [], []
    for sampler in samplers:
        sampler.aiter_ops = Ops()
    for turn in range(600):
        for side in (0, 1) if turn % 2 else (1, 0):
            begun = time.perf_counter()
            samplers[side].forward_hip(logits, {}, k, p)
            times[side].append(time.perf_counter() - begun)
    done.append([1e6 * sorted(of)[len(of) // 2] for of in times])
same = stock.TopKTopPSampler.forward_hip.__code__.co_code == module.TopKTopPSampler.forward_hip.__code__.co_code
mended = sys.modules["vllm_rocm_fixes"].current().results["sampler"].state
print(json.dumps([done, mended == "applied" and not same]))
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
        env = built.environment(environment(ROCM_FIXES_CACHE=folder))
        found = [child(CODE, *map(str, BATCHES), env=env) for _ in range(repeat)]
    if not all(differ for _, differ in found):
        raise RuntimeError("one side isn't stock's, or the other isn't mended")
    table = Table(f"A request: forward_hip, {RELEASE}", ("batch", "stock", "ours", "ours : stock"))
    for number, batch in enumerate(BATCHES):
        stock, ours = ([times[number][side] for times, _ in found] for side in (0, 1))
        ratios = ratio(ours, stock)
        table.rows.append((str(batch), spread(stock, 1, "µs"), spread(ours, 1, "µs"), spread(ratios, 3)))
        table.goals.append(ratio_goal(f"ratio 1.00 at batch {batch}", ratios, 1.005, WHY))
    return [table]
