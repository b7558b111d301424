"""2. and 4. `vllm serve` until it is ready, and tokens per second, with and without the overlay."""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from measure import Table, environment, goal, interleaved, quartiles, ratio, spread

REPEAT = 7
REQUESTS, TOKENS = 5, 40


def run(repeat: int = REPEAT) -> list[Table]:
    """The tables of this benchmark."""
    import serve as server

    def started(plugins: str) -> Callable[[], tuple[float, float]]:
        def once() -> tuple[float, float]:
            with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
                begun = time.perf_counter()
                with server.serving(Path(folder, "log"), {"VLLM_PLUGINS": plugins}) as running:
                    ready = time.perf_counter() - begun
                    running.ask(max_tokens=4)
                    begun = time.perf_counter()
                    for seed in range(REQUESTS):
                        running.ask(seed=seed, min_tokens=TOKENS, max_tokens=TOKENS)
                    return ready, REQUESTS * TOKENS / (time.perf_counter() - begun)

        return once

    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ.update({k: v for k, v in environment().items() if k == "OMP_NUM_THREADS"})
    sides = {"without": started(""), "with": started("rocm_fixes")}
    for side in sides.values():
        side()  # caches, .pyc files and kept code are there in both
    found = interleaved(sides, repeat)
    tables = []
    for column, title, unit, what in (
        (0, f"`vllm serve` until ready, {repeat} pairs", "s", "not above 1.00 within its spread"),
        (1, f"Tokens per second of a served model, {repeat} pairs", "tokens/s", "1.00 within its spread"),
    ):
        values = {side: [run[column] for run in runs] for side, runs in found.items()}
        ratios = ratio(values["with"], values["without"])
        table = Table(title, ("side", "median (middle half)"))
        table.rows = [(f"{side} the overlay", spread(each, 2, unit)) for side, each in values.items()]
        table.rows.append(("ratio of pairs, with : without", spread(ratios, 3)))
        low, high = quartiles(ratios)
        met = low <= 1.0 or statistics.median(ratios) <= 1.0 if column == 0 else high >= 1.0
        table.goals = [goal(f"ratio {what}", met)]
        tables.append(table)
    return tables
