"""5. The commands: `status` and `diff` of everything."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from measure import Table, environment, goal, interleaved, spread

REPEAT = 9
RELEASE = "0.33.0"
LIMITS = {"status": 0.5, "diff": 1.0}
WHY = {
    "diff": "a third is Python's parser, which reads each mended module three times: to mend it, to align the mended "
    "tree with it, and to compare what was written with that tree; the rest is examining, mending and aligning"
}


def run(repeat: int = REPEAT) -> list[Table]:
    """The tables of this benchmark."""
    from releases import tree

    where = ["--vllm", str(tree(RELEASE))]

    def command(*arguments: str) -> Callable[[], float]:
        def once() -> float:
            begun = time.perf_counter()
            subprocess.run([sys.executable, *arguments], env=environment(), capture_output=True, check=True)
            return time.perf_counter() - begun

        return once

    sides = {"python -c pass": command("-c", "pass")}
    sides |= {name: command("-m", "vllm_rocm_fixes", name, *where) for name in LIMITS}
    for once in sides.values():
        once()
    found = interleaved(sides, repeat)
    table = Table(f"The commands, on the sources of {RELEASE}", ("command", "wall"))
    table.rows = [(name, spread(values, 2, "s")) for name, values in found.items()]
    table.goals = [
        goal(f"{name} under {limit} s", statistics.median(found[name]) < limit, WHY.get(name, ""))
        for name, limit in LIMITS.items()
    ]
    return [table]
