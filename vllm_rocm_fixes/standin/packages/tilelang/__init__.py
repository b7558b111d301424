"""Stand-in for TileLang: changes the environment and the path as the real one does, then loads its own TVM."""

import os
import sys

from rocm_standin import arrive

arrive(__name__)

_HERE = os.path.dirname(os.path.abspath(__file__))
_LIB = os.path.join(_HERE, "lib")
_TVM = os.path.join(_HERE, "3rdparty", "tvm", "python")
sys.path.insert(0, _LIB)
if _TVM not in sys.path:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_TVM, os.environ.get("PYTHONPATH", ""))))
    sys.path.insert(0, _TVM)
os.environ["TVM_LIBRARY_PATH"] = _LIB
os.environ["TL_CUTLASS_PATH"] = os.path.join(_HERE, "3rdparty", "cutlass", "include")
os.environ["TL_COMPOSABLE_KERNEL_PATH"] = os.path.join(_HERE, "3rdparty", "composable_kernel", "include")
os.environ["TL_TEMPLATE_PATH"] = os.path.join(_HERE, "src")

import torch  # noqa: E402

if torch.version.hip:
    os.environ["TVM_FFI_DISABLE_TORCH_C_DLPACK"] = "1"

import tvm  # noqa: E402, F401
