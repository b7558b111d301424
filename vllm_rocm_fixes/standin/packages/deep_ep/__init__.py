"""Stand-in for DeepEP."""

import torch
from rocm_standin import arrive

arrive(__name__)

topk_idx_t = torch.int64
