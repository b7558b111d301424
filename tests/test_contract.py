"""Eleven releases start on the stand-in node: with the overlay no step imports a package too early or asks for the GPU.

`make contract` does it for every release and step, each step in a process of its own. Here the steps of a start share
one process; the configurations of further models are made in the two releases of WHOLE, and a start with fewer packages
(those of an image, those that pip installs) leaves out what the full one has shown.
"""

from __future__ import annotations

import contract
import pytest
from contract import Job

from vllm_rocm_fixes.start import STEPS

RELEASES = (
    "0.14.1",
    "0.18.1",
    "0.20.2",
    "0.22.1",
    "0.23.0",
    "0.24.0",
    "0.26.0",
    "0.27.1",
    "0.28.0",
    "0.30.0",
    "0.33.0",
)
WHOLE = ("0.23.0", "0.33.0")
MOST = tuple(step for step in STEPS if step not in ("config moe", "config mla", "config quark"))
SHORT = ("config fp8", "worker", "sampler", "jit_monitor")
RED = ("config fp8", "sampler")  # what is enough to see stock's defects
FULL = [
    Job(release, "everything", overlay=True, together=True, steps=STEPS if release in WHOLE else MOST)
    for release in RELEASES
]
PART = [
    Job(release, packages, overlay=True, together=True, steps=SHORT)
    for release in RELEASES
    for packages in ("image", "pip")
]
STOCK = [Job(release, "everything", overlay=False, together=True, steps=RED) for release in RELEASES]


def name(job: Job) -> str:
    return f"{job.release}-{job.packages}"


@pytest.fixture(scope="module")
def starts(request, tmp_path_factory):
    """Every start that the chosen tests want, two at a time; a release's first one learns its model classes for all."""
    here = [item for item in request.session.items if item.fspath == request.fspath]
    chosen = {item.callspec.params["job"].release for item in here}
    jobs = [job for job in (*FULL, *PART, *STOCK) if job.release in chosen]
    running = contract.run_all(jobs, cache=tmp_path_factory.mktemp("cache"))
    yield running
    for future in running.values():
        future.cancel()


@pytest.mark.parametrize("job", FULL, ids=name)
def test_nothing_too_early_where_stock_does_it(starts, job):
    stock = starts[Job(job.release, "everything", overlay=False, together=True, steps=RED)].result()
    assert {found.what for found in stock.found} & {"aiter", "tilelang", "mori", "deep_ep"}, "stock got better"
    result = starts[job].result()
    assert contract.missing(result, job.steps) == []
    problems = contract.broken(result, job.release)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("job", PART, ids=name)
def test_nothing_too_early_where_fewer_packages_are_installed(starts, job):
    result = starts[job].result()
    assert contract.missing(result, SHORT) == []
    problems = contract.broken(result, job.release)
    assert not problems, "\n".join(problems)
