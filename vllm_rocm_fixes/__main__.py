"""`python -m vllm_rocm_fixes`: the command line, where its script isn't on PATH."""

import sys

from .cli import main

sys.exit(main())
