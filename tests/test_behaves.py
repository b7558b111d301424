"""The patches' own checks, which `vllm-rocm-fixes verify` asks: each fails on stock, and none fails with the overlay.

One process of stock and one with the overlay for a release, on the stand-in node; each answers for all of its patches.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
import types
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from releases import tree

from vllm_rocm_fixes import behaviour, checks, node
from vllm_rocm_fixes.patch import Patch, clear
from vllm_rocm_fixes.patches import SERIES

# What each check says on stock, in a release that needs the patch; some patches meet two shapes.
STOCK = {
    "0.14.1": {
        "aiter_dtype": "importing it imported AITER",
        "all2all": "the manager of DeepEP doesn't say that its package is missing: AssertionError: DeepEP kernels",
        "quark": "importing it imported aiter",
        "platform_memory": "it asks torch.cuda.get_device_properties",
        "platform_arch": "supports_mx() asks torch.cuda.get_device_properties",
        "fa_utils": "beside a flash_attn that doesn't load it can't be imported: OSError: libflash_attn.so",
        "aiter_fa_old": "importing it asked for aiter",
        "mla_common": "importing it asked for flash_attn",
        "all2all_flashinfer": "importing it imported FlashInfer",
    },
    "0.20.2": {
        "import_utils": "a package that doesn't load counts as there",
        "quark": "importing it imported aiter",
        "platform_import": "where amdsmi gives no architecture: ImportError: cannot import name 'current_platform'",
        "mla_attention": "importing it asked for flash_attn",
    },
    "0.27.1": {"jit_monitor": "activate() imports TileLang"},
    "0.30.0": {
        "tilelang_jit": "a late kernel has no compile(): 'function' object has no attribute 'compile'",
        "tests_utils": "a server that a test starts misses an entry of PYTHONPATH",
        "flashinfer_all_reduce": "importing it imported flashinfer",
        "aiter_fa": "importing it asked for aiter",
    },
    "0.33.0": {
        "import_utils": "looking for a package imported it in this process",
        "all2all": "the manager of DeepEP doesn't say that its package is missing: AssertionError: DeepEP kernels",
        "mhc": "importing it imported AITER",
        "platform_memory": "what the driver says isn't counted",
        "fa_utils": "beside a flash_attn that doesn't load it can't be imported: OSError: libflash_attn.so",
        "qwen_vl_warmup": "for another model it",
        "step5_warmup": "for another model it",
    },
}
CASES = [(name, release) for release, names in STOCK.items() for name in names]
_ASK_STOCK = """
import importlib, json, sys
from vllm_rocm_fixes import behaviour, checks
from vllm_rocm_fixes.patches import SERIES
checks.watch()
importlib.import_module("vllm.plugins").load_general_plugins()
known, said = {patch.name: patch for patch in SERIES}, {}
for name in sys.argv[1:]:
    importlib.import_module(known[name].module)
    said[name] = behaviour._asked(known[name])
print(json.dumps(said))
"""


@functools.cache
def _jobs() -> dict[str, Future]:
    pool = ThreadPoolExecutor(2)
    return {release: pool.submit(_run, release) for release in STOCK}


def _run(release: str) -> tuple[dict, dict]:
    with tempfile.TemporaryDirectory() as folder:
        built = node.build(f"{folder}/node", version=release, vllm=tree(release), packages=node.EVERYTHING)
        env = {k: v for k, v in os.environ.items() if not k.startswith(("ROCM_FIXES", "VLLM_"))}
        # The others, and that nothing is a false alarm among them, is for tests/test_verify.py.
        others = [patch.name for patch in SERIES if patch.name not in STOCK[release]]
        env = built.environment(env, ROCM_FIXES_SKIP=",".join(others))
        sides = {
            "off": ["-c", _ASK_STOCK, *STOCK[release]],
            "on": ["-m", "vllm_rocm_fixes.behaviour", f"{folder}/told"],
        }
        for switch, command in sides.items():
            side = env | {"ROCM_FIXES": switch}
            done = subprocess.run([sys.executable, *command], env=side, cwd=folder, capture_output=True, text=True)
            assert done.returncode == 0, f"{release}, {switch}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
            if switch == "off":
                stock = json.loads(done.stdout.splitlines()[-1])
        left = {p.name for p in Path(folder).iterdir()} - {"node", "told"}
        assert not left, f"a check left {left}"
        return stock, json.loads(Path(folder, "told").read_text())["patches"]


@pytest.mark.parametrize(("name", "release"), CASES)
def test_it_fails_on_stock_and_not_with_the_overlay(name, release):
    stock, ours = _jobs()[release].result()
    asked, wrong = stock[name]
    assert asked == "yes" and wrong.startswith(STOCK[release][name])
    told = ours[name]
    assert (told["state"], told["asked"], told["wrong"], told["note"]) == ("applied", "yes", None, None)


def _patch(name: str) -> Patch:
    examine = types.FunctionType((lambda tree: clear("it")).__code__, {"__name__": f"file_of_{name}", "clear": clear})
    return Patch(name, "vllm.x", "s", (), "0.14.0", None, functools.partial(examine), mend=lambda tree: None)


@pytest.mark.unit
def test_what_a_check_answers(monkeypatch):
    def cannot():
        raise checks.CannotAsk("no GPU")

    def breaks():
        raise SystemExit("a build that failed")

    answers = {
        "right": (lambda: None, ("yes", None)),
        "wrong": (lambda: "it is wrong", ("yes", "it is wrong")),
        "told": (lambda patch: f"{patch.name} is wrong", ("yes", "told is wrong")),
        "cannot": (cannot, ("no GPU", None)),
        "breaks": (breaks, (None, "its behaviour check broke: SystemExit: a build that failed")),
        "none": (None, (None, None)),
    }
    for name, (check, expected) in answers.items():
        monkeypatch.setitem(sys.modules, f"file_of_{name}", types.SimpleNamespace(behaves=check))
        assert behaviour._asked(_patch(name)) == expected


@pytest.mark.unit
def test_a_package_that_is_broken_for_a_while(tmp_path, monkeypatch):
    (tmp_path / "shelf_of_checks").mkdir()
    (tmp_path / "shelf_of_checks" / "__init__.py").touch()
    (tmp_path / "shelf_of_checks" / "user.py").write_text(
        "try:\n    import flash_attn.sub as got\nexcept OSError as error:\n    got = str(error)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    real = types.SimpleNamespace(sub=1)
    monkeypatch.setitem(sys.modules, "flash_attn", real)
    monkeypatch.setitem(sys.modules, "flash_attn.sub", real)
    user = importlib.import_module("shelf_of_checks.user")
    before = list(sys.meta_path)
    with checks.broken("flash_attn", "aiter") as asked:
        assert importlib.util.find_spec("aiter") is not None and "flash_attn" not in sys.modules
        copy = checks.import_again("shelf_of_checks.user")
    assert asked == ["flash_attn"] and "libflash_attn.so" in copy.got
    assert sys.modules["flash_attn"] is real and "aiter" not in sys.modules and sys.meta_path == before
    assert sys.modules["shelf_of_checks.user"] is user is sys.modules["shelf_of_checks"].user


@pytest.mark.unit
def test_who_imports_a_hazard(tmp_path, monkeypatch):
    (tmp_path / "aiter").mkdir()
    for name in ("__init__", "ops", "more"):
        (tmp_path / "aiter" / f"{name}.py").touch()
    monkeypatch.setattr(checks, "_imports", [])
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    with pytest.raises(checks.CannotAsk, match="aiter isn't installed here"):
        checks.imported("vllm.a", "aiter")
    monkeypatch.syspath_prepend(str(tmp_path))
    checks.watch()

    def of_vllm(name, code):
        exec(code, {"__name__": name})

    of_vllm("vllm.a", "import importlib.util\nimportlib.util.find_spec('aiter')")
    assert checks.imported("vllm.a", "aiter") == []
    of_vllm("vllm.b", "import aiter.ops")
    of_vllm("vllm.c", "import importlib\nimportlib.import_module('aiter.more')")
    assert checks.imported("vllm.b", "aiter") == ["aiter", "aiter.ops"]
    assert checks.imported("vllm.c", "aiter") == ["aiter.more"]
    with pytest.raises(checks.CannotAsk, match=r"aiter was there already, imported by vllm\.b"):
        checks.imported("vllm.a", "aiter")
    for name in [name for name in sys.modules if name.partition(".")[0] == "aiter"]:
        del sys.modules[name]
