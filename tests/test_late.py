"""Imports taken out of module scope, on small modules that are really imported."""

import ast
import importlib.util
import sys

import pytest

from vllm_rocm_fixes.late import defer
from vllm_rocm_fixes.syntax import imports

pytestmark = pytest.mark.unit


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Write a module and the package it imports late, defer, and return the module as imported."""
    (tmp_path / "heavy.py").write_text(
        "import sys\nsys.heavy_count = getattr(sys, 'heavy_count', 0) + 1\nA, B = 1, 2\n"
    )
    (tmp_path / "broken.py").write_text("raise OSError('libmissing.so: cannot open')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "heavy_count", 0, raising=False)

    def _load(source, package="heavy"):
        tree = ast.parse(source)
        names = defer(tree, lambda s: isinstance(s, ast.Import | ast.ImportFrom) and bool(imports(s, package)))
        (tmp_path / "late_module.py").write_text(ast.unparse(ast.fix_missing_locations(tree)))
        spec = importlib.util.spec_from_file_location("late_module", tmp_path / "late_module.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "late_module", module)
        spec.loader.exec_module(module)
        assert names
        return module

    yield _load
    for name in ("heavy", "broken"):
        sys.modules.pop(name, None)


GUARDED = """
asked = []
def has_heavy():
    asked.append(1)
    return available
available = True
if True:
    if has_heavy():
        from heavy import A, B as C
    kept = 1
def use(flag):
    if flag == "a":
        return A
    elif flag == "closure":
        def inner():
            return C
        return inner()
    elif flag == "own":
        A2 = [A for A in (7,)]
        return A2
    return None
class Holder:
    def method(self):
        return [C for _ in range(2)]
"""


def test_nothing_is_imported_or_asked_until_a_name_is_used(load):
    module = load(GUARDED)
    assert (sys.heavy_count, module.asked, module.kept) == (0, [], 1)
    assert module.use("none") is None
    assert sys.heavy_count == 0
    assert module.use("a") == 1
    assert (sys.heavy_count, module.asked) == (1, [1])
    assert module.use("closure") == 2
    assert module.Holder().method() == [2, 2]
    assert module.asked == [1]


def test_other_importers_find_the_names(load):
    module = load(GUARDED)
    from late_module import C

    assert C == 2
    assert module.A == 1
    assert not hasattr(module, "nothing_of_that_name")
    with pytest.raises(AttributeError, match="module 'late_module' has no attribute 'missing'"):
        _ = module.missing


def test_a_condition_that_does_not_hold_leaves_the_name_unbound(load):
    module = load(GUARDED)
    module.available = False
    assert not hasattr(module, "A")
    with pytest.raises(ImportError):
        from late_module import A  # noqa: F401
    with pytest.raises(NameError, match="A"):
        module.use("a")
    module.A = "put there by a plugin"
    assert module.use("a") == "put there by a plugin"
    assert sys.heavy_count == 0


def test_what_a_plugin_put_there_stays_when_its_neighbour_is_bound(load):
    module = load("from heavy import A, B\ndef a():\n    return A\ndef b():\n    return B\n")
    module.A = "theirs"
    assert (module.a(), module.b(), module.a()) == ("theirs", 2, "theirs")
    assert sys.heavy_count == 1 and module.A == "theirs"


def test_a_broken_import_tells_its_reason(load):
    module = load("import broken\ndef use():\n    return broken.x\n", "broken")
    with pytest.raises(OSError, match=r"libmissing\.so"):
        module.use()
    with pytest.raises(AttributeError, match=r"OSError: libmissing\.so"):
        _ = module.broken
    assert getattr(module, "broken", None) is None


def test_both_branches_of_a_condition(load):
    module = load("side = 2\nif side == 1:\n    from heavy import A as X\nelse:\n    from heavy import B as X\n")
    assert sys.heavy_count == 0
    assert module.X == 2


def test_a_getattr_of_the_module_is_still_asked(load):
    module = load("from heavy import A\ndef __getattr__(key):\n    'Doc.'\n    return key.upper()\n")
    assert (module.A, module.other) == (1, "OTHER")


def test_an_existing_local_name_is_not_an_import(load):
    module = load("from heavy import A\ndef use(A):\n    return A\ndef bind():\n    A = 3\n    return A\n")
    assert (module.use(5), module.bind(), sys.heavy_count) == (5, 3, 0)


@pytest.mark.parametrize(
    "source",
    [
        "from heavy import A\nX = A\n",
        "from heavy import A\ndef f(x: A): ...\n",
        "from heavy import A\nclass K(A): ...\n",
        "A = None\nif True:\n    from heavy import A\n",
        "from heavy import *\n",
        "x = 1\n",
    ],
)
def test_what_cannot_be_deferred_is_refused(source):
    with pytest.raises(ValueError):
        defer(ast.parse(source), lambda s: isinstance(s, ast.ImportFrom))


def test_a_whole_try_moves():
    tree = ast.parse(
        "try:\n    from heavy import A\nexcept ImportError as e:\n    def A(): return e\ndef use():\n    return A\n"
    )
    assert defer(tree, lambda s: isinstance(s, ast.Try)) == ["A"]
    compile(ast.fix_missing_locations(tree), "late", "exec")


def test_a_branch_asks_at_its_start():
    source = """
from heavy import A, B, C
def use(flag):
    if flag:
        assert flag > 0
        x = A
        if x == 5:
            return None
        return B + C
    return 0
"""
    tree = ast.parse(source)
    defer(tree, lambda s: isinstance(s, ast.ImportFrom))
    use = next(s for s in tree.body if isinstance(s, ast.FunctionDef) and s.name == "use")
    said = [ast.unparse(s) for s in use.body[0].body]
    assert said[1] == "need(globals(), 'A')"
    assert said[6] == "need(globals(), 'B', 'C')"


@pytest.mark.parametrize("what", ["return", "yield 1", "x = await f()", "from heavy import *"])
def test_what_no_function_may_hide_is_left_to_stock(what):
    """In stock the first three are a SyntaxError, which they must stay."""
    tree = ast.parse(f"try:\n    import heavy\n    {what}\nexcept ImportError:\n    pass\n")
    with pytest.raises(ValueError, match="line 3: "):
        defer(tree, lambda s: isinstance(s, ast.Try))
