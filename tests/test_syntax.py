"""What a patch reads off a tree: imports that run with a module without standing at its top."""

import ast

import pytest

from vllm_rocm_fixes.patches import SERIES
from vllm_rocm_fixes.syntax import hidden_imports

pytestmark = pytest.mark.unit
HIDDEN = {
    "in a function that is called": "def _try():\n    import {0}\n    return True\nHAS = _try()\n",
    "in one that the first calls": "def a():\n    return b()\ndef b():\n    from {0}.x import y\nif a():\n    pass\n",
    "in one of two": "if x:\n    def a():\n        import {0}\nelse:\n    def a():\n        pass\na()\n",
    "in a class": "class Names:\n    import {0}\n",
    "by import_module": "import importlib\nm = importlib.import_module('{0}.x')\n",
    "by a name that isn't said": "from importlib import import_module\nn = import_module(name)\n",
    "by __import__": "try:\n    __import__('{0}')\nexcept ImportError:\n    pass\n",
    "by another name of import_module": "from importlib import import_module as load\nm = load('{0}.x')\n",
    "by a name it was given": "import importlib\nload = importlib.import_module\nm = load('{0}.x')\n",
    "by another name of the function": "def f():\n    import {0}\ng = f\ng()\n",
    "by vLLM's way to import by name": "f = resolve_obj_by_qualname('{0}.x.y')\n",
    "through a lazy module": "lazy = LazyLoader('lazy', globals(), '{0}.x')\nHAS = lazy.y\n",
    "through a lazy module that is asked": "lazy = LazyLoader('lazy', globals(), '{0}.x')\nHAS = hasattr(lazy, 'y')\n",
    "in a lambda that is called at once": "HAS = (lambda: __import__('{0}'))()\n",
    "in a lambda that is called": "has = lambda: __import__('{0}')\nHAS = has()\n",
    "in a property": "class C:\n    @property\n    def has(self):\n        import {0}\nHAS = C().has\n",
    "in an object that is called": "class C:\n    def __call__(self):\n        import {0}\nC()()\n",
    "in a base": "class C:\n    def __init_subclass__(cls):\n        import {0}\nclass D(C):\n    pass\n",
    "not for types": "if TYPE_CHECKING:\n    pass\nelse:\n    class Names:\n        import {0}\n",
}
LATE = {
    "plain": "import {0}\ntry:\n    from {0} import x\nexcept ImportError:\n    pass\n",
    "in a function": "def f():\n    import {0}\ndef g():\n    f()\n    import_module('{0}')\n",
    "in a method": "class C:\n    def f(self):\n        import {0}\nC().f\n",
    "in a lambda": "f = lambda: __import__('{0}')\n",
    "a lazy module": "lazy = LazyLoader('lazy', globals(), '{0}.x')\ndef f():\n    return lazy.y\n",
    "a lambda in a table": "table['x'] = lambda: __import__('{0}')\nprint(len([]))\n",
    "in a property that nobody reads": "class C:\n    @property\n    def has(self):\n        import {0}\nC().also\n",
    "for types": "if TYPE_CHECKING:\n    class Names:\n        import {0}\n",
    "another": "class Names:\n    import {0}_too\nm = import_module('{0}_too')\n",
    "a call of itself": "def f():\n    f()\nf()\n",
}


@pytest.mark.parametrize("case", HIDDEN)
def test_what_is_hidden_is_found(case):
    assert hidden_imports(ast.parse(HIDDEN[case].format("heavy")), "other", "heavy")


@pytest.mark.parametrize("case", LATE)
def test_what_is_late_or_plain_is_not(case):
    assert hidden_imports(ast.parse(LATE[case].format("heavy")), "other", "heavy") == []


OWNERS = {
    "aiter_dtype": ("aiter", "class rocm_aiter_ops: ...\n"),
    "quark": ("aiter", "class QuarkOCP_MX: ...\n"),
    "fa_utils": ("flash_attn", "def is_flash_attn_varlen_func_available(): ...\n"),
    "mla_attention": ("flash_attn", "class MLAAttention: ...\n"),
    "gdn": ("aiter", "class QwenGatedDeltaNetAttention: ...\n"),
    "qwen_omni": ("flash_attn", "class Qwen2_5OmniThinkerForConditionalGeneration: ...\n"),
    "flashinfer_all_reduce": ("flashinfer", "class FlashInferAllReduce: ...\n"),
    "all2all_flashinfer": ("flashinfer", "class AgRsAll2AllManager: ...\n"),
}


@pytest.mark.parametrize("name", OWNERS)
def test_nobody_calls_it_clear(name):
    patch = next(patch for patch in SERIES if patch.name == name)
    package, owner = OWNERS[name]
    for hidden in HIDDEN.values():
        assert patch.examine(ast.parse(hidden.format(package) + owner)).kind == "unknown", hidden
    for case, late in LATE.items():
        if case != "plain":
            assert patch.examine(ast.parse(late.format(package) + owner)).kind == "clear", late


@pytest.mark.parametrize("name", ["nixl_utils", "distributed.nixl_utils"])
@pytest.mark.parametrize("statement", ["from ..{0} import x", "class C: from ..{0} import x"])
def test_a_relative_import_of_a_module_of_vllm_is_hidden(name, statement):
    assert hidden_imports(ast.parse(statement.format(name)), "vllm.distributed.nixl_utils")
    assert not hidden_imports(ast.parse(statement.format(f"{name}_too")), "vllm.distributed.nixl_utils")
    assert not hidden_imports(ast.parse(f"def f():\n    {statement.format(name)}"), "vllm.distributed.nixl_utils")


def test_an_import_of_aiter_in_another_shape_is_unknown():
    examine = next(patch for patch in SERIES if patch.name == "aiter_dtype").examine
    source = "try:\n    from aiter import dtypes\nexcept ImportError:\n    dtypes = None\nclass rocm_aiter_ops: ...\n"
    assert examine(ast.parse(source)).kind == "unknown"
