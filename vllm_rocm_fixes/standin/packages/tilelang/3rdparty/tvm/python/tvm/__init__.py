"""Stand-in for the TVM that TileLang brings along: the real one loads the HIP stub into the global scope."""

from rocm_standin import arrive

arrive(__name__)
