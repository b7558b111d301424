"""Stand-in for AITER's names of types: what they are on the node's gfx942."""

import torch
from rocm_standin import arrive

arrive(__name__)

fp8 = torch.float8_e4m3fnuz
