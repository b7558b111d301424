"""make contract: start every release on the stand-in node, and show what each step imports too early.

With the overlay (the default) nothing may be found, or tests/contract/known.py says why; anything else, and an entry of
that list that nothing matches any more, is a failure. With --stock the overlay is off, and nothing fails: that is what
stock vLLM does. `--stock --record` keeps it in tests/contract/stock.json and docs/contract.md, for the releases that
were run. With everything installed, each step has a process of its own, and a start takes about two minutes of one
processor; with fewer packages the steps share one, which is faster, and as good where nothing may be found.
"""

from __future__ import annotations

import argparse
import atexit
import shutil
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import contract  # noqa: E402
from contract import record  # noqa: E402
from contract.known import KNOWN  # noqa: E402
from releases import NIGHTLIES, releases  # noqa: E402

from vllm_rocm_fixes.start import STEPS, Start  # noqa: E402


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("releases", nargs="*", help="all, with two nightlies, where none is named")
    options.add_argument("--stock", action="store_true", help="with the overlay off")
    options.add_argument("--record", action="store_true", help="keep what stock does (only with --stock)")
    options.add_argument(
        "--sets", default="everything", help=f"of {', '.join(contract.SETS)}, with commas between them"
    )
    options.add_argument("--steps", default="", help="only these steps, with commas between them")
    options.add_argument("--parallel", type=int, default=2, help="starts at a time")
    chosen = options.parse_args()
    if chosen.record and not chosen.stock:
        options.error("--record keeps what stock does: it goes with --stock")
    wanted = chosen.releases or [*releases(), *NIGHTLIES]
    steps = tuple(filter(None, chosen.steps.split(",")))
    sets = chosen.sets.split(",")
    jobs = [
        contract.Job(release, packages, not chosen.stock, not chosen.stock and packages != "everything", steps)
        for release in wanted
        for packages in sets
    ]
    jobs.sort(
        key=lambda job: job.packages != "everything"
    )  # what a release's first start learns of model classes stays
    cache = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, cache, ignore_errors=True)
    futures = {future: job for job, future in contract.run_all(jobs, cache, chosen.parallel).items()}
    failed, used = 0, set()
    for future in as_completed(futures):
        job = futures[future]
        print(f"\nvLLM {job.release}, {job.packages}, {'stock' if chosen.stock else 'with the overlay'}")
        try:
            result = future.result()
        except Exception as error:  # one start must not end the others
            print(f"  FAIL {type(error).__name__}: {error}")
            failed += 1
            continue
        show(result, job.release)
        used |= {contract.why(found, job.release) for found in result.found}
        problems = [f"{step}: no end" for step in contract.missing(result, steps or STEPS)]
        if not chosen.stock:
            problems += contract.broken(result, job.release)
        for problem in problems:
            print(f"  FAIL {problem}")
        failed += bool(problems)
        if chosen.record:
            record.keep(job.release, job.packages, result)
        sys.stdout.flush()
    complete = not (chosen.stock or chosen.releases or chosen.steps) and "everything" in sets
    stale = [known for known in KNOWN if known not in used] if complete else []
    for known in stale:
        print(f"FAIL nothing matches any more: {known}")
    if chosen.record:
        record.write_table()
    print(f"\n{len(jobs)} starts, {failed} failed")
    return 1 if failed or stale else 0


def show(result: Start, release: str) -> None:
    """One line a step, then one line for each place that asked. * is known, + happened in a subprocess."""
    for step in (step for step in STEPS if step in result.outcomes or result.cell(step)):
        names = []
        for name in result.cell(step):
            found = [found for found in result.found if found.step == step and found.what == name]
            mark = "" if any(contract.why(each, release) is None for each in found) else "*"
            names.append(name + mark + ("+" if all(each.child for each in found) else ""))
        outcome = result.outcomes.get(step, "no end")
        print(f"  {step:14} {', '.join(names) or 'nothing'}{'' if outcome == 'ok' else f'  [{outcome[:90]}]'}")
    places: dict[str, dict[str, None]] = defaultdict(dict)
    for each in result.found:
        places[each.by][each.what] = None
    for by, what in sorted(places.items()):
        print(f"    {', '.join(what)}: {by}")


if __name__ == "__main__":
    sys.exit(main())
