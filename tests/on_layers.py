"""On the node: files that import a package for a layer, a model or a communicator; checks of on_release.py."""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.metadata
import os
import re
import sys
import types
from pathlib import Path

from on_release import Nothing, listening, seen

MODELS = ("torchvision", "soundfile", "librosa", "av")  # what files of multimodal models import, and nothing here uses
LAYERS = {
    "gdn": ("vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn", "QwenGatedDeltaNetAttention", "aiter"),
    "gdn_old": ("vllm.model_executor.layers.mamba.gdn_linear_attn", "GatedDeltaNetAttention", "aiter"),
    "qwen_omni": (
        "vllm.model_executor.models.qwen2_5_omni_thinker",
        "Qwen2_5OmniThinkerForConditionalGeneration",
        "flash_attn",
    ),
    "qwen3_omni": (
        "vllm.model_executor.models.qwen3_omni_moe_thinker",
        "Qwen3OmniMoeThinkerForConditionalGeneration",
        "flash_attn",
    ),
    "aiter_fa": ("vllm.v1.attention.backends.rocm_aiter_fa", "AiterFlashAttentionImpl", "aiter"),
    "aiter_fa_old": ("vllm.v1.attention.backends.rocm_aiter_fa", "AiterFlashAttentionImpl", "aiter"),
    "mla_common": ("vllm.v1.attention.backends.mla.common", "MLACommonImpl", "flash_attn"),
    "eplb_nixl": ("vllm.distributed.eplb.eplb_communicator", "NixlEplbCommunicator", "rixl"),
}
NAMES = {
    "gdn": ("GDN_AITER_TRITON_AVAILABLE", "gdn_aiter_fused_rearrange_sigmoid_gated_delta_rule"),
    "gdn_old": ("GDN_AITER_TRITON_AVAILABLE", "gdn_aiter_fused_rearrange_sigmoid_gated_delta_rule"),
    "qwen_omni": ("flash_attn",),
    "qwen3_omni": ("flash_attn",),
    "aiter_fa": ("_pa_decode_gluon", "get_recommended_splits"),
    "aiter_fa_old": ("aiter",),
    "mla_common": ("flash_attn_varlen_func",),
    "eplb_nixl": ("NixlWrapper", "nixl_agent_config"),
}
# For each release the files that are looked at: the patches that it needs.
NEEDED = {
    "0.14.1": ("qwen_omni", "qwen3_omni", "aiter_fa_old", "mla_common"),
    "0.20.2": ("eplb_nixl",),
    "0.21.0": ("gdn_old",),
    "0.30.0": ("gdn", "aiter_fa"),
    "0.33.0": ("gdn", "qwen_omni"),
}
CASES = ("works", "by name", "missing", "RuntimeError", "SystemExit")


def layer_imports(place: Path) -> dict:
    from on_node import in_fork

    wanted = NEEDED[importlib.metadata.version("vllm").partition("+")[0]]
    return {name: {case: in_fork(_layer, place / name / case, name, case) for case in CASES} for name in wanted}


def _stand_ins() -> None:
    class Finder:
        def find_spec(self, name, path=None, target=None):
            mine = name.partition(".")[0] in MODELS
            return importlib.machinery.ModuleSpec(name, self, is_package=True) if mine else None

        def create_module(self, spec):
            module = types.ModuleType(spec.name)
            module.__getattr__ = lambda name: type(name, (), {}) if name[:2] != "__" else _none(name)
            return module

        def exec_module(self, module):
            pass

    sys.meta_path.append(Finder())


def _triton() -> None:
    """A driver of Triton's that knows its GPU without asking one; flash-linear-attention asks as it is imported."""
    from triton.runtime import driver

    target = types.SimpleNamespace(backend="hip", arch="gfx942", warp_size=64)
    utils = types.SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": 65536})
    driver.set_active(types.SimpleNamespace(get_current_target=lambda: target, utils=utils))


def _none(name):
    raise AttributeError(name)


def _package(place: Path, package: str, case: str) -> None:
    """The package as the case wants it: there, missing, or raising."""
    if case == "missing":
        sys.path[:] = [p for p in sys.path if not os.path.exists(os.path.join(p, package))]
        sys.path_importer_cache.clear()
        importlib.invalidate_caches()
    elif package == "rixl":
        folder = place / "rixl"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("" if case in ("works", "by name") else f"raise {case}('broken')\n")
        (folder / "_api.py").write_text("class nixl_agent: ...\nclass nixl_agent_config: ...\n")
        (folder / "_bindings.py").write_text("class nixlXferTelemetry: ...\n")
        sys.path.insert(0, str(place))
        importlib.invalidate_caches()
    elif case not in ("works", "by name"):
        os.environ[f"ROCM_STANDIN_{package.upper()}_FAILS"] = case
        os.environ[f"ROCM_STANDIN_{package.upper()}_FAILS_AT"] = "package"


def _layer(place: Path, name: str, case: str) -> dict:
    """Import the file of a layer, and make one: what was imported at each step, and which names were bound."""
    module, owner, package = LAYERS[name]
    _stand_ins()
    _triton()
    _package(place, package, case)
    with listening() as said:
        done = {"import": seen(lambda: bool(importlib.import_module(module)))}
        found = vars(sys.modules[module]) if done["import"]["raised"] is None else None
        done["import"]["rixl"] = "rixl" in sys.modules
        if found is not None:
            done["bound"] = [n for n in NAMES[name] if n in found]
            if case == "by name":
                done["names"] = {n: _kind(getattr(sys.modules[module], n, "nothing")) for n in NAMES[name]}
                return done
            done["make"] = seen(globals()[f"_make_{name}"], sys.modules[module], getattr(sys.modules[module], owner))
            done["names"] = {n: _kind(found[n]) for n in NAMES[name] if n in found}
    if "vllm_rocm_fixes" in sys.modules:
        results = sys.modules["vllm_rocm_fixes"].current().results
        done["state"] = results[name].state
    return done | {"said": [line for line in said if "counts as absent" in line or "flash_attn is not" in line]}


def _kind(value) -> object:
    return value if value is None or isinstance(value, bool | str) else "there"


def _make_gdn(module, owner) -> None:
    """The constructor as far as its base, which wants a configuration."""
    owner.__init__(object.__new__(owner), None, None)


_make_gdn_old = _make_gdn


def _make_qwen_omni(module, owner) -> object:
    """What the audio tower's configuration was told before the model itself is built."""
    audio = types.SimpleNamespace(_attn_implementation="eager")
    thinker = types.SimpleNamespace(audio_config=audio)
    config = Nothing(model_config=Nothing(hf_config=types.SimpleNamespace(thinker_config=thinker)))
    with contextlib.suppress(Exception):  # the model wants more of a configuration than there is
        owner(vllm_config=config)
    return audio._attn_implementation


_make_qwen3_omni = _make_qwen_omni


def _make_aiter_fa(module, owner) -> bool:
    return bool(owner(8, 64, 1.0, 8, None, None, "auto"))


_make_aiter_fa_old = _make_aiter_fa


def _make_mla_common(module, owner) -> str:
    """The function that the layer computes with."""
    module.MLACommonBaseImpl.__init__ = lambda self, *args: None
    for question in ("use_flashinfer_prefill", "use_trtllm_ragged_deepseek_prefill", "use_cudnn_prefill"):
        setattr(module, question, lambda: False)
    module.get_flash_attn_version = lambda: None
    module.get_current_vllm_config = Nothing
    module.MLACommonMetadataBuilder.determine_chunked_prefill_workspace_size = staticmethod(lambda config: 1)
    type.__setattr__(owner, "__abstractmethods__", frozenset())
    return str(owner().flash_attn_varlen_func)


def _make_eplb_nixl(module, owner) -> bool:
    return module.has_nixl()


# FlashInfer's communication

COMMUNICATION = {
    "flashinfer_all_reduce": "vllm.distributed.device_communicators.flashinfer_all_reduce",
    "flashinfer_pcie_ipc": "vllm.distributed.device_communicators.flashinfer_pcie_ipc_all_reduce",
    "allreduce_fusion": "vllm.compilation.passes.fusion.allreduce_rms_fusion",
    "all2all_flashinfer": "vllm.distributed.device_communicators.all2all",
    "mla_flashinfer": "vllm.v1.attention.backends.mla.common",
}
COMMUNICATES = {
    "0.14.1": ("all2all_flashinfer", "mla_flashinfer"),
    "0.22.1": ("all2all_flashinfer", "allreduce_fusion", "flashinfer_all_reduce"),
    "0.33.0": ("allreduce_fusion", "flashinfer_all_reduce", "flashinfer_pcie_ipc"),
}
FLAGS = ("fi_ar_available", "_pcie_ipc_available", "flashinfer_comm", "flashinfer_available")


def flashinfer_comm(place: Path) -> dict:
    from on_node import in_fork

    wanted, cases = COMMUNICATES[importlib.metadata.version("vllm").partition("+")[0]], ("works", "OSError", "CUDA")
    return {n: {case: in_fork(_communication, place / n / case, n, case) for case in cases} for n in wanted}


def _communication(place: Path, name: str, case: str) -> dict:
    """Import one of the files, on ROCm or as on CUDA: what was imported, and what it says of FlashInfer."""
    import torch
    import vllm.platforms

    passes = Path(vllm.platforms.__file__).parent.parent / "compilation" / "passes"
    for file in passes.rglob("*.py"):  # operators of vLLM's own library, which isn't here
        for operator in re.findall(r"torch\.ops\._C\.(\w+)", file.read_text()):
            if not hasattr(torch.ops._C, operator) and not re.search("fp4|minimax", operator):  # stock looks for those
                setattr(torch.ops._C, operator, Nothing())
    os.environ["FLASHINFER_CUBIN_DIR"] = str(place)
    sys.modules["flashinfer_cubin"] = types.ModuleType("flashinfer_cubin")
    sys.modules["flashinfer_cubin"].__spec__ = importlib.machinery.ModuleSpec("flashinfer_cubin", None)
    if case == "OSError":
        (place / "flashinfer" / "comm").mkdir(parents=True)
        for file in ("comm/__init__.py", "prefill.py"):
            (place / "flashinfer" / file).write_text("raise OSError('libcudart.so: cannot open')\n")
        (place / "flashinfer" / "__init__.py").write_text("class BatchPrefillWithRaggedKVCacheWrapper: ...\n")
        sys.path.insert(0, str(place))
        importlib.invalidate_caches()
    elif case == "CUDA":
        vllm.platforms.current_platform.is_rocm = lambda: False
    done = {"import": seen(lambda: bool(importlib.import_module(COMMUNICATION[name])))}
    if done["import"]["raised"] is None:
        module = sys.modules[COMMUNICATION[name]]
        done["flags"] = {n: _kind(getattr(module, n)) for n in FLAGS if hasattr(module, n)}
        done["fusion"] = hasattr(module, "RocmAiterAllReduceFusionPass")
        done["late"] = seen(lambda: bool(module.MnnvlMoe)) if name == "all2all_flashinfer" else None
    if "vllm_rocm_fixes" in sys.modules:
        done["state"] = sys.modules["vllm_rocm_fixes"].current().results[name].state
    return done
