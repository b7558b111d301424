"""Stand-in for flash-attention. A ROCm build with AITER's Triton kernels imports AITER (option FLASH_ATTN=aiter)."""

from rocm_standin import arrive, fail, option

arrive(__name__)
fail(option("FLASH_ATTN_FAILS"), __name__)
if option("FLASH_ATTN") == "aiter":
    import aiter  # noqa: F401
