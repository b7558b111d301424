"""The door for vLLM's own test suite, which imports `tests.utils` before vLLM has called any plugin.

pytest loads this in every session of an environment that holds the wheel. Outside of vLLM's checkout it does nothing:
it imports neither vLLM nor the rest of the overlay. `-p no:rocm_fixes` leaves it out.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

_MARKS = (b"class RemoteOpenAIServer", b"class RemoteVLLMServer")


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before the first conftest: mend what is imported, in a session of vLLM's own tests."""
    if is_checkout(early_config.rootpath) or is_checkout(early_config.invocation_params.dir):
        import vllm_rocm_fixes

        vllm_rocm_fixes.prepare()


def is_checkout(folder: Path) -> bool:
    """Whether a folder, or one that it lies in, holds vLLM's tests; vLLM itself may be installed elsewhere.

    In vLLM's images the tests stand without the `vllm` folder beside them, so their content decides.
    """
    for root in (folder, *folder.parents):
        try:
            text = (root / "tests" / "utils.py").read_bytes()
        except OSError:
            continue
        return any(mark in text for mark in _MARKS) and b"vllm" in text
    return False
