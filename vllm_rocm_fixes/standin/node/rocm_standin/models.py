"""Tiny models, made on the spot: a config.json each, enough for vLLM to make its configuration without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_DENSE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
_MOE = {
    **_DENSE,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
_MLA = {
    **_DENSE,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_MXFP4 = {
    "dtype": "fp4",
    "qscheme": "per_group",
    "group_size": 32,
    "scale_format": "e8m0",
    "is_dynamic": False,
    "ch_axis": -1,
    "symmetric": None,
    "observer_cls": "PerBlockMXObserver",
}
_LINEAR = {
    "weight": _MXFP4,
    "input_tensors": {**_MXFP4, "is_dynamic": True},
    "output_tensors": None,
    "bias": None,
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": _DENSE,
    "moe": _MOE,
    "mla": _MLA,
    "fp8": {**_DENSE, "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}},
    "quark": {
        **_DENSE,
        "quantization_config": {
            "quant_method": "quark",
            "quant_mode": "eager_mode",
            "global_quant_config": _LINEAR,
            "layer_quant_config": {},
            "layer_type_quant_config": {},
            "exclude": ["lm_head"],
            "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
        },
    },
}


def make(folder: Path) -> None:
    """Write each model into a folder of its name."""
    for name, config in MODELS.items():
        target = folder / name
        target.mkdir(parents=True, exist_ok=True)
        (target / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
