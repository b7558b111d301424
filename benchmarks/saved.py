"""3. What we save: configuration and worker imports on the stand-in node, with the real TileLang and FlashInfer there.

stock; ours; and the limit: stock where those packages aren't installed. AITER is the stand-in, on all sides.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import Table, child, environment, goal, interleaved, ratio, ratio_goal, spread

REPEAT = 5
RELEASES = ("0.23.0", "0.26.0", "0.27.1", "0.33.0")
FLASHINFER = "flashinfer-python==0.6.18.post1"
# The tvm-ffi that ROCm's requirements pin, and an xgrammar that takes it: there on all sides.
COMMON = ("apache-tvm-ffi==0.1.10", "xgrammar==0.2.1")
WORKERS = 8
START = """
import json, os, sys, time
from pathlib import Path
from rocm_standin import models, start
folder = Path(sys.argv[1])
models.make(folder)
opened = [0]
def count(event, arguments):
    if event == "open":
        opened[0] += 1
sys.addaudithook(count)
begun, used = time.perf_counter(), time.process_time()
start._config(folder / "fp8")  # a quantised model: its configuration imports the most
start._worker()
wall, used = time.perf_counter() - begun, time.process_time() - used
kilobytes = int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1])
loaded = [name for name in ("tilelang", "tvm", "flashinfer") if sys.modules.get(name)]
print(json.dumps([wall, used, kilobytes / 1024, len(sys.modules), opened[0], loaded]))
"""
WHY = (
    "what ours does beside the limit is in the tables of the doors and of the way to a module's code, together less "
    "than a hundredth of this start; the rest is the machine, whose speed changes from minute to minute"
)
MEASURES = (
    ("wall time", "s", 2),
    ("processor time", "s", 2),
    ("memory", "MiB", 0),
    ("modules", "", 0),
    ("files", "", 0),
)


def run(repeat: int = REPEAT) -> list[Table]:
    """The tables of this benchmark."""
    return [_release(release, repeat) for release in RELEASES]


def _release(release: str, repeat: int) -> Table:
    from releases import tree
    from wheels import site, tilelang

    from vllm_rocm_fixes import node

    common = [site(*COMMON)]
    packages = [*common, tilelang("0.1.10"), site(FLASHINFER)]
    with tempfile.TemporaryDirectory() as folder:
        built = node.build(f"{folder}/node", version=release, vllm=tree(release), packages=("aiter",))

        def side(installed: bool, **switches: str) -> Callable[[], list[Any]]:
            def once() -> list[Any]:
                path = ":".join(map(str, packages if installed else common))
                env = environment(PYTHONPATH=path, ROCM_FIXES_CACHE=folder)
                answer: list[Any] = child(START, folder, env=built.environment(env, **switches), cwd=Path(folder))
                return answer

            return once

        sides = {
            "stock": side(True, VLLM_PLUGINS=""),
            "ours": side(True),
            "limit": side(False, VLLM_PLUGINS=""),
        }
        for once in sides.values():
            once()  # .pyc files, vLLM's and our caches
        found = interleaved(sides, repeat)
    loaded = {name: ", ".join(runs[-1][5]) or "none" for name, runs in found.items()}
    said = "; ".join(f"{name}: {what}" for name, what in loaded.items())
    table = Table(f"What we save: {release}", ("", "stock", "ours", "limit", "ours : stock", "ours : limit"))
    for number, (name, unit, digits) in enumerate(MEASURES):
        values = {side: [run[number] for run in runs] for side, runs in found.items()}
        columns = [spread(values[side], digits, unit) for side in ("stock", "ours", "limit")]
        ratios = [spread(ratio(values["ours"], values[other]), 3) for other in ("stock", "limit")]
        table.rows.append((name, *columns, *ratios))
    walls = {side: [run[0] for run in runs] for side, runs in found.items()}
    memory = {side: statistics.median(run[2] for run in runs) for side, runs in found.items()}
    second = statistics.median(walls["stock"]) - statistics.median(walls["ours"])
    megabytes = memory["stock"] - memory["ours"]
    within = "ours within 2 % of the limit, in wall time and memory"
    small = memory["ours"] <= 1.02 * memory["limit"]
    table.goals = [
        f"loaded by {said}",
        f"a node with {WORKERS} workers: {WORKERS} times {second:.2f} s is {WORKERS * second:.1f} s of start, "
        f"{WORKERS} times {megabytes:.0f} MiB is {WORKERS * megabytes:.0f} MiB",
        ratio_goal(within, ratio(walls["ours"], walls["limit"]), 1.02, WHY) if small else goal(within, False),
    ]
    return table
