"""The record of what stock vLLM does on the stand-in node: stock.json, and the table of it in docs/contract.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from packaging.version import Version

from vllm_rocm_fixes.start import STEPS, Start

FILE = Path(__file__).with_name("stock.json")
TABLE = Path(__file__).resolve().parents[2] / "docs" / "contract.md"
_HEAD = """\
# What stock vLLM imports while it starts

`make contract` starts each release on the stand-in AMD node and writes down, for each step of the start, which packages
were imported though nothing needed them yet, and whether torch was asked for something that initialises HIP (GPU). This
is the record of stock, without the overlay: `python tools/contract.py --stock --record` writes it. With the overlay
each of these cells must hold nothing, or an entry of `tests/contract/known.py` says why.

"everything" stands for AITER, TileLang, Mori, DeepEP, NIXL, MoonEP, FlashInfer and flash-attention; an image of vLLM
holds the first three, a pip install the first two. Each step runs in a fresh process that has imported `vllm.config`.
A child's cell holds what the child itself did. An error that ended a step stands in brackets. A dash is nothing; an
empty cell wasn't recorded.
"""


def load() -> dict[str, Any]:
    """By release and set of packages: steps (what each found, as `package file:line function`) and outcomes."""
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


def keep(release: str, packages: str, result: Start) -> None:
    """Put one start into the record; steps that it didn't run stay as they were."""
    record = load()
    entry = record.setdefault(release, {}).setdefault(packages, {"steps": {}, "outcomes": {}})
    for step, outcome in result.outcomes.items():
        entry["steps"][step] = sorted({f"{found.what} {found.by}" for found in result.found if found.step == step})
        if outcome == "ok":
            entry["outcomes"].pop(step, None)
        else:
            entry["outcomes"][step] = outcome
    ordered = {key: record[key] for key in sorted(record, key=Version)}
    FILE.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


def write_table() -> None:
    """docs/contract.md: a table for each set of packages, then the places that asked."""
    record = load()
    lines = [_HEAD]
    for packages in ("everything", "image", "pip"):
        rows = {release: sets[packages] for release, sets in record.items() if packages in sets}
        steps = [step for step in STEPS if any(step in row["steps"] for row in rows.values())]
        if not rows:
            continue
        lines += [f"\n## {packages}\n", f"| release | {' | '.join(steps)} |", "|---" * (len(steps) + 1) + "|"]
        lines += [f"| {release} | {' | '.join(_cell(row, step) for step in steps)} |" for release, row in rows.items()]
    lines += ["\n## Who asked\n", "| place | what | releases |", "|---|---|---|"]
    places: dict[str, dict[str, dict[str, None]]] = {}
    for release, sets in record.items():
        for found in (f for entry in sets.values() for step in entry["steps"].values() for f in step):
            what, _, by = found.partition(" ")
            file, _, rest = by.partition(":")
            place = places.setdefault(f"{file} {rest.partition(' ')[2]}", {})
            place.setdefault(what, {})[release] = None
    for place, asked in sorted(places.items()):
        together: dict[tuple[str, ...], list[str]] = {}
        for what, releases in asked.items():
            together.setdefault(tuple(releases), []).append(what)
        lines += [f"| `{place}` | {', '.join(what)} | {', '.join(span)} |" for span, what in together.items()]
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _cell(row: dict[str, Any], step: str) -> str:
    if step not in row["steps"]:
        return ""
    names = dict.fromkeys(found.split(" ")[0] for found in row["steps"][step])
    error = f" [{row['outcomes'][step].split(':')[0]}]" if step in row["outcomes"] else ""
    return (", ".join(names) or "-") + error
