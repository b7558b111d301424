"""Stand-in for Mori 1.1 and later: `import mori` is light, and a first use of mori.ops loads its native library."""

from rocm_standin import arrive

arrive(__name__)
