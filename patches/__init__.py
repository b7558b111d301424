"""The series, in order."""

from vllm_rocm_fixes.patch import Patch

from . import aiter_ops, all2all, all2all_utils, import_utils, sampler

SERIES: tuple[Patch, ...] = (
    sampler.PATCH,
    aiter_ops.PATCH,
    all2all_utils.PATCH,
    all2all.PATCH,
    import_utils.PATCH,
)
