"""Stand-in for mori.ops: loads mori.cpp, as the annotation in vLLM's Mori prepare_finalize makes the real one do."""

from rocm_standin import arrive

arrive(__name__)

import mori.cpp  # noqa: E402, F401
