"""Stand-in for NIXL EP: vLLM asserts that topk_idx_t is a dtype."""

import torch
from rocm_standin import arrive

arrive(__name__)

topk_idx_t = torch.int64
