"""The series, in order."""

from vllm_rocm_fixes.patch import Patch

SERIES: tuple[Patch, ...] = ()
