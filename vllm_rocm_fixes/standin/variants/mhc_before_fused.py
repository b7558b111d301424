"""Stand-in for aiter.ops.mhc as it was before the fused kernel and the norm came."""

from rocm_standin import write

write("import", __name__)


def mhc_pre_fake(residual, fn, hc_scale, hc_base, rms_eps=1e-6):
    raise NotImplementedError


def mhc_pre(*args, **kwargs):
    raise NotImplementedError("the stand-in node has no MHC kernels")


def mhc_post(*args, **kwargs):
    raise NotImplementedError("the stand-in node has no MHC kernels")
