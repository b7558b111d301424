"""The import way: a module that isn't loaded yet is compiled from its mended tree, and all else stays stock's."""

import json
import os
import py_compile
import subprocess
import sys
import textwrap
import zipfile

import pytest

pytestmark = pytest.mark.unit

# A package of three lines stands for vLLM here: what is tested is the delivery, on any file.
STOCK = textwrap.dedent('''\
    """A stock module."""
    import inspect, os


    def edited():
        # a comment that the file keeps
        return "stock"


    def untouched():
        raise LookupError("line 12 of the file")  # LINE
    ''')

# What a child runs first: a finder that turns "stock" into "mended" in shop.goods, through the engine's own mend.
ENGINE = textwrap.dedent("""\
    import ast, json, sys, traceback, inspect, importlib, os
    from vllm_rocm_fixes.importing import Finder, source_of
    from vllm_rocm_fixes.mend import mend
    from vllm_rocm_fixes.patch import Patch, needed, clear

    def strings(tree):
        return [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and n.value == "stock"]

    def edit(tree):
        for node in strings(tree):
            node.value = "mended"

    PATCH = Patch("one", "shop.goods", "", (), "0", None, lambda t: needed("") if strings(t) else clear(""), edit)
    calls, errors = [], []

    def coder(name, loader, origin):
        calls.append(name)
        try:
            source, filename = source_of(name, loader, origin)
        except ImportError:
            return None
        return mend(source, filename, [PATCH]).code

    def enter(guards={}):
        sys.meta_path.insert(0, Finder({"shop.goods": coder}, guards, lambda *e: errors.append(e)))
    """)


@pytest.fixture
def shop(tmp_path):
    folder = tmp_path / "site" / "shop"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "goods.py").write_text(STOCK)
    return folder


def child(code, *paths, options=(), **environ):
    """What the code prints as JSON, in a fresh interpreter with these places on its path."""
    environ = {"PYTHONPATH": os.pathsep.join(map(str, paths)), **environ}
    environ = {**{k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}, **environ}
    done = subprocess.run(
        [sys.executable, *options, "-c", ENGINE + textwrap.dedent(code)],
        env=environ, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_traceback_source_and_names_are_those_of_the_file(shop):
    said = child(
        """
        enter()
        import shop.goods as goods
        try:
            goods.untouched()
        except LookupError as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
        print(json.dumps({
            "edited": goods.edited(), "line": [last.filename, last.lineno, last.line],
            "source": inspect.getsource(goods.untouched), "file": goods.__file__, "doc": goods.__doc__,
            "whole": inspect.getsource(goods), "edited line": goods.edited.__code__.co_firstlineno,
            "again": importlib.reload(goods).edited(),
        }))
        """,
        shop.parent,
    )
    lines = STOCK.splitlines()
    number = next(i for i, line in enumerate(lines, 1) if "LINE" in line)
    assert said["edited"] == said["again"] == "mended"
    assert said["line"] == [str(shop / "goods.py"), number, lines[number - 1].strip()]
    assert said["source"] == "\n".join(lines[number - 2 : number]) + "\n"
    assert said["whole"] == STOCK and said["file"] == str(shop / "goods.py") and said["doc"] == "A stock module."
    assert said["edited line"] == 5


@pytest.mark.parametrize("options", [(), ("-O",), ("-OO",)], ids=["", "-O", "-OO"])
def test_the_stock_pyc_is_neither_written_nor_read(shop, options):
    run = "enter()\nimport shop.goods as g\nprint(json.dumps([g.edited(), calls]))"
    plain = "import shop.goods as g\nprint(json.dumps(g.edited()))"
    assert child(run, shop.parent, options=options) == ["mended", ["shop.goods"]]
    cached = list((shop / "__pycache__").glob("goods*"))
    assert cached == []
    assert child(plain, shop.parent, options=options) == "stock"
    (written,) = (shop / "__pycache__").glob("goods*")
    before = written.read_bytes()
    assert child(run, shop.parent, options=options)[0] == "mended"
    assert written.read_bytes() == before
    assert child(plain, shop.parent, options=options) == "stock"


def test_a_zip_archive(shop, tmp_path):
    archive = tmp_path / "shop.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        for path in shop.glob("*.py"):
            packed.write(path, f"shop/{path.name}")
    said = child(
        """
        enter()
        import shop.goods as goods
        print(json.dumps([goods.edited(), goods.__file__, inspect.getsource(goods.untouched).split()[1]]))
        """,
        archive,
    )
    assert said == ["mended", str(archive / "shop" / "goods.py"), "untouched():"]


def test_an_editable_installation(shop, tmp_path):
    """setuptools installs a finder of its own for some layouts; a real one, made by pip, is asked here."""
    project = tmp_path / "project"
    source = project / "elsewhere" / "shop"
    source.parent.mkdir(parents=True)
    shop.rename(source)
    (project / "setup.py").write_text(
        "from setuptools import setup\nsetup(name='shop', packages=['shop'], package_dir={'shop': 'elsewhere/shop'})\n"
    )
    target = tmp_path / "target"
    make = "from setuptools.build_meta import build_editable; build_editable('.')"
    subprocess.run([sys.executable, "-c", make], cwd=project, check=True, capture_output=True)
    (wheel,) = project.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(target)
    said = child(
        f"""
        import site
        site.addsitedir({str(target)!r})
        enter()
        import shop.goods as goods
        print(json.dumps([goods.edited(), goods.__file__]))
        """,
    )
    assert said == ["mended", str(source / "goods.py")]


def test_beside_pytests_assertion_rewriting(shop, tmp_path):
    """The same module is registered for rewriting; a test file beside it still gets pytest's own messages."""
    (tmp_path / "conftest.py").write_text(ENGINE + "enter()\nimport pytest\npytest.register_assert_rewrite('shop')\n")
    (tmp_path / "test_it.py").write_text(
        "def test_it():\n    from shop.goods import edited\n    assert edited() == 'mended'\n"
        "def test_message():\n    left = 1\n    assert left == 2\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(shop.parent)}, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "1 failed, 1 passed" in done.stdout and "assert 1 == 2" in done.stdout, done.stdout + done.stderr


# A tool that calls a hook after an import: its finder asks all the others, and its loader stands before theirs. wrapt,
# ddtrace and newrelic do this, in one of these ways.
TOOL = """
import importlib.util
told = []

class Chain:
    def __init__(self, loader):
        self.loader = loader
    def create_module(self, spec):
        return self.loader.create_module(spec)
    def exec_module(self, module):
        self.loader.exec_module(module)
        told.append(module.__name__)

class Proxy:
    def __init__(self, loader):
        object.__setattr__(self, "__wrapped__", loader)
    def __getattribute__(self, name):
        if name in ("exec_module", "__wrapped__"):
            return object.__getattribute__(self, name)
        return getattr(object.__getattribute__(self, "__wrapped__"), name)
    def exec_module(self, module):
        self.__wrapped__.exec_module(module)
        told.append(module.__name__)

class Tool:
    def __init__(self, kind):
        self.kind, self.busy = kind, set()
    def find_spec(self, name, path=None, target=None):
        if name in self.busy:
            return None
        self.busy.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.busy.discard(name)
        if spec is not None:
            spec.loader = self.kind(spec.loader)
        return spec
"""


@pytest.mark.parametrize("order", ["tool ours", "ours tool", "tool ours tool", "tool tool ours"])
@pytest.mark.parametrize("kind", ["Chain", "Proxy"])
def test_beside_a_tool_that_calls_hooks_after_an_import(shop, order, kind):
    """Whoever came first, the module is mended once, guarded once, and each tool's hook is called once."""
    said = child(
        f"""
        {textwrap.indent(TOOL, " " * 8)}
        import contextlib
        guarded = []
        def guard(name):
            guarded.append(name)
            return contextlib.nullcontext()

        for who in {order.split()!r}:
            enter({{"shop.goods": [guard]}}) if who == "ours" else sys.meta_path.insert(0, Tool({kind}))
        import shop.goods as goods
        print(json.dumps([goods.edited(), guarded, [n for n in told if n == "shop.goods"], calls]))
        """,
        shop.parent,
    )
    assert said == ["mended", ["shop.goods"], ["shop.goods"] * order.count("tool"), ["shop.goods"]]


# What others ask of a loader, or of a module by its loader. The same lines run on stock.
ASKED = """
import copy, importlib.abc, importlib.machinery, importlib.resources, pickle, pkgutil, trace, shop
from importlib import util
loader, package = goods.__spec__.loader, shop.__spec__.loader
kinds = [importlib.machinery.SourceFileLoader, importlib.abc.Loader, importlib.abc.InspectLoader]
kinds += [importlib.abc.ExecutionLoader, importlib.abc.SourceLoader, importlib.abc.FileLoader]
tracer = trace.Trace(count=1, trace=0)
tracer.runfunc(goods.edited)
with importlib.resources.as_file(importlib.resources.files(shop) / "data.txt") as file:
    known = {
        "kinds": [[isinstance(one, kind) for kind in kinds] for one in (loader, package, goods.__loader__)],
        "copies": [type(made).__name__ for made in (copy.copy(package), pickle.loads(pickle.dumps(loader)))],
        "equal": [copy.copy(loader).path, copy.deepcopy(package).path],
        "is package": [loader.is_package("shop.goods"), package.is_package("shop")],
        "names": [loader.name, loader.path, loader.get_filename("shop.goods"), loader.get_source("shop.goods")],
        "source": inspect.getsource(goods.untouched),
        "lines": inspect.getsourcelines(goods.edited),
        "file": [inspect.getsourcefile(goods), inspect.getmodule(goods.edited).__name__, goods.__cached__],
        "data": [pkgutil.get_data("shop", "data.txt").decode(), file.read_text(), str(file)],
        "resources": sorted(p.name for p in importlib.resources.files("shop").iterdir() if p.suffix),
        "modules": [m.name for m in pkgutil.walk_packages(shop.__path__, "shop.")],
        "lines that ran": sorted(place for place in tracer.results().counts if place[0] == goods.__file__),
        "by name": pkgutil.resolve_name("shop.goods:edited") is goods.edited,
        "specs": [util.find_spec("shop.goods").origin, util.find_spec("shop").submodule_search_locations],
    }
print(json.dumps(known))
"""


def test_others_find_what_they_find_on_stock(shop):
    (shop / "data.txt").write_text("data")
    ours = "finder = Finder({'shop.goods': coder, 'shop': coder}, {'shop': []}, lambda *e: errors.append(e))\n"
    ours += "sys.meta_path.insert(0, finder)\n"
    stock, mended = (child(way + "import shop.goods as goods\n" + ASKED, shop.parent) for way in ("", ours))
    assert stock == mended and all(stock["kinds"][0]) and stock["data"][0] == "data"


def test_a_reload_binds_late_names_anew_as_stock_does(shop):
    (shop / "late.py").write_text(
        "if len('1'):\n    from colorsys import rgb_to_hsv\n\ndef use():\n    return rgb_to_hsv\n"
    )
    code = """
        import colorsys
        from vllm_rocm_fixes.late import defer

        def deferred(name, loader, origin):
            tree = ast.parse(open(origin).read())
            defer(tree, lambda s: isinstance(s, ast.ImportFrom))
            return compile(ast.fix_missing_locations(tree), origin, "exec")

        if WAY == "ours":
            sys.meta_path.insert(0, Finder({"shop.late": deferred}, {}, lambda *e: errors.append(e)))
        import shop.late as late
        first = late.use()
        colorsys.rgb_to_hsv = lambda *_: "another"
        kept = late.use() is first
        late.len = len  # what the import only asks for
        importlib.reload(late)
        kept = kept and "len" in vars(late)
        print(json.dumps([kept, late.use() is colorsys.rgb_to_hsv, "_rocm_fixes_late" in vars(late)]))
    """
    for way, mended in (("stock", False), ("ours", True)):
        assert child(f"WAY = {way!r}\n" + textwrap.dedent(code), shop.parent) == [True, True, mended]


def test_threads_that_import_at_once_get_one_mended_module(shop):
    said = child(
        """
        import threading
        enter()
        start, found = threading.Barrier(16), []

        def run():
            start.wait()
            import shop.goods as goods
            found.append((id(goods), goods.edited()))

        threads = [threading.Thread(target=run) for _ in range(16)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        print(json.dumps([len(found), len(set(found)), found[0][1], calls]))
        """,
        shop.parent,
    )
    assert said == [16, 1, "mended", ["shop.goods"]]


def test_without_source_stock_is_kept(shop):
    py_compile.compile(str(shop / "goods.py"), cfile=str(shop / "goods.pyc"))
    (shop / "goods.py").unlink()
    said = child("enter()\nimport shop.goods as g\nprint(json.dumps([g.edited(), calls]))", shop.parent)
    assert said == ["stock", ["shop.goods"]]


def test_guards_are_around_the_module_and_their_errors_stay_inside(shop):
    said = child(
        """
        import contextlib
        log = []

        @contextlib.contextmanager
        def good(name):
            log.append("in " + name)
            try:
                yield
            finally:
                log.append("out")

        def breaks(name):
            raise RuntimeError("guard")

        @contextlib.contextmanager
        def breaks_late(name):
            yield
            raise RuntimeError("late")

        enter({"shop.goods": [good, breaks, breaks_late]})
        import shop.goods as goods
        print(json.dumps([goods.edited(), log, [str(e) for _, e in errors]]))
        """,
        shop.parent,
    )
    assert said == ["mended", ["in shop.goods", "out"], ["guard", "late"]]


def test_a_guard_may_forbid_an_import(shop):
    said = child(
        """
        def forbids(name):
            raise ImportError(name + " would abort the interpreter", name=name)

        def gone(name):
            raise ModuleNotFoundError("the guard's own file was taken away", name="overlay.guard")

        enter({"shop.goods": [gone, forbids]})
        try:
            import shop.goods
        except ImportError as error:
            print(json.dumps([str(error), "shop.goods" in sys.modules, [str(e) for _, e in errors]]))
        """,
        shop.parent,
    )
    assert said == ["shop.goods would abort the interpreter", False, ["the guard's own file was taken away"]]


def test_an_error_in_the_module_leaves_through_the_guards(shop):
    (shop / "goods.py").write_text('x = "stock"\nraise SystemExit(3)\n')
    said = child(
        """
        import contextlib
        log = []

        @contextlib.contextmanager
        def good(name):
            try:
                yield
            finally:
                log.append("out")

        enter({"shop.goods": [good]})
        try:
            import shop.goods
        except SystemExit as end:
            print(json.dumps([end.code, log, "shop.goods" in sys.modules]))
        """,
        shop.parent,
    )
    assert said == [3, ["out"], False]


RAISES = {
    "from json import no_such_name": "ImportError",
    "import no_such_package.part": "ModuleNotFoundError",
    "from . import no_such_sibling": "ImportError",
    "raise ImportError('libcudart.so.12: cannot open', name='ext', path='/opt/ext.so')": "ImportError",
    "import shop.broken": "SyntaxError",
    "import shop.raises": "ZeroDivisionError",
    "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise RuntimeError('[aiter]', 7) from e": "RuntimeError",
    "try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise OSError(2, 'gone', '/dev/kfd')": "FileNotFoundError",
    "try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise KeyError('x') from None": "KeyError",
    "def f():\n    raise SystemExit('[aiter] failed')\nf()": "SystemExit",
    "raise KeyboardInterrupt": "KeyboardInterrupt",
    "class Own(BaseException): ...\nraise Own(1, 2)": "Own",
}


@pytest.mark.parametrize("statement", RAISES)
def test_an_error_of_the_module_arrives_as_it_does_on_stock(shop, statement):
    (shop / "goods.py").write_text(f'"""Doc."""\n\nx = "stock"\n\n{statement}\n')
    (shop / "broken.py").write_text("x = (\n")
    (shop / "raises.py").write_text("def f():\n    return 1 / 0\n\n\nf()\n")
    asked = """
        def known(error):
            if error is None:
                return None
            frames = traceback.extract_tb(error.__traceback__)
            own = [f for f in frames if not f.filename.startswith("<frozen") and "vllm_rocm_fixes" not in f.filename]
            return {
                "kind": type(error).__qualname__, "said": str(error), "args": repr(error.args),
                "fields": [getattr(error, n, None) for n in ("name", "path", "errno", "filename", "code", "lineno")],
                "notes": getattr(error, "__notes__", []), "suppress": error.__suppress_context__,
                "cause": known(error.__cause__), "context": known(error.__context__),
                "frames": [[f.filename, f.lineno, f.name, f.line] for f in own],
                "loaded": "shop.goods" in sys.modules, "bound": hasattr(sys.modules["shop"], "goods"),
                "importing": sum("vllm_rocm_fixes" in f.filename for f in frames),
            }

        try:
            import shop.goods
        except BaseException as error:
            print(json.dumps(known(error)))
        """
    guard = "import contextlib; enter({'shop.goods': [lambda name: contextlib.nullcontext()]})\n"
    stock, ours, guarded = (child(way + textwrap.dedent(asked), shop.parent) for way in ("\n", "enter()\n", guard))
    assert ours.pop("importing") == 1 and guarded.pop("importing") == 1 and stock.pop("importing") == 0
    assert stock == ours == guarded
    assert stock["kind"] == RAISES[statement] and not stock["loaded"]
    line = next(f for f in stock["frames"] if f[0] == str(shop / "goods.py"))
    assert line[2:] == ["<module>", statement.splitlines()[line[1] - 5].strip()]


def test_run_with_m(shop):
    (shop / "goods.py").write_text('import json\nif __name__ == "__main__":\n    print(json.dumps("stock"))\n')
    assert child("enter()\nimport runpy\nrunpy.run_module('shop.goods', run_name='__main__')", shop.parent) == "mended"
