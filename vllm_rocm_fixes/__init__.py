"""vllm-rocm-fixes: the vLLM that an AMD cluster already runs starts clean."""

from ._version import __version__

__all__ = ["__version__", "prepare", "register"]


def prepare() -> None:
    """Return None."""


def register() -> None:
    """Return None."""
