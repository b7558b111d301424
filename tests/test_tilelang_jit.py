"""tilelang_jit: a kernel that is decorated late can be compiled, and asked for its cache, without being called."""

import ast

import pytest
from on_release import report

from vllm_rocm_fixes.patches import tilelang_jit


def test_a_late_kernel_has_a_kernels_attributes():
    stock, ours = report("0.30.0", "tilelang_jit")
    assert ours["state"] == "waiting"
    assert "no attribute 'compile'" in stock["compile"]["raised"]
    assert ours["compile"]["returned"] == ["compiled", 3]
    assert ours["cache"]["returned"] == {}
    assert "'Implementation' object has no attribute 'nothing'" in ours["missing"]["raised"]


def test_it_is_called_and_named_as_in_stock():
    stock, ours = report("0.30.0", "tilelang_jit")
    assert ours["call"]["returned"] == stock["call"]["returned"] == ["called", 4]
    assert (ours["name"], ours["doc"]) == (stock["name"], stock["doc"])
    assert ours["made"] == ["_kernel"], "it is decorated once"
    assert ours["decorate"]["events"] == [], "decorating imports no TileLang"


@pytest.mark.unit
def test_shapes():
    assert tilelang_jit.examine(ast.parse("x = 1")).kind == "unknown"
    made = "def tilelang_jit(f):\n    return Deferred(f)\n"
    assert tilelang_jit.examine(ast.parse(made)).kind == "clear"
    plain = "def tilelang_jit(f):\n    def wrapper(*a):\n        return f(*a)\n    return wrapper\n"
    assert tilelang_jit.examine(ast.parse(plain)).kind == "unknown"
    late = tilelang_jit.LateKernel(lambda x: x, lambda: {1: 2})
    assert late.get(1) == 2
    with pytest.raises(AttributeError):
        late.__deepcopy__
