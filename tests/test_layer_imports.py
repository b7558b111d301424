"""layer_imports: a file imports its package when a layer of it is made, and a broken one is no more than missing."""

import ast
import sys
import types

import pytest
from on_layers import NAMES, NEEDED
from on_release import report
from releases import tree

from vllm_rocm_fixes.installed import path_of
from vllm_rocm_fixes.mend import mend
from vllm_rocm_fixes.patches import layer_imports
from vllm_rocm_fixes.syntax import Definition, statements

PATCHES = {patch.name: patch for patch in layer_imports.PATCHES}
PLACES = [(release, name) for release, names in NEEDED.items() for name in names]
BROKEN = ("RuntimeError", "SystemExit")
ANSWERS = {"gdn": False, "gdn_old": False, "qwen_omni": None, "qwen3_omni": None}  # stock's for a missing package


def package(seen, name):
    wanted = {"eplb_nixl": "rixl"}.get(name, layer_imports._PLACES[name].package.partition(".")[0])
    return seen["rixl"] if wanted == "rixl" else f"import {wanted}" in seen["events"]


@pytest.mark.parametrize(("release", "name"), PLACES)
def test_the_package_comes_with_a_layer_and_not_with_the_file(release, name):
    stock, ours = (side[name]["works"] for side in report(release, "layer_imports"))
    assert ours["state"] == "applied"
    assert set(stock["bound"]) == set(NAMES[name]) and ours["bound"] == []
    assert ours["import"]["raised"] is None and not package(ours["import"], name)
    if name not in ("mla_common", "qwen3_omni"):  # another file that these import had brought it to stock
        assert package(stock["import"], name) or stock["names"]["flash_attn"] == "there"
    assert ours["names"] == stock["names"], "what works is used as in stock"
    assert ours["make"]["returned"] == stock["make"]["returned"]
    assert ours["make"]["raised"] == stock["make"]["raised"]
    assert ours["said"] == []


@pytest.mark.parametrize(("release", "name"), PLACES)
def test_who_asks_for_a_name_gets_it(release, name):
    stock, ours = (side[name]["by name"] for side in report(release, "layer_imports"))
    assert ours["bound"] == []
    assert ours["names"] == stock["names"] and "nothing" not in ours["names"].values()


@pytest.mark.parametrize(("release", "name"), PLACES)
def test_a_broken_package_is_no_more_than_missing(release, name):
    stock, ours = (side[name] for side in report(release, "layer_imports"))
    missing = ours["missing"]
    assert missing["import"]["raised"] is None and not any("counts as absent" in line for line in missing["said"])
    if stock["missing"]["import"]["raised"] is None:
        assert missing["names"] == {n: v for n, v in stock["missing"]["names"].items() if n in missing["names"]}
        assert missing["make"]["raised"] == stock["missing"]["make"]["raised"]
        assert missing["make"]["returned"] == stock["missing"]["make"]["returned"]
    for case in BROKEN:
        assert case in stock[case]["import"]["raised"], "stock's import of the file dies"
        assert ours[case]["import"]["raised"] is None
        if name in ANSWERS:
            assert ours[case]["names"] == {NAMES[name][0]: ANSWERS[name]}
            assert ours[case]["make"]["returned"] == missing["make"]["returned"]
            assert len([line for line in ours[case]["said"] if "counts as absent" in line]) == 1
        else:
            assert case in ours[case]["make"]["raised"], "who makes the layer is told"


@pytest.mark.parametrize(
    ("release", "file"), [("0.14.1", "aiter_fa_old"), ("0.14.1", "mla_common"), ("0.30.0", "aiter_fa")]
)
def test_drafting_needs_no_back_end_that_is_not_used(release, file):
    """Who drafts tokens imports these files to know the classes of their metadata: without the package, too."""
    stock, ours = (side[file]["missing"] for side in report(release, "layer_imports"))
    assert "Error" in stock["import"]["raised"]
    assert ours["import"]["returned"] is True


@pytest.mark.parametrize(("release", "name"), [("0.21.0", "gdn_old"), ("0.22.0", "gdn"), ("0.33.0", "gdn")])
def test_what_runs_in_a_compiled_graph_is_stocks(release, name):
    path = path_of(tree(release), PATCHES[name].module)
    source = path.read_text()
    mended = mend(source, str(path), [PATCHES[name]])
    assert mended.tree is not None
    stock, ours = functions(ast.parse(source)), functions(mended.tree)
    differ = {n for n, text in ours.items() if stock.get(n) != text}
    owner = layer_imports._PLACES[name].owner
    assert differ == {"_rocm_fixes_late", "__getattr__", f"{owner}.__init__"}
    assert f"{owner}.forward_hip" in ours


def functions(tree):
    found = {}
    for _, statement in statements(tree.body):
        if isinstance(statement, ast.ClassDef):
            own = (s for s in statement.body if isinstance(s, Definition))
            found |= {f"{statement.name}.{s.name}": ast.unparse(s) for s in own}
        elif isinstance(statement, Definition):
            found[statement.name] = ast.unparse(statement)
    return found


def verdict(name, source):
    return PATCHES[name].examine(ast.parse(source))


CLASS = "class NixlEplbCommunicator:\n    def __init__(self):\n        self.made = NixlWrapper()\n"
EARLY = "from vllm.distributed.nixl_utils import NixlWrapper\n"
STRANGE = {
    "read at module scope": EARLY + CLASS + "known = NixlWrapper\n",
    "bound in another place": EARLY + CLASS + "NixlWrapper = None\n",
    "a variable of its own": EARLY + CLASS + "def other(NixlWrapper):\n    return NixlWrapper\n",
    "a __getattr__ of its own": EARLY + CLASS + "def __getattr__(name):\n    return 1\n",
    "no constructor": EARLY + CLASS + "class Other:\n    def use(self):\n        return NixlWrapper\n",
    "without an instance": EARLY + CLASS + "    @staticmethod\n    def use():\n        return NixlWrapper\n",
    "in a loop": f"while True:\n    {EARLY}    break\n" + CLASS,
    "in an else": f"if known:\n    pass\nelse:\n    {EARLY}" + CLASS,
    "in the handler of something else": f"try:\n    pass\nexcept ImportError:\n    {EARLY}" + CLASS,
}


@pytest.mark.unit
@pytest.mark.parametrize("case", STRANGE)
def test_another_shape_is_unknown(case):
    assert verdict("eplb_nixl", STRANGE[case]).kind == "unknown"


@pytest.mark.unit
def test_shapes():
    assert verdict("eplb_nixl", "x = 1").kind == "unknown"
    assert verdict("eplb_nixl", CLASS).kind == "clear"
    assert verdict("eplb_nixl", "import vllm.distributed.nixl_utils as nixl_utils\n" + CLASS).kind == "clear"
    assert verdict("eplb_nixl", EARLY + CLASS).kind == "needed"
    assert verdict("eplb_nixl", f"if TYPE_CHECKING:\n    {EARLY}" + CLASS).kind == "clear", "that never runs"
    flag = "GDN_AITER_TRITON_AVAILABLE = ops.are_available()\nclass QwenGatedDeltaNetAttention:\n"
    flag += (
        "    def __init__(self):\n        pass\n    def forward_hip(self):\n        return GDN_AITER_TRITON_AVAILABLE\n"
    )
    assert verdict("gdn", flag).kind == "needed", "the question imports it too"
    renamed = "from aiter.ops import kernel\n" + flag.partition("\n")[2].replace("GDN_AITER_TRITON_AVAILABLE", "kernel")
    assert verdict("gdn", renamed).kind == "unknown", "nobody would know of a broken AITER"
    assert verdict("eplb_nixl", EARLY.strip() + " as Wrapper\n" + CLASS).kind != "clear"
    owner = "class QwenGatedDeltaNetAttention: ...\n"
    for asked in (
        "from .kernels import GDN_AITER_TRITON_AVAILABLE\n",
        "GDN_AITER_TRITON_AVAILABLE: bool = ask()\n",
        "USE_AITER = rocm_aiter_ops.are_gdn_triton_kernels_available()\n",
    ):
        assert verdict("gdn", asked + owner).kind == "unknown", "what is asked may import it"
        assert verdict("gdn", f"def f():\n    {asked}" + owner).kind == "clear"


@pytest.mark.unit
def test_a_flag_that_a_test_has_set_leaves_the_kernels_bound(monkeypatch):
    """Stock has bound them by then; a flag that is False, and True later, finds them."""
    source = """
GDN_AITER_TRITON_AVAILABLE = bool("available")
if GDN_AITER_TRITON_AVAILABLE:
    from aiter.ops import kernel
class QwenGatedDeltaNetAttention:
    def __init__(self):
        pass
    def forward_hip(self):
        return kernel() if GDN_AITER_TRITON_AVAILABLE else "native"
"""
    ops = types.ModuleType("aiter.ops")
    ops.kernel = lambda: "kernel"
    monkeypatch.setitem(sys.modules, "aiter", types.ModuleType("aiter"))
    monkeypatch.setitem(sys.modules, "aiter.ops", ops)
    for code in (compile(source, "stock", "exec"), mend(source, "ours", [PATCHES["gdn"]]).code):
        module = {"__name__": "layers"}
        exec(code, module)
        module["GDN_AITER_TRITON_AVAILABLE"] = False
        layer = module["QwenGatedDeltaNetAttention"]()
        assert layer.forward_hip() == "native"
        module["GDN_AITER_TRITON_AVAILABLE"] = True
        assert layer.forward_hip() == "kernel"
