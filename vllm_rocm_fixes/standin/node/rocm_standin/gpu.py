"""The watch on torch.cuda: what would initialise HIP is written down, and answered for one MI300X.

torch may be a CPU build. What asks for the device on such a build raises; here it gets an answer, so that the start
goes on. What a ROCm torch answers without initialising HIP (`device_count`, `is_available`: it asks amdsmi) isn't an
event. As in a ROCm torch, a process that has initialised HIP can't use it after a fork.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from . import option, write

TOTAL_MEMORY = 192 << 30

# Names of torch.cuda that begin with _lazy_init, or lead to it, and what one MI300X answers.
_ANSWERS: dict[str, Any] = {
    "get_device_name": "AMD Instinct MI300X",
    "get_device_capability": (9, 4),
    "get_device_properties": types.SimpleNamespace(
        name="AMD Instinct MI300X",
        major=9,
        minor=4,
        total_memory=TOTAL_MEMORY,
        multi_processor_count=304,
        gcnArchName="gfx942:sramecc+:xnack-",
        warp_size=64,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=65536,
        shared_memory_per_multiprocessor=65536,
        L2_cache_size=4 << 20,
        is_integrated=False,
        is_multi_gpu_board=False,
        uuid="00ff74a1-0000-1000-8000-000000000001",
        pci_bus_id=5,
        pci_device_id=0,
        pci_domain_id=0,
    ),
    "current_device": 0,
    "set_device": None,
    "synchronize": None,
    "can_device_access_peer": True,
    "mem_get_info": (TOTAL_MEMORY, TOTAL_MEMORY),
    "cudart": None,
    "current_blas_handle": 0,
    "get_arch_list": ["gfx942"],
    "init": None,
}
_ACCELERATOR: dict[str, Any] = {
    "current_device_index": 0,
    "set_device_index": None,
    "synchronize": None,
    "get_device_capability": {},
    "get_memory_info": (TOTAL_MEMORY, TOTAL_MEMORY),
    "current_stream": None,
}


class _Context:
    """The HIP context of this process."""

    initialised = False
    forked = False


def _touch(name: str) -> None:
    """What _lazy_init does to a process with a ROCm torch."""
    write("gpu", name)
    if _Context.forked:
        raise RuntimeError(
            "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the "
            "'spawn' start method"
        )
    _Context.initialised = True


def keep_context() -> None:
    """Forget that this process was forked: it stands for the one it came from, HIP context included."""
    _Context.forked = False


def _after_fork() -> None:
    _Context.forked = _Context.initialised


def _answering(name: str, original: Callable[..., Any] | None, answer: Any) -> Callable[..., Any]:
    def ask(*args: Any, **kwargs: Any) -> Any:
        _touch(name)
        return answer

    return functools.wraps(original)(ask) if original is not None else ask


def _constant(answer: Any, *args: Any) -> Any:
    return answer


def _everywhere(cuda: Any, name: str, function: Callable[..., Any]) -> None:
    """Put a function into torch.cuda, and into the modules below it that took the original by name."""
    original = getattr(cuda, name, None)
    for module in [module for path, module in sys.modules.items() if path.startswith("torch.cuda.")]:
        if original is not None and getattr(module, name, None) is original:
            setattr(module, name, function)
    setattr(cuda, name, function)


def watch(torch: Any) -> None:
    """Put the watch on this process's torch; it stays through fork."""
    cuda = torch.cuda
    for name, answer in _ANSWERS.items():
        _everywhere(cuda, name, _answering(f"torch.cuda.{name}", getattr(cuda, name, None), answer))
    for name, answer in _ACCELERATOR.items():
        original = getattr(torch.accelerator, name, None)
        if original is not None:
            setattr(torch.accelerator, name, _answering(f"torch.accelerator.{name}", original, answer))
    _everywhere(cuda, "_lazy_init", lambda: _touch("torch.cuda._lazy_init"))
    _everywhere(cuda, "is_initialized", lambda: _Context.initialised and not _Context.forked)
    cuda._is_in_bad_fork = lambda: _Context.forked
    cuda._is_compiled = lambda: True
    for name, answer in {"_cuda_getCurrentRawStream": 0, "_cuda_getDeviceCount": 1}.items():
        if not hasattr(torch._C, name):  # torch imports these by name where CUDA is compiled in
            setattr(torch._C, name, functools.partial(_constant, answer))
    cuda._device_count_amdsmi = lambda: 1
    _everywhere(cuda, "device_count", lambda: 1)
    torch.accelerator.device_count = lambda: 1
    if option("HIP"):
        torch.version.hip = option("HIP")
        _everywhere(cuda, "is_available", lambda: True)
        torch.accelerator.is_available = lambda: True
    os.register_at_fork(after_in_child=_after_fork)
