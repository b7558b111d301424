"""The total memory of a GPU: from the driver, without HIP, and never less than stock says; else in stock's way."""

import ast
import sys
import types

import pytest
from on_release import report
from releases import tree

from vllm_rocm_fixes.mend import mend
from vllm_rocm_fixes.patches import platform_memory

GIB = 1 << 30
RELEASES = ["0.14.1", "0.23.0", "0.24.0", "0.33.0"]
OLD = {"0.14.1", "0.23.0"}


def gpu(seen):
    return [e for e in seen["events"] if e.startswith("gpu")]


@pytest.mark.parametrize("release", RELEASES)
def test_an_instinct_gets_stocks_number_without_hip(release):
    stock, ours = report(release, "platform_memory")
    assert ours["state"] == "applied", "the platform is loaded when the general door opens: this is the live way"
    for case in ("Instinct, driver", "Instinct, no driver", "another card's banks"):
        assert ours[case]["returned"] == stock[case]["returned"] == 192 * GIB
        assert gpu(ours[case]) == []
        assert bool(gpu(stock[case])) == (release in OLD)


@pytest.mark.parametrize("release", RELEASES)
def test_an_apu_gets_what_the_driver_gives(release):
    stock, ours = report(release, "platform_memory")
    assert ours["APU"]["returned"] == 110 * GIB
    assert gpu(ours["APU"]) == []
    if release not in OLD:
        assert stock["APU"]["returned"] == GIB // 2, "the part that the BIOS set aside"


@pytest.mark.parametrize("release", RELEASES)
def test_where_the_driver_does_not_tell_it_is_as_in_stock(release):
    stock, ours = report(release, "platform_memory")
    for case in ("APU, no driver", "no amdsmi"):
        assert ours[case] == stock[case]


@pytest.mark.unit
def test_the_right_one_of_two_cards(monkeypatch, tmp_path):
    """HIP counts behind ROCR_VISIBLE_DEVICES, amdsmi counts every card."""
    names = ("AmdSmiMemoryType", "amdsmi_init", "amdsmi_shut_down")
    amdsmi = types.SimpleNamespace(
        **{name: lambda: None for name in names},
        amdsmi_get_processor_handles=lambda: ["small", "large"],
        amdsmi_get_gpu_asic_info=lambda handle: {"target_graphics_version": "gfx942"},
        amdsmi_get_gpu_memory_total=lambda handle, kind: {"small": 64, "large": 192}[handle] * GIB,
    )
    amdsmi.AmdSmiMemoryType = types.SimpleNamespace(VRAM=0)
    monkeypatch.setitem(sys.modules, "amdsmi", amdsmi)
    monkeypatch.setattr(platform_memory, "topology", tmp_path / "missing")
    platform = types.SimpleNamespace(device_id_to_physical_device_id=lambda device: device)
    asked = {}
    for visible in (None, "1", "1,0", "GPU-8e1a2b", "7"):
        monkeypatch.delenv("ROCR_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("ROCR_VISIBLE_DEVICES", visible)
        found = platform_memory.total_memory(platform, 0)
        asked[visible] = found and found // GIB
    assert asked == {None: 64, "1": 192, "1,0": 192, "GPU-8e1a2b": None, "7": None}


@pytest.mark.unit
def test_shapes():
    head = "class RocmPlatform:\n    def get_device_total_memory(cls, device_id=0):\n        "
    verdicts = {
        "x = 1": "unknown",
        head + "return torch.cuda.get_device_properties(device_id).total_memory": "needed",
        head + "return _query_total_memory_from_amdsmi(device_id)": "needed",
        head + "return 3": "unknown",
        "class RocmPlatform:\n    def get_device_total_memory(cls, other):\n"
        "        return torch.cuda.get_device_properties(other).total_memory": "unknown",
    }
    assert {text: platform_memory.examine(ast.parse(text)).kind for text in verdicts} == verdicts


ASKS = "        device_props = torch.cuda.get_device_properties(device_id)\n        return device_props.total_memory\n"


@pytest.mark.unit
def test_torch_asked_in_one_line_is_the_same():
    source = (tree("0.23.0") / "vllm" / "platforms" / "rocm.py").read_text()
    one = "        return torch.cuda.get_device_properties(device_id).total_memory\n"
    assert mend(source.replace(ASKS, one), "rocm.py", [platform_memory.PATCH]).outcomes[0].applied
