"""The live way: whoever holds a function of a loaded module gets the mended code, or is named."""

import ast
import functools
import types

import pytest

from vllm_rocm_fixes import live
from vllm_rocm_fixes import mend as engine
from vllm_rocm_fixes.live import NotStock, transplant
from vllm_rocm_fixes.patch import Patch, clear, needed

pytestmark = pytest.mark.unit

STOCK = """
import functools

def plain(x):
    return "stock"

@functools.cache
def cached(x):
    return "stock"

class Base:
    def said(self):
        return "base"

class Thing(Base):
    def method(self):
        return super().said() + " stock"

    @property
    def prop(self):
        return "stock"

    @prop.setter
    def prop(self, value):
        self.value = "stock"

    @staticmethod
    def static():
        return "stock"

    @classmethod
    def klass(cls):
        return "stock"

    @functools.cached_property
    def lazy(self):
        return "stock"

def maker():
    def inner():
        return "stock"
    return inner

def hiding(function):
    def wrapper(*args):
        return function(*args)
    return wrapper

@hiding
def hidden():
    return "stock"

def running():
    yield "stock"
    yield "stock"

def same_in_both(x):
    return [x for _ in range(2)]
"""
MENDED = STOCK.replace('"stock"', '"mended"').replace(' stock"', ' mended"')


def load(source=STOCK):
    module = types.ModuleType("goods")
    exec(compile(source, "goods.py", "exec"), vars(module))
    return module


def mend(module, mended=MENDED, stock=STOCK):
    """Transplant one whole source into another: a patch whose edit replaces everything."""

    def edit(tree):
        tree.body[:] = ast.parse(mended).body

    same = ast.dump(ast.parse(mended))
    examine = lambda tree: clear("") if ast.dump(tree) == same else needed("")
    patch = Patch("all", "goods", "", (), "0", None, examine, edit)
    return transplant(module, compile(stock, "goods.py", "exec"), engine.mend(stock, "goods.py", [patch]))


def test_every_holder_follows():
    goods = load()
    thing = goods.Thing()
    by_dictionary, by_name, bound = {"level": goods.plain}, goods.plain, thing.method
    partial, copy = functools.partial(goods.plain, 1), types.FunctionType(goods.plain.__code__, vars(goods))
    assert goods.cached(1) == "stock" == by_name(1) == copy(1)
    done = mend(goods)
    assert by_dictionary["level"](1) == by_name(1) == partial() == copy(1) == goods.hidden() == "mended"
    assert bound() == "base mended"
    assert goods.cached(1) == "mended", "the cache was cleared"
    thing.prop = 1
    assert thing.prop == thing.value == goods.Thing.static() == goods.Thing.klass() == thing.lazy == "mended"
    assert goods.maker()() == "mended"
    assert "same_in_both" not in done.changed and not done.unreached and not done.scope_ran


def test_a_registered_torch_op_follows():
    torch = pytest.importorskip("torch", reason="unit tests run without torch too; make test has it")
    goods = load()
    library = torch.library.Library("rocm_fixes_test", "FRAGMENT")
    library.define("plain(int x) -> str")
    library.impl("plain", goods.plain, "CompositeExplicitAutograd")
    assert torch.ops.rocm_fixes_test.plain(1) == "stock"
    mend(goods)
    assert torch.ops.rocm_fixes_test.plain(1) == "mended"


def test_holders_that_keep_the_old_code_are_named():
    goods = load()
    made, generator = goods.maker(), goods.running()
    next(generator)
    registry = [goods.plain.__code__, {}]
    done = mend(goods)
    assert "functions that maker has made already" in done.unreached and made() == "stock"
    assert "running, which is running now" in done.unreached and list(generator) == ["stock"]
    assert "plain, held by a list" in done.unreached and registry


def test_methods_of_a_class_that_a_changed_function_made_are_named():
    source = "def maker():\n    class Made:\n        def word(self):\n            return 'stock'\n    return Made\n"
    goods = load(source)
    made = goods.maker()()
    done = mend(goods, source.replace("stock", "mended"), source)
    assert "functions that maker has made already" in done.unreached and made.word() == "stock"
    assert goods.maker()().word() == "mended"


@pytest.mark.parametrize("how", ["replaced", "wrapped", "method", "gone", "code"])
def test_a_function_that_is_not_stocks_is_left_alone(how):
    goods, holder = load(), []

    def theirs(x):
        return "theirs"

    if how == "replaced":
        goods.plain = theirs
    elif how == "wrapped":
        goods.plain = functools.wraps(goods.plain)(theirs)
    elif how == "method":
        goods.Thing.method = theirs
    elif how == "gone":
        holder.append(goods.__dict__.pop("plain"))
    else:
        goods.plain.__code__ = theirs.__code__
    before = dict(vars(goods))
    with pytest.raises(NotStock, match=r"plain|Thing\.method"):
        mend(goods)
    assert before == vars(goods)
    assert goods.hidden() == "stock" and goods.maker()() == "stock", "nothing else was changed either"


# Definitions in branches, one taken and one not, as vLLM has them for platforms and optional packages.
BRANCHES = """
import sys

def always():
    return "stock"

if TAKEN:
    def only_if():
        return "stock"

    class Here:
        def method(self):
            return "stock"

    def of_two():
        return "stock, first"
else:
    def of_two():
        return "stock, second"

    class There:
        def method(self):
            return "stock"

try:
    from os.path import join as found
except ImportError:
    def found():
        return "stock"

try:
    from no_such_package import missing
except ImportError:
    def missing():
        return "stock"
"""
BRANCHES_MENDED = BRANCHES.replace('"stock', '"mended')


@pytest.mark.parametrize("taken", [True, False])
def test_a_definition_that_never_ran_is_left_out_and_the_others_follow(taken):
    stock, mended = (text.replace("TAKEN", str(taken)) for text in (BRANCHES, BRANCHES_MENDED))
    goods = load(stock.replace(str(taken), f"sys.maxsize {'>' if taken else '<'} 0"))
    done = mend(goods, mended.replace(str(taken), "sys.maxsize"), stock.replace(str(taken), "sys.maxsize"))
    assert goods.always() == goods.missing() == "mended"
    assert goods.of_two() == ("mended, first" if taken else "mended, second")
    assert goods.found.__module__ == "posixpath"
    if taken:
        assert goods.only_if() == goods.Here().method() == "mended" and not hasattr(goods, "There")
        assert set(done.unused) == {"of_two", "There.method", "found"}
    else:
        assert goods.There().method() == "mended" and not hasattr(goods, "only_if")
        assert set(done.unused) == {"only_if", "Here.method", "of_two", "found"}
    assert not done.unreached and "; nothing runs stock's of_two, " in str(done).replace("only_if, Here.method, ", "")


@pytest.mark.parametrize("how", ["replaced", "wrapped", "taken away", "class"])
def test_somebody_elses_function_in_a_branch_is_not_taken_for_one_that_never_ran(how):
    stock, mended = (text.replace("TAKEN", "True") for text in (BRANCHES, BRANCHES_MENDED))
    goods = load(stock)
    kept = goods.only_if

    def theirs():
        return "theirs"

    if how == "replaced":
        goods.only_if = theirs
        del kept  # nobody has stock's any more
    elif how == "wrapped":
        goods.only_if = functools.wraps(kept)(theirs)
    elif how == "taken away":
        del goods.only_if
    else:
        goods.Here = type("Here", (goods.Here,), {"method": theirs})
    with pytest.raises(NotStock, match=r"only_if|Here\.method"):
        mend(goods, mended, stock)
    assert goods.always() == "stock"


def test_where_nothing_that_differs_ran_there_is_nothing_to_do():
    source = "if not __name__:\n    def f():\n        return 'stock'\n"
    done = mend(load(source), source.replace("stock", "mended"), source)
    assert (done.unused, done.changed) == (["f"], [])
    assert str(done) == "live, in no function; nothing runs stock's f"


def test_another_signature_is_refused():
    goods = load()
    with pytest.raises(NotStock, match="signature"):
        mend(goods, MENDED.replace("def plain(x)", "def plain(x, y)"))
    assert goods.plain(1) == "stock"


def test_new_functions_come_in_and_changed_ones_may_call_them():
    goods = load()
    new = MENDED.replace('def plain(x):\n    return "mended"', "def plain(x):\n    return helper(x)")
    done = mend(
        goods, new + "\ndef helper(x, word='mended'):\n    return word\ndef __getattr__(name):\n    return name\n"
    )
    assert goods.plain(1) == "mended" and goods.anything == "anything"
    assert set(done.added) == {"helper", "__getattr__"}


def test_what_ran_at_module_scope_is_said():
    goods = load()
    assert mend(goods, MENDED.replace("import functools", "import functools, ast")).scope_ran
    goods = load()
    with pytest.raises(NotStock, match="module scope"):
        mend(goods, STOCK + "\nx = 1\n")


def test_same_code_wherever_it_stands():
    one, two, three = (
        compile(s, "f", "exec")
        for s in ("def f():\n return 1\n", "\n\ndef f():\n\n return 1\n", "def f():\n return 1.0\n")
    )
    assert live.same(one, two) and not live.same(one, three)
    assert not live.same(0.0, -0.0) and not live.same(1, True) and live.same((1, "a"), (1, "a"))


def test_annotations_that_an_edit_moves_are_no_function_of_stocks():
    """Python 3.14 makes a function of them."""
    late = "def fallback(a: int) -> int: ...\n"
    stock = f"try:\n    x: int = 1\nexcept ImportError:\n    {late}\ndef f() -> str:\n    return 'stock'\n"
    moved = f"def late():\n    {late}\ndef f() -> str:\n    return 'mended'\n"
    module = load(stock)
    assert mend(module, moved, stock).changed == ["f"] and module.f() == "mended"
