"""make contract: start every release on the stand-in node, and show what each step imports too early.

python tools/contract.py [--stock] [--sets image,pip,everything] [--json FILE] [--parallel 2] [RELEASE ...]

With the overlay (the default) nothing may be found, or tests/contract/known.py says why; anything else, and an entry of
that list that nothing matches, is a failure. With --stock the overlay is off: that is the record of what stock vLLM
does, which docs/contract.md shows. Each start takes about a minute; two run at a time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import contract  # noqa: E402
from contract.known import KNOWN  # noqa: E402
from releases import NIGHTLIES, releases  # noqa: E402

from vllm_rocm_fixes.start import STEPS, Start  # noqa: E402


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("releases", nargs="*")
    options.add_argument("--stock", action="store_true", help="with the overlay off")
    options.add_argument("--sets", default=",".join(contract.SETS), help="sets of packages, with commas between them")
    options.add_argument("--json", type=Path, help="write what was found to this file")
    options.add_argument("--steps", default="", help="only these steps, with commas between them")
    options.add_argument("--parallel", type=int, default=2, help="starts at a time")
    chosen = options.parse_args()
    wanted = chosen.releases or [*releases(), *NIGHTLIES]
    steps = tuple(filter(None, chosen.steps.split(",")))
    jobs = [
        contract.Job(release, packages, not chosen.stock, steps=steps)
        for release in wanted
        for packages in chosen.sets.split(",")
    ]
    record: dict[str, dict[str, object]] = defaultdict(dict)
    failed, used = 0, set()
    for job, future in contract.run_all(jobs, parallel=chosen.parallel).items():
        result = future.result()
        print(f"\nvLLM {job.release}, {job.packages}, {'stock' if chosen.stock else 'with the overlay'}")
        show(result, job.release)
        record[job.release][job.packages] = as_json(result)
        used |= {contract.why(found, job.release) for found in result.found}
        problems = [f"{step}: no end" for step in contract.missing(result, steps or STEPS)]
        if not chosen.stock:
            problems += contract.broken(result, job.release)
        for problem in problems:
            print(f"  FAIL {problem}")
        failed += bool(problems)
        sys.stdout.flush()
        if chosen.json:
            chosen.json.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    stale = [known for known in KNOWN if known not in used] if not chosen.stock and not chosen.releases else []
    for known in stale:
        print(f"FAIL nothing matches any more: {known}")
    print(f"\n{len(jobs)} starts, {failed} failed")
    return 1 if failed or stale else 0


def show(result: Start, release: str) -> None:
    """One line a step, then one line for each place that asked."""
    for step in STEPS:
        names = []
        for name in result.cell(step):
            found = [found for found in result.found if found.step == step and found.what == name]
            mark = "" if any(contract.why(each, release) is None for each in found) else "*"
            names.append(name + mark + ("+" if all(each.child for each in found) else ""))
        outcome = result.outcomes.get(step, "no end")
        print(f"  {step:14} {', '.join(names) or 'nothing'}{'' if outcome == 'ok' else f'  [{outcome[:90]}]'}")
    for by, what in sorted(places(result).items()):
        print(f"    {', '.join(what)}: {by}")


def places(result: Start) -> dict[str, list[str]]:
    """What each frame asked for."""
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for each in result.found:
        found[each.by][each.what] = None
    return {by: list(what) for by, what in found.items()}


def as_json(result: Start) -> dict[str, object]:
    """The outcome, the finds by step, and the chain of each place, once."""
    chains = {f"{found.what} {found.by}": list(found.chain) for found in result.found}
    steps = {step: sorted({f"{f.what} {f.by}" for f in result.found if f.step == step}) for step in result.outcomes}
    return {"outcomes": result.outcomes, "steps": steps, "chains": chains}


if __name__ == "__main__":
    sys.exit(main())
