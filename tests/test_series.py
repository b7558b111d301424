"""A warm start: the same verdicts and the same code as a cold one, and nothing is loaded that reads a stock file."""

import ast
import json
import os
import shutil
import subprocess
import sys

import pytest
from releases import tree

from vllm_rocm_fixes import series
from vllm_rocm_fixes.mend import examine
from vllm_rocm_fixes.patches import SERIES

SAMPLER = "vllm.v1.sample.ops.topk_topp_sampler"
START = f"""
import hashlib, json, marshal, sys
import vllm, vllm_rocm_fixes
from importlib.machinery import PathFinder
vllm_rocm_fixes.prepare()
vllm_rocm_fixes.register()
process = vllm_rocm_fixes.current()
results = {{name: [r.state, r.reason, *r.patch[:6]] for name, r in process.results.items()}}
late = tuple("vllm_rocm_fixes." + name for name in ("patches", "mend", "syntax", "survey", "installed"))
read = [m for m in sys.modules if m.startswith(late)]
spec = PathFinder.find_spec({SAMPLER!r}, [str(process.site.root / 'vllm/v1/sample/ops')])
code = process._code(spec.name, spec.loader, spec.origin)
read_for_code = [m for m in sys.modules if m.startswith(late)]
told = code and hashlib.sha256(marshal.dumps(code)).hexdigest()
print(json.dumps([results, told, read, read_for_code]))
"""


@pytest.fixture
def stock(tmp_path):
    """The stock files of the series, of a release that needs most, below a vllm that imports nothing."""
    root = tmp_path / "root"
    for name in sorted({patch.module for patch in SERIES} - {"tests.utils"}):
        file = f"{name.replace('.', '/')}.py"
        if (tree("0.23.0") / file).exists():
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(tree("0.23.0") / file, root / file)
    (root / "vllm" / "__init__.py").write_text("from ._version import __version__\n")
    (root / "vllm" / "_version.py").write_text("__version__ = '0.23.0'\n")
    return root


def start(root, cache):
    environ = {k: v for k, v in os.environ.items() if not k.startswith("ROCM_FIXES")}
    environ |= {"PYTHONPATH": str(root), "ROCM_FIXES_CACHE": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", START], env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_warm_start_says_and_does_the_same_and_reads_no_patch(stock, tmp_path):
    results, code, read, _ = start(stock, tmp_path / "cache")
    assert results["sampler"][0] == results["all2all_utils"][0] == "waiting" and read
    again, same, none, called = start(stock, tmp_path / "cache")
    assert (again, same, none) == (results, code, [])
    ours = "vllm_rocm_fixes."
    assert {*called} == {f"{ours}patches", f"{ours}patches.sampler", f"{ours}syntax"}, "what the code calls"


def test_an_upgrade_under_a_running_process_asks_no_patch_for_another(tmp_path, monkeypatch):
    monkeypatch.setenv("ROCM_FIXES_CACHE", str(tmp_path))
    assert series.load() == SERIES  # cold
    warm = {patch.name: patch for patch in series.load()}
    monkeypatch.setattr("vllm_rocm_fixes.patches.SERIES", SERIES[:0:-1])  # another order, and the first is gone
    source = (tree("0.23.0") / "vllm/_aiter_ops.py").read_bytes()
    assert examine(warm["aiter_ops"], ast.parse(source)).kind == "needed"
    gone = examine(warm[SERIES[0].name], ast.parse(""))
    assert gone.kind == "unknown" and "the overlay was replaced" in gone.reason


def test_a_file_that_changed_is_examined_anew(stock, tmp_path):
    before, _, _, _ = start(stock, tmp_path / "cache")
    file = stock / "vllm/model_executor/layers/fused_moe/all2all_utils.py"
    file.write_text("something_else = 1\n")
    after, _, read, _ = start(stock, tmp_path / "cache")
    assert after["all2all_utils"][0] == "unknown" and read
    assert {n: r for n, r in after.items() if n != "all2all_utils"} == {
        n: r for n, r in before.items() if n != "all2all_utils"
    }


def test_a_file_that_changed_unseen_is_mended_by_what_it_is(stock, tmp_path):
    """Same size, same time: what is said may be old; the code never is."""
    _, before, _, _ = start(stock, tmp_path / "cache")
    file = stock / f"{SAMPLER.replace('.', '/')}.py"
    status, text = file.stat(), file.read_text()
    file.write_text(text.replace('"""', "'''"))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file.stat().st_size == status.st_size
    _, same, _, _ = start(stock, tmp_path / "cache")
    assert same == before
    changed = file.read_text().replace("k is None", "p is None", 1)
    file.write_text(changed)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file.stat().st_size == status.st_size and start(stock, tmp_path / "cache")[1] != before
