"""Imports taken out of module scope, on small modules that are really imported."""

import ast
import importlib.util
import signal
import sys
import threading

import pytest

from vllm_rocm_fixes.late import BINDER, defer, need
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

    def _load(source, package="heavy", chosen=None):
        tree = ast.parse(source)
        plain = lambda s: isinstance(s, ast.Import | ast.ImportFrom) and s in imports(tree, package)
        names = defer(tree, chosen or plain)
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


NOW_AND_THEN = {
    "a local annotation": "p: A | None = None\n    return p",
    "a branch of an expression": "return A if x else None",
    "behind `and`": "return x and isinstance(x, A)",
    "behind `or`": "return (x is None or A) and None",
    "a chained comparison": "return 1 < 0 < A",
    "a lambda": "return (lambda: A) and None",
    "a comprehension": "return [A for _ in ()] or {A: 1 for _ in ()} or None",
    "its condition": "return [1 for _ in () if A] or None",
    "a pattern": "match x:\n        case None:\n            return None\n        case A():\n            return 1",
    "an assertion's text": "assert x is None, A",
    "an inner function's header": "def inner(x: A) -> A: ...\n    return None",
    "a handler's type": "try:\n        return None\n    except A:\n        return 1",
}


@pytest.mark.parametrize("case", NOW_AND_THEN)
def test_what_stock_does_not_evaluate_asks_for_nothing_that_fails(load, case):
    source = "from __future__ import annotations\nfrom broken import A\ndef use(x=None):\n    "
    assert not load(source + NOW_AND_THEN[case], "broken").use()


@pytest.mark.parametrize(
    "read", ["A if x else None", "x and A", "(lambda: A)()", "[A for _ in '1'][0]", "1 < 2 < A + 2 and A"]
)
def test_what_is_read_only_now_and_then_is_there_when_it_is_read(load, read):
    module = load(f"from heavy import A\ndef use(x):\n    return {read}\n")
    assert sys.heavy_count == 0 and module.use(1) == 1 and sys.heavy_count == 1


def test_an_import_for_type_checkers_stays_where_it_is(load):
    source = "TYPE_CHECKING = False\nif TYPE_CHECKING:\n    from heavy import A\nelse:\n    from heavy import B\n"
    module = load(source + "def use():\n    plan: A = B\n    return plan\n")
    assert sys.heavy_count == 0 and module.use() == 2


SLOW = """
import threading
begun, go, broken, waited = threading.Event(), threading.Event(), [], []
def wait():
    waited.append(1)
    begun.set()
    assert go.wait(60)
    if broken:
        raise broken.pop()
    return True
if True:
    FLAG = bool("there")
    if wait():
        from heavy import A
def use():
    return FLAG and A
"""


def slow(load):
    return load(SLOW, chosen=lambda s: isinstance(s, ast.If))


def test_a_thread_that_asks_while_another_binds_waits_for_it(load):
    module, found = slow(load), []
    threads = [threading.Thread(target=lambda: found.append(module.use())) for _ in range(2)]
    threads[0].start()
    assert module.begun.wait(60)
    threads[1].start()
    threads[1].join(0.3)
    assert threads[1].is_alive()
    module.go.set()
    for thread in threads:
        thread.join(60)
    assert found == [1, 1] and module.waited == [1]


def test_nobody_waits_for_a_name_that_is_not_bound_late_nor_for_another_module(load):
    module, found = slow(load), []
    other = {"__name__": "another"}
    exec(f"def {BINDER}(name, names=('FLAG',)):\n    global FLAG\n    FLAG = 1\n", other)
    binding = threading.Thread(target=module.use)
    binding.start()
    assert module.begun.wait(60)
    asks = threading.Thread(target=lambda: found.extend([hasattr(module, "nobody_has_that"), need(other, "FLAG")]))
    asks.start()
    asks.join(5)
    done = list(found)
    module.go.set()
    binding.join(60)
    asks.join(60)
    assert done == [False, None]


def test_half_of_what_is_bound_is_never_seen_and_what_is_put_there_meanwhile_stays(load):
    module = slow(load)
    module.broken.append(LookupError())
    found = []

    def use():
        with pytest.raises(LookupError) as raised:
            module.use()
        found.append(raised.value)

    binding = threading.Thread(target=use)
    binding.start()
    assert module.begun.wait(60)
    module.wait = "put there"
    assert "FLAG" not in vars(module)
    module.go.set()
    binding.join(60)
    assert found and module.wait == "put there"


def test_a_signal_is_no_failure_of_a_name_that_is_read_now_and_then(load, tmp_path):
    (tmp_path / "killed.py").write_text("import os\nos.kill(os.getpid(), 15)\nraise SystemExit('a failed build')\n")
    module = load("from killed import A\ndef use(x):\n    return x and A\n", "killed")

    def told(number, frame):
        raise SystemExit("told to stop")

    before = signal.signal(signal.SIGTERM, told)
    try:
        with pytest.raises(SystemExit, match="told to stop"):
            module.use(1)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_is_interrupted_leaves_nothing_bound(load):
    module = slow(load)
    module.go.set()
    module.broken.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        module.use()
    assert not {"FLAG", "A"} & set(vars(module))
    assert module.use() == 1


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


CAPTURES = """
def handled():
    try:
        raise OSError("why")
    except OSError as A:
        kept = A
        return kept
def matched(x):
    found = []
    match x:
        case [A]:
            found.append(A)
    match x:
        case [*A]:
            found.append(A)
    match {"k": x}:
        case {"k": _, **A}:
            found.append(A)
    return found
"""


def test_an_existing_local_name_is_not_an_import(load):
    module = load("from heavy import A\ndef use(A):\n    return A\ndef bind():\n    A = 3\n    return A\n" + CAPTURES)
    assert (module.use(5), module.bind(), sys.heavy_count) == (5, 3, 0)
    assert (str(module.handled()), module.matched([4]), sys.heavy_count) == ("why", [4, [4], {}], 0)


@pytest.mark.parametrize(
    "source",
    [
        "from heavy import A\nX = A\n",
        "from heavy import A\ndef f(x: A): ...\n",
        "from heavy import A\nclass K(A): ...\n",
        "A = None\nif True:\n    from heavy import A\n",
        "from heavy import *\n",
        "x = 1\n",
        "from heavy import A\n__getattr__ = len\n",
        "from heavy import A\nif True:\n    def __getattr__(name): ...\n",
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
