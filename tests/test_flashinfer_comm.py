"""flashinfer_comm: on ROCm FlashInfer's communication isn't imported; elsewhere, and when it is chosen, it is."""

import ast

import pytest
from on_layers import COMMUNICATES
from on_release import report

from vllm_rocm_fixes.patches import flashinfer_comm

PLACES = [(release, name) for release, names in COMMUNICATES.items() for name in names]
PATCHES = {patch.name: patch for patch in flashinfer_comm.PATCHES}


def flashinfer(seen):
    return [e for e in seen["events"] if e.startswith("import flashinfer")]


@pytest.mark.parametrize(("release", "name"), PLACES)
def test_it_is_not_imported_on_rocm(release, name):
    stock, ours = (side[name]["works"] for side in report(release, "flashinfer_comm"))
    assert ours["state"] == "applied"
    assert flashinfer(stock["import"]) and stock["import"]["raised"] is None
    assert flashinfer(ours["import"]) == [] and ours["import"]["raised"] is None
    assert all(value is None or value is False for value in ours["flags"].values()), "as where it is missing"
    assert ours["fusion"] == stock["fusion"] == (name == "allreduce_fusion")


@pytest.mark.parametrize(("release", "name"), PLACES)
def test_a_library_of_it_that_does_not_load_ends_nothing(release, name):
    stock, ours = (side[name]["OSError"] for side in report(release, "flashinfer_comm"))
    if (release, name) != ("0.33.0", "allreduce_fusion"):  # 0.28.0 on it catches every error there
        assert "libcudart.so" in stock["import"]["raised"]
    assert ours["import"]["raised"] is None


@pytest.mark.parametrize(("release", "name"), PLACES)
def test_elsewhere_it_is_as_in_stock(release, name):
    stock, ours = (side[name]["CUDA"] for side in report(release, "flashinfer_comm"))
    assert ours["flags"] == stock["flags"]
    if name == "all2all_flashinfer":
        assert flashinfer(ours["import"]) == [] and flashinfer(ours["late"])
        assert ours["late"]["returned"] is stock["late"]["returned"] is True
    else:
        assert flashinfer(ours["import"]) == flashinfer(stock["import"]) != []


GATES = {
    "not current_platform.is_rocm()": "clear",
    "has_flashinfer() and not current_platform.is_rocm()": "clear",
    "current_platform.is_cuda()": "clear",
    "typing.TYPE_CHECKING": "clear",
    "current_platform.is_rocm()": "unknown",
    "has_flashinfer() and current_platform.is_rocm()": "unknown",
    "current_platform.is_cuda() or current_platform.is_rocm()": "unknown",
    "not current_platform.is_rocm() or has_flashinfer()": "unknown",
    "not TYPE_CHECKING": "unknown",
}


@pytest.mark.unit
def test_shapes():
    examine = PATCHES["flashinfer_all_reduce"].examine
    owner = "class FlashInferAllReduce: ...\n"
    platform = "from vllm.platforms import current_platform\n"
    early = "try:\n    import flashinfer.comm as c\nexcept ImportError:\n    c = None\n"
    assert examine(ast.parse(platform + early)).kind == "unknown"
    assert examine(ast.parse(platform + owner)).kind == "clear"
    assert examine(ast.parse(platform + early + owner)).kind == "needed"
    assert examine(ast.parse(early + owner)).kind == "unknown"
    assert examine(ast.parse(platform + "import flashinfer\n" + owner)).kind == "unknown"
    assert examine(ast.parse(platform + early.replace("Error:", "Error as e:") + owner)).kind == "unknown"
    assert examine(ast.parse(platform + early.replace("c = None", "raise") + owner)).kind == "unknown"
    typing = "if TYPE_CHECKING:\n    import flashinfer\n"
    assert examine(ast.parse(platform + typing + owner)).kind == "clear"
    for test, kind in GATES.items():
        assert examine(ast.parse(f"{platform}if {test}:\n    import flashinfer\n{owner}")).kind == kind, test
    other = f"{platform}if current_platform.is_rocm():\n    c = None\nelse:\n    import flashinfer\n{owner}"
    assert examine(ast.parse(other)).kind == "clear"
    assert examine(ast.parse(other.replace("is_rocm", "is_xpu"))).kind == "unknown"
    fusion = PATCHES["allreduce_fusion"].examine
    look = "if find_spec('flashinfer'):\n    import flashinfer.comm\nclass AllReduceFusionPass: ...\n"
    assert fusion(ast.parse(platform + look)).kind == "clear", "nothing of it is for ROCm"
    assert fusion(ast.parse(platform + look + "class RocmAiterAllReduceFusionPass: ...\n")).kind == "needed"
    assert fusion(ast.parse("x = 1")).kind == "unknown"
    chosen = PATCHES["all2all_flashinfer"].examine
    asks = "if has_flashinfer_all2all():\n    from flashinfer.comm import Mapping\n"
    manager = "class AgRsAll2AllManager: ...\n"
    assert chosen(ast.parse(asks + manager)).kind == "needed"
    assert chosen(ast.parse(asks)).kind == "unknown"
    assert chosen(ast.parse("import flashinfer\n" + manager)).kind == "unknown"
    assert chosen(ast.parse(manager)).kind == "clear"
