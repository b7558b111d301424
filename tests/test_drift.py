"""`make drift`: what a release that came out today would be told, on trees made from a real one."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import drift
import matrix
import pytest
from releases import tree

from vllm_rocm_fixes.installed import path_of
from vllm_rocm_fixes.patches import SERIES

pytestmark = pytest.mark.unit
SAMPLER = "vllm/v1/sample/ops/topk_topp_sampler.py"
ALL2ALL = "vllm/model_executor/layers/fused_moe/all2all_utils.py"
SOURCES = {
    "import os, aiter.ops.sampling": ["import aiter.ops.sampling"],
    "try:\n    from mori.io import x\nexcept ImportError:\n    import tvm": ["import mori.io", "import tvm"],
    "class A:\n    import deep_ep": ["import deep_ep"],
    "def f():\n    import aiter": [],
    "async def f(x=has_tilelang()):\n    import aiter": ["has_tilelang()"],
    "def f():\n    import aiter\nX = f()": ["import aiter, by f()"],
    "def f():\n    g()\ndef g():\n    f()\n    torch.cuda.is_available()\nX = f()": [
        "torch.cuda.is_available(), by g()"
    ],
    "if TYPE_CHECKING:\n    import aiter\nelse:\n    import tilelang": ["import tilelang"],
    "if __name__ == '__main__':\n    import aiter": [],
    "F = lambda: has_mori()": [],
    "if x and (A := torch.cuda.device_count()) > 1:\n    pass": ["torch.cuda.device_count()"],
    "@pick(import_utils.has_deep_ep())\nclass A: ...": ["import_utils.has_deep_ep()"],
    "m = importlib.import_module('flash_attn')\nn = importlib.import_module(name)": ["import flash_attn"],
    "import aiterators, tvmlike\nfrom . import aiter\nfrom .mori import x": [],
    "match x:\n    case 1:\n        import nixl_ep": ["import nixl_ep"],
    "X = [has_x(y) for y in z]\nY: torch.cuda.Stream": ["has_x()"],
}


@pytest.mark.parametrize("source", SOURCES)
def test_what_a_module_does_while_it_is_imported(source):
    assert sorted(drift.in_tree(ast.parse(source))) == sorted(SOURCES[source])


def shelf(folder, **changed):
    """The modules of the series out of 0.33.0, and changes: file (dots for slashes) -> function of its text."""
    stock = tree("0.33.0")
    paths = [path_of(stock, patch.module) for patch in SERIES]  # None for one that is gone by then
    for name in ("setup.py", "vllm/__init__.py", *(str(path.relative_to(stock)) for path in paths if path)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(stock / name, folder / name)
    for name, change in changed.items():
        path = folder / f"{name.replace('.', '/')}.py"
        path.write_text(change(path.read_text() if path.exists() else ""))
    return folder


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """A registry that has what docs/support.md knows; a test adds to it. 0.33.0 is small here, so that it is fast."""
    trees = {"0.33.0": shelf(tmp_path / "0.33.0")}
    rows = list(drift.known())
    monkeypatch.setattr(matrix, "tree", trees.__getitem__)
    monkeypatch.setattr(drift, "tree", trees.__getitem__)
    monkeypatch.setattr(drift, "releases", lambda: [v for v in (*rows, *trees) if "dev" not in v])
    monkeypatch.setattr(drift, "nightlies", lambda: [v for v in trees if "dev" in v])
    return trees


def test_nothing_new(registry, capsys):
    assert drift.main([]) == 0
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and said.endswith("0 on the registry are new: nothing to look at\n")


def test_a_release_is_new_even_where_nothing_differs(registry, tmp_path, capsys):
    registry["0.34.0"] = shelf(tmp_path / "new")
    assert drift.main([]) == 1
    said = capsys.readouterr().out.splitlines()
    assert (
        said[0].startswith("0.34.0, a new release: needed ") and said[1] == "  add it to docs/support.md: make matrix"
    )
    assert len(said) == 3 and said[2].endswith("1 on the registry are new: 1 to look at")


def test_a_nightly_is_to_be_looked_at_only_where_it_differs(registry, tmp_path, capsys):
    registry["0.33.1.dev202611300000"] = shelf(tmp_path / "same")
    assert drift.main([]) == 0
    assert "0.33.1.dev202611300000, a new nightly" in capsys.readouterr().out
    registry["0.33.1.dev202611300000"] = shelf(tmp_path / "other", **{"vllm.fresh": lambda _: "import aiter\n"})
    assert drift.main([]) == 1
    assert "  no patch covers vllm/fresh.py:1: import aiter\n" in capsys.readouterr().out


def test_a_new_import_a_new_probe_and_a_changed_shape(registry, tmp_path, capsys):
    changed = {
        "vllm.fresh": lambda _: "def ask():\n    import tilelang\n\n\nif ask():\n    X = torch.cuda.device_count()\n",
        SAMPLER[:-3]: lambda text: text.replace("class TopKTopPSampler", "class TheSampler"),
        "vllm.platforms.rocm": lambda text: text + "\nfrom vllm.utils.import_utils import has_mori\nM = has_mori()\n",
    }
    registry["0.34.0"] = shelf(tmp_path / "new", **changed)
    assert drift.main([]) == 1
    said = capsys.readouterr().out
    assert "  no patch covers vllm/fresh.py:5: import tilelang, by ask()\n" in said
    assert "  no patch covers vllm/fresh.py:6: torch.cuda.device_count()\n" in said
    assert ": has_mori()\n" in said
    assert "  sampler: unknown (needed in 0.33.0): " in said and "TopKTopPSampler" in said
    assert said.count("\n  ") == 5


def test_what_a_patch_moves_is_no_news_and_would_be_without_it(registry, tmp_path, monkeypatch, capsys):
    at = "if current_platform.is_cuda_alike():\n"
    mori = at + "    if has_mori():\n        from mori import MoriNew\n"
    registry["0.34.0"] = shelf(tmp_path / "new", **{ALL2ALL[:-3]: lambda text: text.replace(at, mori, 1)})
    assert "import MoriNew" in (registry["0.34.0"] / ALL2ALL).read_text()
    assert drift.main([]) == 1
    assert "no patch covers" not in (said := capsys.readouterr().out), said
    monkeypatch.setattr(drift, "SERIES", ())
    drift.in_source.cache_clear()
    found = drift.hazards(registry["0.34.0"])
    assert (ALL2ALL, "import mori") in found


def test_a_defect_that_upstream_mended_is_shown(registry, tmp_path, capsys):
    """The sampler's import gone: the verdict changes, and somebody can write `until` into the patch."""
    clean = "class TopKTopPSampler:\n    def __init__(self, logprobs_mode=None):\n        self.forward = None\n"
    registry["0.33.1.dev202611300000"] = shelf(tmp_path / "new", **{SAMPLER[:-3]: lambda _: clean})
    assert drift.main([]) == 1
    assert "  sampler: " in capsys.readouterr().out


def test_a_release_that_cannot_be_fetched_is_shown(registry, monkeypatch, capsys):
    monkeypatch.setattr(drift, "releases", lambda: ["0.34.0"])
    assert drift.main([]) == 1
    assert "KeyError: '0.34.0'" in capsys.readouterr().out


def test_patches_that_no_supported_release_needs(registry, capsys):
    assert drift.deletable(drift.known(), "0.14.0") == []
    assert drift.main(["--oldest", "0.28.0"]) == 1
    said = capsys.readouterr().out
    rows = drift.known()
    ended = {p.name for p in SERIES if p.until and p.until <= "0.28.0" and p.name in rows["0.33.0"]}
    assert {line.split()[0] for line in said.splitlines()[:-1]} == ended and "aiter_ops" in ended
    rows["0.34.0"] = {**rows["0.33.0"], "aiter_ops": "needed"}  # it came back
    assert not any(line.startswith("aiter_ops ") for line in drift.deletable(rows, "0.28.0"))


def test_the_day_a_real_release_came_out():
    """0.33.0 beside 0.32.0, both whole: a warm-up that a patch covers, and AITER in one more model's file."""
    rows = {version: row for version, row in drift.known().items() if version != "0.33.0"}
    found = drift.news("0.33.0", rows)
    assert any(line.startswith("step5_warmup: needed (absent in 0.32.0)") for line in found.lines), found.lines
    covered = [line for line in found.lines if line.startswith("no patch covers")]
    assert any("vllm/models/deepseek_v41/amd/" in line and "import aiter" in line for line in covered)
    assert not any("kernel_warmup" in line or "all2all_utils" in line for line in covered)


def test_no_registry_is_one_line_and_a_status_of_its_own():
    nowhere = {f"{scheme}_proxy": "http://127.0.0.1:9" for scheme in ("http", "https", "all")}
    clean = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    script = Path(drift.__file__)
    done = subprocess.run(
        [sys.executable, script], env={**clean, **nowhere}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr == "" and done.stdout.startswith("the package registry can't be reached: ")
    assert done.stdout.count("\n") == 1
