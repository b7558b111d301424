"""A module that a fork has changed isn't called clear, or applied, while it still does what its patch is about."""

import ast
from functools import cache

import pytest
from releases import tree

from vllm_rocm_fixes.installed import path_of
from vllm_rocm_fixes.mend import mend
from vllm_rocm_fixes.patches import SERIES

pytestmark = pytest.mark.unit
PATCHES = {patch.name: patch for patch in SERIES}
PROBE = "def probe(*_):\n    import {0}\n    return lambda f: f\n"
WRAPS = "def with_(f):\n    def call():\n        return probe()\n    return call\n"
# What imports a package while the module runs, each in its own way.
RUNS = {
    "called": "found = probe()",
    "called by what is called": "def ask():\n    return probe()\nfound = ask()",
    "inner function": "def ask():\n    def probe():\n        import {0}\n    return probe()\nfound = ask()",
    "a decorator": "@probe\ndef other(): ...",
    "a decorator of a method": "class Other:\n    @probe\n    def method(self): ...",
    "a decorator's argument": "def with_(x):\n    return lambda f: f\n@with_(probe())\ndef other(): ...",
    "what a decorator has made": f"{WRAPS}@with_\ndef other(): ...\nfound = other()",
    "what a lambda of a decorator's calls": "def with_(f):\n    return lambda *_: probe()\n"
    "@with_\ndef other(): ...\nfound = other()",
    "a decorator by another name": f"{WRAPS}by = with_\n@by\ndef other(): ...\nfound = other()",
    "leaving a with": "class Other:\n    def __exit__(self, *_):\n        probe()\nwith Other(): ...",
    "a metaclass": "class Meta(type):\n    def __new__(cls, *_):\n        probe()\nclass Other(metaclass=Meta): ...",
    "a default": "def other(x=probe()): ...",
    "a default of a method": "class Other:\n    def method(self, *, x=probe()): ...",
    "in a class": "class Other:\n    found = probe()",
    "under an if": "if probe:\n    def later():\n        import {0}\nfound = later()",
    "through map": "found = list(map(probe, 'a'))",
    "a static method": "class Other:\n    @staticmethod\n    def ask():\n        import {0}\nfound = Other.ask()",
    "a constructor": "class Other:\n    def __init__(self):\n        import {0}\nfound = Other()",
    "a method like one of a package": "import os\nclass Other:\n    def get(self):\n        import {0}\n"
    "os = Other()\nfound = os.get()",
    "by name": "import importlib\nfound = importlib.import_module('{0}.ops')",
    "by a keyword": "import importlib\nfound = importlib.import_module(name='{0}')",
    "by a name that is made": "import importlib\nNAME = '{0}'\nfound = importlib.import_module(f'{{NAME}}.ops')",
    "what find_spec imports": "from importlib.util import find_spec\nfound = find_spec('{0}.ops.x')",
}
RESTS = {
    "not called": "",
    "asked for": "from importlib.util import find_spec\nfound = find_spec('{0}')",
    "for type checkers": "if TYPE_CHECKING:\n    found = probe()",
    "what a decorator makes": f"{WRAPS}@with_\ndef other(): ...",
    "a lambda": "ask = lambda: probe()",
    "handed on": "register(op=probe)",
    "a package's method": "import os\nclass Other:\n    def get(self):\n        import {0}\n"
    "found = os.environ.get('x')",
}
MODULES = {
    ("quark", "0.26.0"): "aiter",
    ("mhc", "0.33.0"): "aiter",
    ("all2all_utils", "0.33.0"): "mori",
    ("kernel_warmup", "0.33.0"): "vllm.model_executor.warmup",
}


@cache
def mended(name, release):
    """The module after its patch, or as it is where that is clear."""
    patch = PATCHES[name]
    source = path_of(tree(release), patch.module).read_bytes()
    done = mend(source, "stock.py", [patch])
    return ast.unparse(done.tree or ast.parse(source))


@pytest.mark.parametrize(("name", "release"), MODULES)
@pytest.mark.parametrize("way", RUNS)
def test_what_runs_with_the_module_is_not_clear(name, release, way):
    package = MODULES[name, release]
    source = f"{mended(name, release)}\n{PROBE}{RUNS[way]}\n".replace("{0}", package).replace("{{NAME}}", "{NAME}")
    assert PATCHES[name].examine(ast.parse(source)).kind == "unknown"


@pytest.mark.parametrize(("name", "release"), [m for m in MODULES if "mhc" not in m])
@pytest.mark.parametrize("way", RESTS)
def test_what_does_not_run_is_clear(name, release, way):
    source = f"{mended(name, release)}\n{PROBE}{RESTS[way]}\n".replace("{0}", MODULES[name, release])
    assert PATCHES[name].examine(ast.parse(source)).kind == "clear"


UPSTREAM = "        _ROCM_FLASH_ATTN_AVAILABLE = True\n"
ON_ROCM = "elif current_platform.is_rocm():"
MLA = "            from flash_attn import flash_attn_varlen_func  # type: ignore[no-redef]\n"
CAPABILITY = "torch.cuda.get_device_capability(device_id)"
FLASHINFER = "    import flashinfer.comm as flashinfer_comm  # type: ignore[no-redef]\n"
PROBES = "def check_aiter_fused_qk_rmsnorm() -> bool:\n"
MINIMAX = """    from vllm.model_executor.warmup.minimax_m3_msa_warmup import (
        minimax_m3_msa_warmup,
    )
"""
MODEL = "    from vllm.model_executor.models.qwen3_vl import Qwen3_VisionTransformer\n"
WARMS = "    minimax_m3_msa_warmup(worker)\n"
WARMER = 'def kernel_warmup(worker: "Worker"):\n'
PCIE = "        flashinfer_pcie_ipc_all_reduce.warmup_flashinfer_pcie_ipc_allreduce(worker)\n"
HOOK = "    _setup_tilelang_jit_hook()\n"
NAVI = 'return "gfx1" in torch.cuda.get_device_properties(0).gcnArchName'
GFX9 = "def on_gfx9() -> bool:\n    return _ON_GFX9"
AMDSMI = "    try:\n        return _query_gcn_arch_from_amdsmi()\n"
TORCH = 'torch.cuda.get_device_properties("cuda")'
TOTAL = "        device_props = torch.cuda.get_device_properties(device_id)\n        return device_props.total_memory\n"
EDITS = {
    ("jit_monitor", "0.27.1", "also on ROCm"): (
        HOOK,
        f"    if current_platform.is_cuda() or current_platform.is_rocm():\n    {HOOK}",
    ),
    ("jit_monitor", "0.27.1", "otherwise"): (
        HOOK,
        f"    if not current_platform.is_rocm():\n        pass\n    else:\n    {HOOK}",
    ),
    ("qwen_vl_warmup", "0.33.0", "in a try"): (
        MODEL,
        f"    try:\n    {MODEL}    except ImportError:\n        return\n",
    ),
    ("qwen_vl_warmup", "0.33.0", "relative"): (MODEL, MODEL.replace("vllm.model_executor", "..")),
    ("qwen_vl_warmup", "0.33.0", "by name"): (
        MODEL,
        "    Qwen3_VisionTransformer = import_module(MODEL).Qwen3_VisionTransformer\n",
    ),
    ("qwen_vl_warmup", "0.33.0", "another file, in a try"): (
        MODEL,
        f"    try:\n    {MODEL.replace('qwen3_vl', 'qwen3_omni')}    except ImportError:\n        return\n",
    ),
    ("kernel_warmup", "0.24.0", "as a module"): (
        MINIMAX,
        "    import vllm.model_executor.warmup.minimax_m3_msa_warmup as m3\n",
    ),
    ("kernel_warmup", "0.24.0", "in another function"): (
        f"{WARMER}{MINIMAX}",
        f"def warm(worker):\n{MINIMAX}{WARMS}\n\n{WARMER}",
    ),
    ("kernel_warmup", "0.24.0", "also on ROCm"): (
        WARMS,
        f"    if current_platform.is_cuda() or current_platform.is_rocm():\n    {WARMS}",
    ),
    ("kernel_warmup", "0.24.0", "off CUDA"): (WARMS, f"    if not current_platform.is_cuda():\n    {WARMS}"),
    ("kernel_warmup", "0.24.0", "on everything else"): (
        WARMS,
        f"    if current_platform.is_rocm():\n        pass\n    else:\n    {WARMS}",
    ),
    ("kernel_warmup", "0.24.0", "not behind a return"): (
        WARMS,
        f"    if not current_platform.is_cuda_alike():\n        return\n{WARMS}",
    ),
    ("kernel_warmup", "0.24.0", "by a flag"): (WARMS, f"    on_rocm = is_on_rocm()\n    if on_rocm:\n    {WARMS}"),
    ("kernel_warmup", "0.24.0", "where it is supported"): (WARMS, f"    if is_msa_supported():\n    {WARMS}"),
    ("kernel_warmup", "0.24.0", "by capability"): (
        WARMS,
        f"    if current_platform.has_device_capability(90):\n    {WARMS}",
    ),
    ("kernel_warmup", "0.24.0", "not where it isn't supported"): (
        WARMS,
        f"    if not is_msa_supported(worker):\n        return\n{WARMS}",
    ),
    ("kernel_warmup", "0.24.0", "in a function of its own"): (
        WARMS,
        f"    def warm():\n    {WARMS}\n    if is_msa_supported():\n        warm()\n",
    ),
    ("kernel_warmup", "0.24.0", "in a while"): (WARMS, f"    while platform.is_rocm():\n    {WARMS}        break\n"),
    ("kernel_warmup", "0.24.0", "in a match"): (
        WARMS,
        f"    match platform.name:\n        case 'rocm':\n        {WARMS}",
    ),
    ("kernel_warmup", "0.24.0", "in a try"): (
        MINIMAX,
        "    try:\n        from vllm.model_executor.warmup.minimax_m3_msa_warmup import minimax_m3_msa_warmup\n"
        "    except ImportError:\n        return\n",
    ),
    ("kernel_warmup", "0.33.0", "by another name"): (
        PCIE,
        "        from x import warmup_flashinfer_pcie_ipc_allreduce as warm\n        warm(worker)\n",
    ),
    ("kernel_warmup", "0.33.0", "by a string"): (
        PCIE,
        "        getattr(flashinfer_pcie_ipc_all_reduce, 'warmup_flashinfer_pcie_ipc_allreduce')(worker)\n",
    ),
    ("kernel_warmup", "0.33.0", "read"): (PCIE, PCIE.replace("flash", "warmed = flash", 1)),
    ("aiter_ops", "0.24.0", "by name"): (
        PROBES,
        f"{PROBES}    global x\n    if x is None:\n        x = import_module('aiter')\n    return x\n\n\ndef old():\n",
    ),
    ("aiter_ops", "0.24.0", "in another function"): (
        PROBES,
        f"def ask():\n    from aiter import x\n\n\n{PROBES}    ask()\n\n\ndef old():\n",
    ),
    ("platform_import", "0.23.0", "by another logger"): ("logger.warning_once(", "LOG.warning_once("),
    ("platform_import", "0.23.0", "by a string"): ("logger.warning_once(", "getattr(logger, 'warning_once')("),
    ("platform_import", "0.23.0", "by keywords"): ("logger.warning_once(", "logger.warning_once(**once, msg="),
    ("platform_memory", "0.20.2", "in another function"): (
        "device_props = torch.cuda.get_device_properties(device_id)\n        return device_props.total_memory\n",
        "return total_memory(device_id)\n",
    ),
    ("platform_memory", "0.23.0", "a limit of the user's"): (
        TOTAL,
        f"        if envs.LIMIT:\n            return envs.LIMIT\n{TOTAL}",
    ),
    ("platform_memory", "0.23.0", "a rule for APUs"): (
        TOTAL,
        f"        if on_gfx1151():\n            return host_memory() // 2\n{TOTAL}",
    ),
    ("platform_memory", "0.23.0", "a reserve"): (
        TOTAL,
        TOTAL.replace("total_memory\n", "total_memory - reserve(device_id)\n"),
    ),
    ("platform_memory", "0.23.0", "another device"): (TOTAL, TOTAL.replace("(device_id)", "(device_id + 1)")),
    ("platform_memory", "0.23.0", "another number"): (TOTAL, TOTAL.replace("total_memory", "total_global_memory")),
    ("platform_memory", "0.33.0", "amdsmi's query renamed"): (
        "return _query_total_memory_from_amdsmi(",
        "return _query_vram_from_amdsmi(",
    ),
    ("tilelang_jit", "0.30.0", "a kernel of its own"): (
        "    compiled_kernel: Callable",
        "    kernel = kernel_function\n    compiled_kernel: Callable",
    ),
    ("qwen_vl_warmup", "0.33.0", "used otherwise"): (MODEL, f"{MODEL}    print(Qwen3_VisionTransformer)\n"),
    ("fa_utils", "0.25.1", "another flag"): (UPSTREAM, "        HAS_FA = True\n"),
    ("fa_utils", "0.25.1", "a second flag"): (
        f"{UPSTREAM}    except ImportError:\n",
        f"{UPSTREAM}        HAS_FA = True\n    except ImportError:\n        HAS_FA = False\n",
    ),
    ("fa_utils", "0.33.0", "under a switch too"): (ON_ROCM, ON_ROCM.replace(":", " and envs.VLLM_UPSTREAM_FA:")),
    ("fa_utils", "0.33.0", "in a switch"): (ON_ROCM, f"{ON_ROCM[2:]}\n    pass\nif envs.VLLM_UPSTREAM_FA:"),
    ("fa_utils", "0.33.0", "after another platform"): (
        "current_platform.is_cuda():",
        "current_platform.is_cuda_alike():",
    ),
    ("fa_utils", "0.33.0", "another name for the platform"): (ON_ROCM, ON_ROCM.replace("current", "platforms.current")),
    ("mla_attention", "0.20.2", "a flag"): (MLA, f"{MLA}            is_upstream_fa = True\n"),
    ("platform_arch", "0.17.0", "a variable"): (
        "\ndef on_gfx9(",
        "\ndef arch():\n    p = torch.cuda.get_device_properties(0)\n    return p.gcnArchName\n\n\ndef on_gfx9(",
    ),
    ("platform_arch", "0.16.0", "a variable, in an or"): (
        NAVI,
        "props = torch.cuda.get_device_properties(0)\n"
        '        return "gfx11" in props.gcnArchName or "gfx12" in props.gcnArchName',
    ),
    ("platform_arch", "0.33.0", "a variable, in an or"): (
        GFX9,
        GFX9.replace("return", f'p = {TORCH}\n    return "gfx90a" in p.gcnArchName or "gfx94" in p.gcnArchName or'),
    ),
    ("platform_arch", "0.33.0", "by getattr"): (
        GFX9,
        GFX9.replace("_ON_GFX9", f'"gfx9" in getattr({TORCH}, "gcnArchName", "")'),
    ),
    ("platform_arch", "0.33.0", "torch before amdsmi"): (
        AMDSMI,
        f"    if in_wsl():\n        return {TORCH}.gcnArchName\n{AMDSMI}",
    ),
    ("platform_arch", "0.33.0", "torch before amdsmi, in the try"): (
        AMDSMI,
        AMDSMI.replace("try:\n", f"try:\n        if in_wsl():\n            return {TORCH}.gcnArchName\n"),
    ),
    ("platform_arch", "0.33.0", "amdsmi sometimes"): (
        f"{AMDSMI}    except Exception as e:\n",
        "    if not in_wsl():\n      try:\n"
        "        return _query_gcn_arch_from_amdsmi()\n      except Exception as e:\n",
    ),
    ("platform_arch", "0.16.0", "the capability in a try"): (
        f"        major, minor = {CAPABILITY}\n",
        f"        try:\n            major, minor = {CAPABILITY}\n        except OSError:\n            return None\n",
    ),
    ("platform_arch", "0.16.0", "the capability in another function"): (
        "\ndef on_gfx9(",
        f"\ndef capable(device_id):\n    return {CAPABILITY}\n\n\ndef on_gfx9(",
    ),
    ("platform_arch", "0.17.0", "the capability first"): (
        "        cap = _capability_from_gcn_arch(_GCN_ARCH)\n",
        f"        cap = {CAPABILITY}\n",
    ),
    ("flashinfer_all_reduce", "0.33.0", "vLLM's own with it"): (
        FLASHINFER,
        f"{FLASHINFER}    import vllm.other as x\n",
    ),
    ("flashinfer_all_reduce", "0.33.0", "asked of vLLM"): (
        "fi_ar_available = False\n",
        "fi_ar_available = has_flashinfer_comm()\n",
    ),
    ("all2all_utils", "0.33.0", "in a function that is called"): (
        "\ndef get_ep_all2all_manager(",
        "\ndef mori():\n    from .prepare_finalize.mori import X\n\n\nmori()\n\n\ndef get_ep_all2all_manager(",
    ),
    ("all2all_utils", "0.33.0", "by name"): (
        "\ndef get_ep_all2all_manager(",
        "\nX = resolve_obj_by_qualname('vllm.model_executor.layers.fused_moe.prepare_finalize.mori.X')\n"
        "\n\ndef get_ep_all2all_manager(",
    ),
    ("flashinfer_all_reduce", "0.33.0", "two at once"): (FLASHINFER, f"{FLASHINFER}    import flashinfer, os\n"),
    ("flashinfer_all_reduce", "0.33.0", "a flag of its own"): (FLASHINFER, f"{FLASHINFER}    mode = 2\n"),
    ("flashinfer_all_reduce", "0.33.0", "a call"): (FLASHINFER, f"{FLASHINFER}    register()\n"),
    ("allreduce_fusion", "0.33.0", "vLLM's own with it"): (
        "\n    try:\n        import flashinfer.comm",
        "\n    import vllm.other as x\n\n    try:\n        import flashinfer.comm",
    ),
    ("tilelang_jit", "0.30.0", "cast"): ("    return wrapper", "    return cast(Any, wrapper)"),
    ("sampler", "0.26.0", "made with the sampler"): (
        "self.forward = self.forward_hip",
        "self._init_aiter_ops(); self.forward = self.forward_hip",
    ),
    ("sampler", "0.26.0", "by name"): (
        "self.forward = self.forward_hip",
        "importlib.import_module('aiter.ops.sampling'); self.forward = self.forward_hip",
    ),
}


@pytest.mark.parametrize("case", EDITS, ids=str)
def test_an_edit_of_stock_is_not_clear(case):
    name, release, _ = case
    source = path_of(tree(release), PATCHES[name].module).read_text()
    before, after = EDITS[case]
    assert before in source
    kind = PATCHES[name].examine(ast.parse(source.replace(before, after, 1))).kind
    assert kind == ("needed" if name == "jit_monitor" else "unknown")
