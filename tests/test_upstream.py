"""Upstream's own tests, from the release that mended a defect, on an older stock release: red, and green with us.

The files come from the sdists; none is kept here. They run in a process of the stand-in node, with vLLM's doors, and
pytest's, open or shut. What a file asks of its release beside the fix isn't run: the cases are named one by one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from xml.etree import ElementTree

import matrix
import pytest
from releases import tree

from vllm_rocm_fixes import node


@dataclass(frozen=True)
class Case:
    """tests: cases of `path` in the sdist of `release`, which mended the defect; on: an older stock release."""

    origin: str
    release: str
    path: str
    tests: tuple[str, ...]
    on: str


COPY = "test_upstream_copy"
BAD = {"failure": "FAILED", "error": "ERROR", "skipped": "SKIPPED"}
HAS_MODULE = "TestHasModule::"
# The same file's test of a package that is found and doesn't load has a mock for the package: no child process finds
# it, so stock's own answer stands. tests/test_import_utils.py has packages that really don't load.
CASES = [
    Case(
        "vllm#44823", "0.24.0", "tests/v1/sample/test_topk_topp_sampler.py",
        ("test_rocm_aiter_sampler_defers_import_when_generators_force_native",), "0.23.0",
    ),
    Case(
        "vllm#44823", "0.24.0", "tests/v1/sample/test_topk_topp_sampler.py",
        ("test_rocm_aiter_sampler_defers_import_when_generators_force_native",), "0.20.2",
    ),
    Case(
        "vllm#44035", "0.23.0", "tests/utils_/test_import_utils.py",
(HAS_MODULE + "test_returns_false_when_find_spec_raises",), "0.22.1",
    ),
    Case(
        "vllm#57192", "0.31.0", "tests/kernels/mhc/test_mhc_tilelang_jit.py",
        ("test_tilelang_jit_proxies_compile_only_warmup",), "0.30.0",
    ),
]  # fmt: skip
# What stock passes already must still pass: the same files, whole, on the release they belong to and on an older one.
KEPT = [
    Case("vllm#44035", "0.23.0", "tests/utils_/test_import_utils.py", (), "0.23.0"),
    Case("vllm#44035", "0.33.0", "tests/utils_/test_import_utils.py", (), "0.33.0"),
    Case("vllm#51159", "0.31.0", "tests/kernels/mhc/test_mhc_tilelang_jit.py",
         ("test_tilelang_jit_decorator_is_lazy_only_on_rocm",), "0.31.0"),
]  # fmt: skip


def run(case, folder, plugins):
    """pytest on the copied file, in a process of the node; what it printed, and the outcome of each test."""
    built = node.build(folder / "node", version=case.on, vllm=tree(case.on), packages=("aiter", "mori"))
    copy = folder / f"{COPY}.py"
    copy.write_bytes((tree(case.release) / case.path).read_bytes())
    ids = [f"{copy}::{name}" for name in case.tests] or [str(copy)]
    junit = folder / "outcomes.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, *ids]
    command += [f"--junit-xml={junit}"]
    environ = built.environment(**({} if plugins is None else {"VLLM_PLUGINS": plugins, "ROCM_FIXES": "off"}))
    done = subprocess.run(
        command, cwd=tree(case.on), env=environ, capture_output=True, text=True, timeout=300, check=False
    )  # fmt: skip
    cases = ElementTree.parse(junit).iter("testcase") if junit.exists() else ()
    return done.stdout[-3000:] + done.stderr[-2000:], dict(map(outcome, cases))


def outcome(case):
    """The name of a test as in Case.tests, and what became of it."""
    inside = case.get("classname").partition(COPY)[2].split(".")[1:]
    failed = [BAD[said.tag] for said in case if said.tag in BAD]
    return "::".join([*inside, case.get("name")]), failed[0] if failed else "PASSED"


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.origin.partition('#')[2]} on {c.on}")
def test_upstreams_test_fails_on_the_older_release_and_passes_with_us(case, tmp_path):
    (tmp_path / "stock").mkdir()
    (tmp_path / "mended").mkdir()
    said, stock = run(case, tmp_path / "stock", "")
    assert "FAILED" in stock.values(), said
    said, mended = run(case, tmp_path / "mended", None)
    assert set(case.tests) == set(mended) and set(mended.values()) == {"PASSED"}, said


@pytest.mark.parametrize("case", KEPT, ids=lambda c: f"{c.path.rpartition('/')[2]} on {c.on}")
def test_upstreams_tests_pass_with_us_where_stock_passes_them(case, tmp_path):
    (tmp_path / "stock").mkdir()
    (tmp_path / "mended").mkdir()
    said, stock = run(case, tmp_path / "stock", "")
    assert "PASSED" in stock.values(), said
    said, mended = run(case, tmp_path / "mended", None)
    assert mended == stock, said


# vllm/env_override.py of these imports inductor by itself where torch is older or newer than their own.
STOCK_FAILS = ("0.17.0", "0.17.1")


def lazy(release, folder, **switches):
    built = node.build(folder / release, version=release, vllm=tree(release), packages=("aiter", "mori"))
    script = tree(release) / "tests/standalone_tests/lazy_imports.py"
    done = subprocess.run(
        [sys.executable, str(script)], cwd=folder, env=built.environment(**switches),
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    return done.returncode, done.stderr[-1000:]


def test_lazy_imports_of_every_release(tmp_path):
    """vLLM's own script: `import vllm` brings neither inductor's compiler nor cv2; not with us either."""
    releases = [version for version in matrix.listed() if ".dev" not in version]
    with ThreadPoolExecutor(2) as pool:
        ended = dict(zip(releases, pool.map(lambda release: lazy(release, tmp_path), releases), strict=True))
    assert len(ended) >= 28
    assert {release: said for release, (code, said) in ended.items() if code and release not in STOCK_FAILS} == {}
    for release in STOCK_FAILS:  # with this torch: the same trouble, for the same reason
        assert ended[release] == lazy(release, tmp_path, ROCM_FIXES="off") and ended[release][0]
