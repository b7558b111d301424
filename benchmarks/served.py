"""2. and 4. `vllm serve` until it is ready, and tokens per second, with and without the overlay.

From one run to the next a start may take a tenth more or less: the ratio of two runs of one side says how much it was.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil  # vLLM brings it: the processor time of a whole process tree
from measure import Table, environment, interleaved, neighbours, ratio, ratio_goal, spread

REPEAT = 9
REQUESTS, TOKENS = 5, 40
WHY = "compare the ratio of two runs of one side, which isn't the overlay's; what needs no clock is counted below"


def run(repeat: int = REPEAT) -> list[Table]:
    """The tables of this benchmark."""
    import serve as server

    def started(plugins: str) -> Callable[[], tuple[float, ...]]:
        def once() -> tuple[float, ...]:
            with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
                begun = time.perf_counter()
                with server.serving(Path(folder, "log"), {"VLLM_PLUGINS": plugins}) as running:
                    ready = time.perf_counter() - begun
                    used = processor(running.process.pid)
                    running.ask(max_tokens=4)
                    begun = time.perf_counter()
                    for seed in range(REQUESTS):
                        running.ask(seed=seed, min_tokens=TOKENS, max_tokens=TOKENS)
                    return ready, used, REQUESTS * TOKENS / (time.perf_counter() - begun)

        return once

    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ.update({k: v for k, v in environment().items() if k == "OMP_NUM_THREADS"})
    sides = {"without": started(""), "with": started("rocm_fixes")}
    for side in sides.values():
        side()  # caches, .pyc files and kept code are there in both
    found = interleaved(sides, repeat)
    tables = []
    for column, title, unit in (
        (0, f"`vllm serve` until ready, {repeat} pairs", "s"),
        (1, f"`vllm serve` until ready, processor time of all its processes, {repeat} pairs", "s"),
        (2, f"Tokens per second of a served model, {repeat} pairs", "tokens/s"),
    ):
        values = {side: [run[column] for run in runs] for side, runs in found.items()}
        ratios = ratio(values["with"], values["without"])
        table = Table(title, ("side", "median (middle half)"))
        table.rows = [(f"{side} the overlay", spread(each, 2, unit)) for side, each in values.items()]
        table.rows.append(("ratio of pairs, with : without", spread(ratios, 3)))
        if noise := neighbours(values["without"], values["with"]):
            table.rows.append(("two runs of one side in succession, second : first", spread(noise, 3)))
        if column == 0:
            table.goals = [ratio_goal("ratio not above 1.00 within its spread", ratios, 1.0, WHY)]
        if column == 2:
            table.goals = [ratio_goal("ratio 1.00 within its spread", ratios, 1.0, WHY, least=True)]
        tables.append(table)
    return tables


def processor(pid: int) -> float:
    """The seconds of processor time that a process and all its children have used, those that have ended included."""
    server = psutil.Process(pid)
    return sum(sum(each.cpu_times()[:4]) for each in [server, *server.children(recursive=True)])
