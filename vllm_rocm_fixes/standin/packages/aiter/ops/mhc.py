"""Stand-in for aiter.ops.mhc: as in the real one a kernel hides its own signature, and its fake shows it."""

from rocm_standin import arrive

arrive(__name__)


def _kernel(gen_fake):
    def decorate(function):
        def kernel(*args, **kwargs):
            raise NotImplementedError("the stand-in node has no MHC kernels")

        return kernel

    return decorate


def mhc_pre_fake(residual, fn, hc_scale, hc_base, rms_eps=1e-6, norm_weight=None, norm_eps=1e-6):
    raise NotImplementedError


@_kernel(gen_fake=mhc_pre_fake)
def mhc_pre(residual, fn, hc_scale, hc_base, rms_eps=1e-6, norm_weight=None, norm_eps=1e-6):
    raise NotImplementedError


@_kernel(gen_fake=None)
def mhc_post(out, x, residual, post_layer_mix, comb_res_mix):
    raise NotImplementedError


def mhc_fused_post_pre_fake(layer_input, residual_in, post_layer_mix, fn, norm_weight=None, norm_eps=1e-6):
    raise NotImplementedError


@_kernel(gen_fake=mhc_fused_post_pre_fake)
def mhc_fused_post_pre(layer_input, residual_in, post_layer_mix, fn, norm_weight=None, norm_eps=1e-6):
    raise NotImplementedError
