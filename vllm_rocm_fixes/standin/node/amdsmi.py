"""Stand-in for AMD's amdsmi: answers for one MI300X, with what vLLM 0.14.0 to 0.33.0 and torch ask of it."""

from __future__ import annotations

HANDLE = "gpu0"
TOTAL_MEMORY = 192 << 30  # bytes of HBM on one MI300X


class AmdSmiException(Exception):
    """What amdsmi raises; vLLM catches it by this name."""


class AmdSmiMemoryType:
    """The kinds of memory a caller can ask the size of."""

    VRAM = 0
    VIS_VRAM = 1
    GTT = 2


class AmdSmiInitFlags:
    """What to initialise; the stand-in has GPUs only."""

    INIT_AMD_GPUS = 2


class AmdSmiLinkType:
    """The link types of the topology answer."""

    AMDSMI_LINK_TYPE_XGMI = 2


def amdsmi_init(flag: int = AmdSmiInitFlags.INIT_AMD_GPUS) -> None:
    """Nothing to initialise."""


def amdsmi_shut_down() -> None:
    """Nothing to shut down."""


def amdsmi_get_processor_handles() -> list[str]:
    """One GPU."""
    return [HANDLE]


def amdsmi_get_socket_handles() -> list[str]:
    """One socket."""
    return ["socket0"]


def amdsmi_get_gpu_asic_info(handle: str) -> dict[str, object]:
    """The identity of an MI300X as ROCm 7's amdsmi gives it."""
    return {
        "market_name": "AMD Instinct MI300X",
        "target_graphics_version": "gfx942",
        "device_id": "0x74a1",
        "vendor_id": 0x1002,
        "asic_serial": "0x0000000000000001",
        "oam_id": 0,
        "num_compute_units": 304,
    }


def amdsmi_get_gpu_device_uuid(handle: str) -> str:
    """A fixed UUID."""
    return "00ff74a1-0000-1000-8000-000000000001"


def amdsmi_get_gpu_device_bdf(handle: str) -> str:
    """A fixed PCI address."""
    return "0000:05:00.0"


def amdsmi_get_gpu_memory_total(handle: str, kind: int) -> int:
    """Total memory of one kind, in bytes."""
    return TOTAL_MEMORY


def amdsmi_get_gpu_memory_usage(handle: str, kind: int) -> int:
    """Used memory of one kind, in bytes."""
    return 1 << 30


def amdsmi_get_gpu_vram_usage(handle: str) -> dict[str, int]:
    """Total and used memory, in megabytes; vLLM's tests wait for it to be free."""
    return {"vram_total": TOTAL_MEMORY >> 20, "vram_used": 1 << 10}


def amdsmi_topo_get_link_type(one: str, other: str) -> dict[str, int]:
    """One XGMI hop between any two GPUs."""
    return {"hops": 1, "type": AmdSmiLinkType.AMDSMI_LINK_TYPE_XGMI}


def amdsmi_topo_get_numa_node_number(handle: str) -> int:
    """NUMA node 0."""
    return 0
