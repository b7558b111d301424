"""Stand-in for AMD's AITER: does to its process what importing the real one does.

The real one (0.1.7 to 0.1.26) runs rocminfo, writes AITER_ASM_DIR and MAX_JOBS, extends sys.path, builds kernels and
asks torch for the device. The option AITER_FAILS makes the import raise instead, as a failed kernel build does.
"""

import os
import subprocess
import sys

from rocm_standin import arrive, fail, option

arrive(__name__)

_HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(_HERE, "jit"))
if not os.environ.get("GPU_ARCHS"):
    subprocess.run(["rocminfo"], check=True, stdout=subprocess.DEVNULL)
os.environ["AITER_ASM_DIR"] = os.path.join(_HERE, "hsa")
os.environ.setdefault("MAX_JOBS", "1")
if option("AITER_FAILS_AT") == "package":
    fail(option("AITER_FAILS"), __name__)

import torch  # noqa: E402

torch.cuda.get_device_properties(0)

from . import dtypes  # noqa: E402, F401
