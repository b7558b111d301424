"""The series, in order."""

from vllm_rocm_fixes.patch import Patch

SERIES: tuple[Patch, ...]


def __getattr__(name: str) -> object:
    """SERIES, made when it is first asked for: mended code imports the file of one patch, and not of all."""
    global SERIES  # noqa: PLW0603
    if name != "SERIES":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import (
        aiter_dtype,
        aiter_ops,
        all2all,
        all2all_utils,
        fa_utils,
        flashinfer_comm,
        import_utils,
        jit_monitor,
        kernel_warmup,
        layer_imports,
        mhc,
        mla_attention,
        platform_arch,
        platform_import,
        platform_memory,
        quark,
        sampler,
        tests_utils,
        tilelang_jit,
        warmup_searches,
    )

    SERIES = (
        sampler.PATCH,
        aiter_ops.PATCH,
        aiter_dtype.PATCH,
        all2all_utils.PATCH,
        all2all.PATCH,
        import_utils.PATCH,
        kernel_warmup.PATCH,
        warmup_searches.QWEN_VL,
        warmup_searches.STEP5,
        tests_utils.PATCH,
        mhc.PATCH,
        jit_monitor.PATCH,
        quark.PATCH,
        platform_memory.PATCH,
        platform_arch.PATCH,
        platform_import.PATCH,
        fa_utils.PATCH,
        mla_attention.PATCH,
        tilelang_jit.PATCH,
        *layer_imports.PATCHES,
        *flashinfer_comm.PATCHES,
    )
    return SERIES
