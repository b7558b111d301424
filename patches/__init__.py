"""The series, in order."""

from vllm_rocm_fixes.patch import Patch

from . import aiter_ops, sampler

SERIES: tuple[Patch, ...] = (
    sampler.PATCH,
    aiter_ops.PATCH,
)
