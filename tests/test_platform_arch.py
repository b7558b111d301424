"""What 0.14.x to 0.20.2 do while a module is imported, and no longer: ask for the GPU, import AITER and flash_attn.

Patches platform_arch, aiter_dtype and mla_attention, in real processes on the stand-in node, through vLLM's own door.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from releases import tree

from vllm_rocm_fixes import node

ASK = """
import importlib, json, os, sys
from vllm.platforms import current_platform as platform
import vllm.platforms.rocm as rocm

answer = {name: str(getattr(platform, name)()) for name in (
    "supports_mx", "supports_fp8", "is_fp8_fnuz", "fp8_dtype", "use_custom_allreduce", "is_navi",
    "get_device_capability")}
answer |= {name: getattr(rocm, name)() for name in ("on_gfx1x", "on_mi3xx", "on_gfx9", "on_gfx950")}
answer["bitsandbytes"] = "bitsandbytes" in platform.supported_quantization
aiter_ops = importlib.import_module("vllm._aiter_ops")
os.environ["ROCM_STANDIN_STEP"] = "mla"
try:
    mla = importlib.import_module("vllm.model_executor.layers.attention.mla_attention")
except ModuleNotFoundError:
    mla = None
except RuntimeError as error:
    mla, answer["mla failed"] = None, str(error)
os.environ["ROCM_STANDIN_STEP"] = "needed"
answer["type"] = repr(getattr(aiter_ops, "AITER_FP8_DTYPE", None))
if mla:
    from vllm.model_executor.layers.attention.mla_attention import flash_attn_varlen_func
    answer["flash_attn"] = repr(flash_attn_varlen_func)
print(json.dumps(answer))
"""
OTHERS = """
import json, sys
import amdsmi
from vllm_rocm_fixes.patches.platform_arch import architecture, capability

def node(*names):
    architecture.cache_clear()
    amdsmi.amdsmi_get_processor_handles = lambda: list(names)
    amdsmi.amdsmi_get_gpu_asic_info = lambda handle: {"target_graphics_version": handle}
    return [architecture(), capability()]

answer = {"+".join(names): node(*names) for names in (
    ("gfx942",), ("gfx942", "gfx942"), ("gfx90a",), ("gfx1151",), ("gfx1201",), ("gfx950",), ("gfx942", "gfx1036"),
    ("N/A",), ())}
def fails(*args):
    raise amdsmi.AmdSmiException
architecture.cache_clear()
amdsmi.amdsmi_init = fails
answer["fails"] = [architecture(), capability()]
print(json.dumps(answer))
"""


def ask(folder, release, side, **options):
    built = node.build(folder, version=release, vllm=tree(release), packages=("aiter", "flash_attn"))
    (folder / "ask.py").write_text(ASK)
    env = built.environment(ROCM_FIXES=side, **options)
    done = subprocess.run([sys.executable, folder / "ask.py"], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), built.events(), done.stdout + done.stderr


def early(events, kind, name=""):
    return [e.name for e in events if e.kind == kind and e.step != "needed" and e.name.startswith(name)]


@pytest.mark.parametrize("release", ["0.14.1", "0.16.0"])
def test_the_platform_answers_as_stock_does_and_does_not_ask_torch(tmp_path, release):
    stock, before, _ = ask(tmp_path / "stock", release, "off")
    ours, after, said = ask(tmp_path / "ours", release, "on")
    assert ours == stock and ours["is_fp8_fnuz"] == "True" and "minor=4" in ours["get_device_capability"]
    assert early(before, "gpu") and not early(after, "gpu"), said
    assert bool(early(before, "import", "aiter")) == (release == "0.14.1")
    assert not early(after, "import", "aiter")
    # 0.14.1 asks AITER for the type; the platform's is the same, and needs no import even when it is used.
    assert release != "0.14.1" or ours["type"] == "torch.float8_e4m3fnuz"
    assert not any(e.name == "aiter" for e in after)


def test_mla_imports_flash_attention_when_asked_for_it(tmp_path):
    stock, before, _ = ask(tmp_path / "stock", "0.20.2", "off")
    ours, after, said = ask(tmp_path / "ours", "0.20.2", "on")
    assert ours == stock and "flash_attn" in ours["flash_attn"]
    assert "flash_attn" in early(before, "import") and "flash_attn" not in early(after, "import"), said
    assert any(e.name == "flash_attn" and e.step == "needed" for e in after)


def test_mla_counts_a_broken_flash_attention_as_absent(tmp_path):
    stock, _, _ = ask(tmp_path / "stock", "0.16.0", "off", ROCM_STANDIN_FLASH_ATTN_FAILS="RuntimeError")
    ours, _, said = ask(tmp_path / "ours", "0.16.0", "on", ROCM_STANDIN_FLASH_ATTN_FAILS="RuntimeError")
    assert "mla failed" in stock
    assert "mla failed" not in ours and ours["flash_attn"] == "None"
    assert "flash_attn can't be imported and counts as absent: RuntimeError" in said


def test_amdsmi_is_believed_where_it_names_one_architecture(tmp_path):
    built = node.build(tmp_path, version="0.16.0", packages=())
    (tmp_path / "others.py").write_text(OTHERS)
    done = subprocess.run(
        [sys.executable, tmp_path / "others.py"], env=built.environment(), capture_output=True, text=True, timeout=60
    )
    assert json.loads(done.stdout) == {
        "gfx942": ["gfx942", [9, 4]],
        "gfx942+gfx942": ["gfx942", [9, 4]],
        "gfx90a": ["gfx90a", [9, 0]],
        "gfx1151": ["gfx1151", [11, 5]],
        "gfx1201": ["gfx1201", [12, 0]],
        "gfx950": ["gfx950", [9, 5]],
        "gfx942+gfx1036": [None, None],
        "N/A": [None, None],
        "": [None, None],
        "fails": [None, None],
    }, done.stderr
