"""Stand-in for aiter.ops.sampling: registers the three sampling ops, which work on the CPU.

The option AITER_FAILS names an exception: the import raises it, or with AITER_FAILS_AT=call the first kernel call does.
"""

import torch
from rocm_standin import arrive, fail, option, write

arrive(__name__)
if option("AITER_FAILS_AT") in ("", "sampling"):
    fail(option("AITER_FAILS"), "module_sampling")


def _called(name):
    write("call", f"aiter.ops.sampling.{name}")
    if option("AITER_FAILS_AT") == "call":
        fail(option("AITER_FAILS"), name)


def _limit(tensor, value, rows):
    """A limit for each row, from a tensor or one number for all."""
    return tensor.view(-1) if tensor is not None else torch.full((rows,), value)


def _keep_top_k(probs, k):
    ordered = probs.sort(dim=-1, descending=True).values
    last = ordered.gather(-1, (k.long().clamp(1, probs.shape[-1]) - 1).view(-1, 1))
    return probs.masked_fill(probs < last, 0)


def _keep_top_p(probs, p):
    ordered, order = probs.sort(dim=-1, descending=True)
    before = ordered.cumsum(dim=-1) - ordered
    kept = ordered.masked_fill(before >= p.view(-1, 1), 0)
    return torch.zeros_like(probs).scatter(-1, order, kept)


def _draw(probs):
    return torch.multinomial(probs, num_samples=1).view(-1).int()


def _top_k_renorm_probs(probs, top_k, top_k_value):
    _called("top_k_renorm_probs")
    kept = _keep_top_k(probs, _limit(top_k, top_k_value, probs.shape[0]))
    return kept / kept.sum(dim=-1, keepdim=True)


def _top_p_sampling(probs, indices, top_p, top_p_value, deterministic=False):
    _called("top_p_sampling_from_probs")
    return _draw(_keep_top_p(probs, _limit(top_p, top_p_value, probs.shape[0])))


def _top_k_top_p_sampling(probs, indices, top_k, top_k_value, top_p, top_p_value, deterministic=False):
    _called("top_k_top_p_sampling_from_probs")
    rows = probs.shape[0]
    kept = _keep_top_k(probs, _limit(top_k, top_k_value, rows))
    return _draw(_keep_top_p(kept / kept.sum(dim=-1, keepdim=True), _limit(top_p, top_p_value, rows)))


_LIBRARY = torch.library.Library("aiter", "FRAGMENT")
for _schema, _function in {
    "top_k_renorm_probs(Tensor probs, Tensor? top_k, int top_k_value) -> Tensor": _top_k_renorm_probs,
    "top_p_sampling_from_probs(Tensor probs, Tensor? indices, Tensor? top_p, float top_p_value, "
    "bool deterministic=False) -> Tensor": _top_p_sampling,
    "top_k_top_p_sampling_from_probs(Tensor probs, Tensor? indices, Tensor? top_k, int top_k_value, "
    "Tensor? top_p, float top_p_value, bool deterministic=False) -> Tensor": _top_k_top_p_sampling,
}.items():
    _LIBRARY.define(_schema)
    _LIBRARY.impl(_schema.split("(")[0], _function, "CompositeExplicitAutograd")
