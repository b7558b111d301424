"""What all benchmarks share: interleaved runs, medians with their spread, ratios of pairs, and tables of text."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
for folder in ("tests", "tools"):
    sys.path.insert(0, str(ROOT / folder))


@dataclass
class Table:
    """One table of results.md; goals are lines that say whether a goal was met."""

    title: str
    header: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    goals: list[str] = field(default_factory=list)

    def text(self) -> str:
        """The table in Markdown."""
        lines = [f"## {self.title}", "", f"| {' | '.join(self.header)} |", f"|{'---|' * len(self.header)}"]
        lines += [f"| {' | '.join(row)} |" for row in self.rows]
        return "\n".join([*lines, "", *(f"* {goal}" for goal in self.goals)]) + "\n"


def interleaved(sides: dict[str, Callable[[], Any]], repeat: int) -> dict[str, list[Any]]:
    """What each side gives, repeat times, one after the other, and the other way round in every second round."""
    found: dict[str, list[Any]] = {side: [] for side in sides}
    for number in range(repeat):
        for side in list(sides) if number % 2 == 0 else reversed(list(sides)):
            found[side].append(sides[side]())
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return found


def spread(values: Sequence[float], digits: int = 2, unit: str = "") -> str:
    """Median, and the range that holds the middle half."""
    low, high = quartiles(values)
    unit = f" {unit}" if unit else ""
    return f"{statistics.median(values):.{digits}f}{unit} ({low:.{digits}f} to {high:.{digits}f})"


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The edges of the middle half."""
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def ratio(ours: Sequence[float], other: Sequence[float]) -> list[float]:
    """The ratio of each pair."""
    return [a / b for a, b in zip(ours, other, strict=True)]


def neighbours(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """The ratio of two runs in succession where interleaved() ran one side twice: what no side explains."""
    sides = (first, second)
    return [sides[number % 2][number] / sides[number % 2][number - 1] for number in range(1, len(first))]


def goal(text: str, met: bool, why: str = "") -> str:
    """A line that says whether a goal was met, and why not where that is known."""
    return f"goal: {text}: {'met' if met else f'MISSED: {why}' if why else 'MISSED'}"


def ratio_goal(text: str, ratios: Sequence[float], limit: float, why: str = "", *, least: bool = False) -> str:
    """A goal of pairs, whose ratio may be limit at most, or is at least that: met, by its spread alone, or missed."""
    sign = -1 if least else 1
    limit, middle = sign * limit, sign * statistics.median(ratios)
    if middle > limit and min(sign * edge for edge in quartiles(ratios)) <= limit:
        return f"{goal(text, True)} by its spread alone"
    return goal(text, middle <= limit, why)


def environment(**extra: str) -> dict[str, str]:
    """This process's environment without what would change a measurement; .pyc files are written and used."""
    dropped = ("ROCM_FIXES", "VLLM_", "PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONSAFEPATH")
    return {**{k: v for k, v in os.environ.items() if not k.startswith(dropped)}, "OMP_NUM_THREADS": "1", **extra}


def child(code: str, *arguments: str, env: dict[str, str], cwd: Path | None = None) -> Any:
    """Run code in a new interpreter; the last line that it prints is JSON, and that is the answer."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=env, cwd=cwd, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"a measured process ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])
