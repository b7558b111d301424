"""Stand-in for FlashInfer: importing the package asks each GPU for its capability, which initialises it."""

from rocm_standin import arrive

arrive(__name__)

import torch  # noqa: E402

for _device in range(torch.cuda.device_count()):
    torch.cuda.get_device_capability(_device)
