"""platform_memory: the total memory of a GPU without initialising HIP, and the right number on APUs.

Stock: RocmPlatform.get_device_total_memory asks torch up to 0.23.0. The engine's configuration calls it in the parent.
From 0.24.0 on it asks amdsmi, which knows only the part of an APU's memory that its BIOS set aside.
Seen: up to 0.23.0 a HIP context in the parent, so workers are spawned where they were to be forked, and what was
registered in the parent is unknown in them. From 0.24.0 on small batch limits on APUs: 0.5 GiB for 110 (Strix Halo),
5 to 18 % of prefill (ROCm/vllm #1205, rocm-systems #8475).
Both are answered by the kernel driver's topology in sysfs, which is where the HIP runtime has its number from. From
0.24.0 on it counts where it gives more than amdsmi does: on an Instinct both give the same. Up to 0.23.0 a node without
that topology asks amdsmi for an Instinct, and torch, as stock does, for anything else.
Origin: vLLM #46141 (0.24.0). Delete this file when upstream has an APU's number without a HIP context.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_rocm_fixes.patch import Patch, Verdict, clear, needed, unknown
from vllm_rocm_fixes.syntax import (
    Function,
    calls,
    find,
    first_statement,
    function,
    imports,
    parse_expression,
    parse_statements,
)

_METHOD = "RocmPlatform.get_device_total_memory"
_AMDSMI = "_query_total_memory_from_amdsmi"
_ASKED = r"torch\.cuda\.get_device_properties\(device_id\)"
_TORCH = re.compile(rf"(?:return {_ASKED}|(\w+) = {_ASKED}\nreturn \1)\.total_memory")
_LOCAL = ("1", "2")  # heap types of a KFD memory bank: frame buffer, visible to the host and not (kfd_crat.h)
_INSTINCT = ("gfx90a", "gfx94", "gfx95")
topology = Path("/sys/class/kfd/kfd/topology/nodes")


def examine(tree: ast.Module) -> Verdict:
    """Whom get_device_total_memory asks, and in which order."""
    method = function(tree, _METHOD)
    if method is None:
        return unknown(f"looked for {_METHOD}, and it isn't there once")
    if imports(method, __name__):
        return clear("the driver's topology is asked before torch")
    if _answers(method):
        return needed("amdsmi's number is taken as it is, which is wrong on APUs")
    if _only_torch(method):
        return needed("it asks torch, which initialises HIP")
    return unknown(f"{_METHOD} asks neither torch nor amdsmi in a way that is known")


def mend(tree: ast.Module) -> None:
    """Put the topology's answer before torch's, or beside amdsmi's."""
    method = function(tree, _METHOD)
    assert method is not None
    for answer in _answers(method):
        asked = answer.value
        assert isinstance(asked, ast.Call)
        device = ast.unparse(asked.args[0])
        answer.value = parse_expression(f"usable_memory({device}, {ast.unparse(asked)})", answer)
    if calls(method, "usable_memory"):
        code = "from vllm_rocm_fixes.patches.platform_memory import usable_memory"
    else:
        code = (
            "from vllm_rocm_fixes.patches.platform_memory import total_memory\n_known = total_memory(cls, device_id)\n"
        )
        code += "if _known is not None:\n    return _known"
    start = first_statement(method.body)
    method.body[start:start] = parse_statements(code, method.body[start])


def _only_torch(method: Function) -> bool:
    """The method does nothing but ask torch: whatever else decides the answer (a limit, a reserve) keeps its say."""
    body = [ast.unparse(s) for s in method.body[first_statement(method.body) :]]
    return [a.arg for a in method.args.args] == ["cls", "device_id"] and bool(_TORCH.fullmatch("\n".join(body)))


def _answers(method: Function) -> list[ast.Return]:
    """Where amdsmi's number is returned as it is."""
    return find(method, ast.Return, lambda r: isinstance(r.value, ast.Call) and ast.unparse(r.value.func) == _AMDSMI)


# What the mended code calls


def total_memory(platform: Any, device_id: int) -> int | None:
    """The total memory in bytes of a GPU that vLLM counts as device_id; None where only torch can tell."""
    try:
        physical = platform.device_id_to_physical_device_id(device_id)
        visible = os.environ.get("ROCR_VISIBLE_DEVICES")  # torch counts behind it, amdsmi doesn't
        if visible:
            physical = int(visible.split(",")[physical])
        return _from_driver(physical) or _from_amdsmi(physical) or None
    except Exception:  # amdsmi isn't there, or a device is named by its UUID: stock asks torch
        return None


def usable_memory(physical_device_id: int, said: int) -> int:
    """What amdsmi said, in bytes, or what the driver gives to compute where that is more: the case of an APU."""
    try:
        return max(said, _from_driver(physical_device_id))
    except Exception:
        return said


def _from_amdsmi(physical_device_id: int) -> int:
    """amdsmi's number for an Instinct, in bytes; 0 for others, which may be APUs."""
    with _amdsmi(physical_device_id) as (smi, gpu):
        if not str(smi.amdsmi_get_gpu_asic_info(gpu).get("target_graphics_version")).startswith(_INSTINCT):
            return 0
        return int(smi.amdsmi_get_gpu_memory_total(gpu, smi.AmdSmiMemoryType.VRAM))


def _from_driver(physical_device_id: int) -> int:
    """The sum of a GPU's own memory banks in the driver's topology, in bytes; 0 where it isn't found there."""
    if not topology.is_dir():
        return 0
    with _amdsmi(physical_device_id) as (smi, gpu):
        address = str(smi.amdsmi_get_gpu_device_bdf(gpu)).lower()
    for node in topology.iterdir():
        properties = _properties(node / "properties")
        if int(properties.get("simd_count", 0)) and _address(properties) == address:
            banks = [_properties(bank / "properties") for bank in (node / "mem_banks").iterdir()]
            return sum(int(bank["size_in_bytes"]) for bank in banks if bank.get("heap_type") in _LOCAL)
    return 0


@contextlib.contextmanager
def _amdsmi(physical_device_id: int) -> Iterator[tuple[Any, Any]]:
    """amdsmi, started, and its handle for a GPU."""
    amdsmi = importlib.import_module("amdsmi")
    amdsmi.amdsmi_init()
    try:
        yield amdsmi, amdsmi.amdsmi_get_processor_handles()[physical_device_id]
    finally:
        amdsmi.amdsmi_shut_down()


def _properties(file: Path) -> dict[str, str]:
    """The name and value on each line of a file in sysfs."""
    return dict(line.split(None, 1) for line in file.read_text().splitlines() if " " in line)


def _address(properties: dict[str, str]) -> str:
    """The PCI address as amdsmi writes it, domain:bus:device.function, from the driver's location_id and domain."""
    where, domain = int(properties.get("location_id", 0)), int(properties.get("domain", 0))
    return f"{domain:04x}:{where >> 8 & 0xFF:02x}:{where >> 3 & 0x1F:02x}.{where & 7:x}"


def behaves() -> str | None:
    """What is wrong with what the platform says of GPU 0; None: nothing. `vllm-rocm-fixes verify` asks, in a child."""
    from unittest.mock import patch

    from vllm_rocm_fixes.checks import CannotAsk, without_gpu

    rocm: Any = importlib.import_module(PATCH.module).RocmPlatform
    most, said = 1 << 60, None  # no GPU has as much
    try:
        with _amdsmi(rocm.device_id_to_physical_device_id(0)):
            pass
    except Exception as error:
        raise CannotAsk(f"amdsmi doesn't know GPU 0: {type(error).__name__}: {error}") from None
    with without_gpu() as asked, patch.object(sys.modules[__name__], "_from_driver", lambda _: most):
        if total_memory(rocm, 0) is None:
            raise CannotAsk("GPU 0 is named by its UUID, and torch is asked as in stock")
        with contextlib.suppress(Exception):
            said = rocm.get_device_total_memory(0)
    if asked or said != most:
        return f"it asks {asked[0]}" if asked else "what the driver says isn't counted"
    with without_gpu() as asked, contextlib.suppress(Exception):
        rocm.get_device_total_memory(0)
    if asked:
        raise CannotAsk("neither the driver nor amdsmi tells the memory of GPU 0, and torch is asked as in stock")
    return None


PATCH = Patch(
    name="platform_memory",
    module="vllm.platforms.rocm",
    summary="total memory without a HIP context, and the right number on APUs",
    origin=("vLLM #46141", "ROCm/vllm #1205", "rocm-systems #8475"),
    since="0.14.0",
    until=None,
    examine=examine,
    mend=mend,
)
