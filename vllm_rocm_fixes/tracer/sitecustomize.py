"""Runs at the start of each Python process below `vllm-rocm-fixes trace`: starts the tracer, and gets out of the way.

The folder of this file stands first on PYTHONPATH, so that children are traced too. It is taken off sys.path here, and
the machine's own sitecustomize runs afterwards. An error of the tracer isn't the program's.
"""

import os
import sys


def _trace() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    try:
        import rocm_fixes_tracer  # type: ignore[import-not-found]
    except Exception as error:
        sys.stderr.write(f"vllm-rocm-fixes trace: this process isn't traced: {type(error).__name__}: {error}\n")
        rocm_fixes_tracer = None
    while here in sys.path:
        sys.path.remove(here)
    folder = os.environ.get("_ROCM_FIXES_TRACE")
    if rocm_fixes_tracer and folder:
        rocm_fixes_tracer.guarded(rocm_fixes_tracer.start)(folder)


def _next() -> None:
    """The machine's own sitecustomize, as if this one weren't there."""
    this = sys.modules.pop(__name__)
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault(__name__, this)


_trace()
_next()
