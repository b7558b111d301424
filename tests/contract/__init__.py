"""The contract: no step of a start imports what isn't needed yet, or asks for the GPU. Run it, compare it, show it.

`run` starts one release on the stand-in node with one set of packages; known.py lists what may still be found, and why.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from releases import tree

from contract.known import KNOWN, Known
from vllm_rocm_fixes import node
from vllm_rocm_fixes.start import STEPS, Found, Start, start

SETS = {"image": node.IMAGE, "pip": node.PIP, "everything": node.EVERYTHING}
AITER = {"0.14": "0.1.7", "0.16": "0.1.7", "0.17": "0.1.10", "0.18": "0.1.10", "0.19": "0.1.10", "0.20": "0.1.10"} | {
    "0.21": "0.1.13", "0.22": "0.1.13", "0.23": "0.1.13", "0.24": "0.1.13", "0.25": "0.1.16", "0.26": "0.1.16"
}  # fmt: skip
NEWEST_AITER = "0.1.26"
HIP = "7.2.26015"


class Job(NamedTuple):
    """One start: a release of vLLM, a set of packages, and how."""

    release: str
    packages: str
    overlay: bool
    together: bool = False
    steps: tuple[str, ...] = ()


def run(job: Job, cache: Path | None = None) -> Start:
    """One start on a node of its own. cache keeps what vLLM learns of model classes, for the release's next start."""
    aiter = AITER.get(".".join(job.release.split(".")[:2]), NEWEST_AITER)
    with tempfile.TemporaryDirectory() as folder:
        built = node.build(
            folder, version=job.release, vllm=tree(job.release), packages=SETS[job.packages], aiter=aiter, hip=HIP
        )
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        if cache:
            built.options["VLLM_CACHE_ROOT"] = str(cache / job.release)
        return start(built, overlay=job.overlay, together=job.together, steps=job.steps)


def run_all(jobs: Iterable[Job], cache: Path | None = None, parallel: int = 2) -> dict[Job, Future[Start]]:
    """All of them, in this order, so many at a time."""
    pool = ThreadPoolExecutor(parallel)
    return {job: pool.submit(run, job, cache) for job in jobs}


def why(found: Found, release: str) -> Known | None:
    """The entry of the known list that this is, or None."""
    return next((known for known in KNOWN if known.covers(found, release)), None)


def broken(result: Start, release: str) -> list[str]:
    """What the contract doesn't allow: each find that isn't known, with its chain, and each step that failed."""
    lines = []
    for step, outcome in result.outcomes.items():
        if outcome != "ok":
            lines.append(f"{step}: {outcome}")
    for found in result.found:
        if why(found, release) is None:
            where = " (in a subprocess)" if found.child else ""
            chain = "".join(f"\n    {frame}" for frame in found.chain[-12:])
            lines.append(f"{found.step}{where}: {found.what}, asked for by {found.by}{chain}")
    return lines


def missing(result: Start, steps: Iterable[str] = STEPS) -> list[str]:
    """Steps that didn't come to their end."""
    return [step for step in steps if step not in result.outcomes]
