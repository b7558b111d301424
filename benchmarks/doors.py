"""1. What we cost: the two doors in a process, and the import of each mended module against stock."""

from __future__ import annotations

import statistics
import tempfile

from measure import Table, child, environment, goal, spread

REPEAT = 15
# As vLLM does it: the platform door when current_platform is first asked for, the general one in EngineArgs.
DOORS = """
import json, sys, time
clock, cpu = time.perf_counter, time.process_time
begun = clock()
import torch, vllm.platforms, vllm.utils.import_utils
theirs = clock() - begun
def timed(action):
    modules, wall, used = set(sys.modules), clock(), cpu()
    action()
    done = 1000 * (clock() - wall), 1000 * (cpu() - used)
    return [*done, [m for m in set(sys.modules) - modules if not m.startswith("vllm_rocm_fixes")]]
def load():
    import vllm_rocm_fixes
    vllm_rocm_fixes.current()
parts = [timed(load)]
import vllm_rocm_fixes
parts.append(timed(vllm_rocm_fixes.prepare))
begun = clock()
import vllm.engine.arg_utils
theirs += clock() - begun
parts.append(timed(vllm_rocm_fixes.register))
def again():
    for _ in range(1000):
        vllm_rocm_fixes.prepare()
        vllm_rocm_fixes.register()
again()
print(json.dumps([parts, timed(again)[0], 1000 * theirs]))
"""
# By a timer around each part.
WHERE = (
    "more than half is the import of the overlay's ten files: finding, reading and running each, a fifth of it for "
    "the NamedTuples of patch.py alone; the rest is the new code in vllm.utils.import_utils, which vLLM has loaded by "
    "then, the look whether the files of the series are as they were at the last start, and the record. Less would "
    "take fewer files, or no verdicts in the log"
)
# What an import costs more is the way to the code; the code itself runs the same.
CODE = """
import json, sys, time
from types import SimpleNamespace
import vllm, vllm_rocm_fixes
from importlib.machinery import PathFinder
from vllm_rocm_fixes.process import Process
current = vllm_rocm_fixes.current()
vllm_rocm_fixes.prepare(); vllm_rocm_fixes.register()
found = {}
for module in dict.fromkeys(p.module for p in current.series):
    spec = PathFinder.find_spec(module, [str(current.site.root.joinpath(*module.split('.')[:-1]))])
    if spec is None or not module.startswith("vllm."):
        continue
    pairs = []
    for number in range(int(sys.argv[1])):
        def ours():
            process = Process(current.series, ())
            process.site = current.site
            begun = time.perf_counter()
            code = process._code(module, spec.loader, spec.origin) or spec.loader.get_code(module)
            return 1000 * (time.perf_counter() - begun)
        def stock():
            begun = time.perf_counter()
            spec.loader.get_code(module)
            return 1000 * (time.perf_counter() - begun)
        sides = (stock, ours) if number % 2 else (ours, stock)
        pair = {side.__name__: side() for side in sides}
        pairs.append([pair["stock"], pair["ours"]])
    found[module] = pairs[2:]
print(json.dumps(found))
"""


def run(repeat: int = REPEAT) -> list[Table]:
    """The tables of this benchmark."""
    with tempfile.TemporaryDirectory() as cache:
        env = environment(VLLM_PLUGINS="", ROCM_FIXES_CACHE=cache)
        cold = child(DOORS, env=env)
        found = [child(DOORS, env=env) for _ in range(repeat)]
        modules = child(CODE, str(max(repeat, 5) + 2), env=env)
    parts = [run[0] for run in found]
    walls, used = ([sum(part[column] for part in run) for run in parts] for column in (0, 1))
    extra = sorted({name for run in parts for part in run for name in part[2]})
    again = [run[1] for run in found]  # a thousand calls of each door took that many ms, so one takes that many µs
    doors = Table("What we cost: the doors", ("door", "wall", "processor"))
    for number, name in enumerate(("import of the overlay", "prepare()", "register()")):
        columns = [[run[number][column] for run in parts] for column in (0, 1)]
        doors.rows.append((name, *(spread(column, 2, "ms") for column in columns)))
    doors.rows.append(("together", spread(walls, 2, "ms"), spread(used, 2, "ms")))
    shares = [100 * wall / run[2] for wall, run in zip(walls, found, strict=True)]
    doors.rows.append(("together, beside vLLM's own imports in the same process", spread(shares, 2, "%"), ""))
    first = sum(part[0] for part in cold[0])
    doors.rows.append(("together, first start on a node: nothing is kept yet", f"{first:.0f} ms", ""))
    doors.rows.append(("both doors again", spread(again, 2, "µs"), ""))
    doors.goals = [
        goal("together under 5 ms", statistics.median(walls) < 5, WHERE),
        goal(f"no module loaded beyond vLLM's and ours (loaded: {', '.join(extra) or 'none'})", not extra),
        goal("a second call under 10 µs", statistics.median(again) < 10),
    ]
    table = Table("What we cost: the way to a module's code", ("module", "stock", "ours", "more"))
    slow = []
    for name, pairs in modules.items():
        stock, ours = ([pair[side] for pair in pairs] for side in (0, 1))
        more = [b - a for a, b in pairs]
        table.rows.append((name, *(spread(side, 2, "ms") for side in (stock, ours, more))))
        slow += [name] if statistics.median(more) >= 5 else []
    table.goals = [goal(f"within 5 ms{': not ' + ', '.join(slow) if slow else ''}", not slow)]
    return [doors, table]
