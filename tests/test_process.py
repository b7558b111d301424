"""The doors and what they say: nothing comes out of them but None, and each thing is said once."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.unit

# A folder that looks like vLLM: what is tested here is the engine; the patches are tested on real releases.
MODULES = {
    "vllm/__init__.py": "",
    "vllm/_version.py": "__version__ = version = '0.23.0'\n",
    "vllm/early.py": "def f():\n    return 'stock'\n",
    "vllm/late.py": "def f():\n    return 'stock'\n",
    "vllm/fixed.py": "def f():\n    return 'mended'\n",
    "vllm/odd.py": "def g():\n    return 'something else'\n",
    "vllm/broken.py": "def f(:\n",
}
CHILD = textwrap.dedent("""\
    import ast, json, logging, os, sys, traceback
    from vllm_rocm_fixes import process
    from vllm_rocm_fixes.guards import Guard
    from vllm_rocm_fixes.patch import Patch, needed, clear, unknown

    said = []
    class Log(logging.Handler):
        def emit(self, record):
            said.append([record.levelname, record.getMessage()])
    logging.getLogger("vllm").setLevel(1)
    logging.getLogger("vllm").addHandler(Log())

    def words(tree):
        return {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}

    def examine(tree):
        found = words(tree)
        return needed("stock") if "stock" in found else clear("mended") if "mended" in found else unknown("no f")

    def edit(tree):
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and node.value == "stock":
                node.value = "mended"

    def fails(tree):
        raise RuntimeError("on purpose")

    def patch(name, **other):
        fields = dict(name=name, module="vllm." + name, summary="", origin=(), since="0.14.0", until=None,
                      examine=examine, mend=edit)
        return Patch(**{**fields, **other})

    import vllm
    def state(p):
        return {name: [r.state, r.reason] for name, r in p.results.items()}
    """)


@pytest.fixture
def shelf(tmp_path):
    for name, text in MODULES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


def child(shelf, code, status=0, **environ):
    environ = {**os.environ, "PYTHONPATH": str(shelf), **environ}
    done = subprocess.run(
        [sys.executable, "-c", CHILD + textwrap.dedent(code)],
        env=environ, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    return json.loads(done.stdout.splitlines()[-1]) if status == 0 else done.stderr


def test_loaded_and_not_loaded_modules_are_mended_and_one_line_says_so(shelf):
    got = child(
        shelf,
        """
        import vllm.early
        held = vllm.early.f
        series = [patch(n) for n in ("early", "late", "fixed", "odd", "broken")]
        series.append(patch("newer", since="0.30.0"))
        series.append(patch("moved"))
        p = process.Process(series, ())
        before = held()
        results = [p.prepare(), held(), p.register(), p.register(), p.prepare()]
        first = state(p)
        import vllm.late, vllm.fixed, vllm.odd
        try:
            import vllm.broken
        except SyntaxError as error:
            broken = error.filename
        print(json.dumps([before, results, first, state(p), said, vllm.late.f(), vllm.odd.g(), broken]))
        """,
    )
    before, results, first, after, said, late, odd, broken = got
    assert before == "stock" and results == [None, "mended", None, None, None]
    states = {name: entry[0] for name, entry in first.items()}
    assert states == {
        "early": "applied", "late": "waiting", "fixed": "clear", "odd": "unknown", "broken": "unknown",
        "newer": "absent", "moved": "unknown",
    }  # fmt: skip
    assert after["late"][0] == "applied" and late == "mended" and odd == "something else"
    assert broken.endswith("vllm/broken.py")
    info = [text for level, text in said if level == "INFO"]
    assert (
        len(info) == 1 and "on vLLM 0.23.0: early needed and applied; late needed and applied when imported" in info[0]
    )
    warned = [text for level, text in said if level == "WARNING"]
    assert [sum(w.startswith(n + ":") for w in warned) for n in ("odd", "broken", "moved")] == [1, 1, 1], warned
    assert len(warned) == 3


def test_the_line_waits_until_logging_is_set_up(shelf):
    got = child(
        shelf,
        """
        logger = logging.getLogger("vllm")
        logger.setLevel(logging.NOTSET)  # as before vLLM's own set-up: the root's WARNING counts
        p = process.Process([patch("early")], ())
        p.register()
        import vllm.early, colorsys
        heard = [len(said)]
        logger.setLevel(logging.INFO)
        import wave
        heard += [len(said), said[0][1]]
        import tabnanny
        print(json.dumps(heard + [len(said)]))
        """,
    )
    assert got[:2] + got[3:] == [0, 1, 1]
    assert "early needed and applied;" in got[2]


def test_an_edit_that_fails_keeps_stock_and_says_so_once(shelf):
    results, late, said = child(
        shelf,
        """
        p = process.Process([patch("late", mend=fails)], ())
        p.register()
        import vllm.late
        print(json.dumps([state(p), vllm.late.f(), [t for l, t in said if l == "WARNING"]]))
        """,
    )
    assert results["late"][0] == "failed" and late == "stock"
    assert len(said) == 1 and "on purpose" in said[0] and "stock is kept" in said[0]


def test_somebody_elses_function_is_left_alone_and_reported(shelf):
    results, f, said = child(
        shelf,
        """
        import vllm.early
        vllm.early.f = lambda: "theirs"
        p = process.Process([patch("early")], ())
        p.register()
        print(json.dumps([state(p), vllm.early.f(), [t for l, t in said if l == "WARNING"]]))
        """,
    )
    assert results["early"][0] == "failed" and f == "theirs" and len(said) == 1 and "isn't stock's any more" in said[0]


def test_a_definition_in_a_branch_that_was_not_taken_stops_nothing(shelf):
    branch = "\nif not __name__:\n    def g():\n        return 'stock'\n"
    (shelf / "vllm/early.py").write_text(MODULES["vllm/early.py"] + branch)
    results, f, said = child(
        shelf,
        """
        import vllm.early
        p = process.Process([patch("early")], ())
        p.register()
        print(json.dumps([state(p), vllm.early.f(), [t for l, t in said if l == "WARNING"]]))
        """,
    )
    assert results == {"early": ["applied", "stock; live, in f; nothing runs stock's g"]}
    assert (f, said) == ("mended", [])


@pytest.mark.parametrize(
    ("environ", "late", "waiting"),
    [
        ({"ROCM_FIXES": "off"}, "stock", None),
        ({"ROCM_FIXES_SKIP": "late"}, "stock", "skipped"),
        ({"ROCM_FIXES_SKIP": "lat"}, "mended", "applied"),
        ({"ROCM_FIXES": "nonsense", "ROCM_FIXES_STRICT": "perhaps"}, "mended", "applied"),
    ],
)
def test_switches(shelf, environ, late, waiting):
    results, f, said = child(
        shelf,
        """
        p = process.Process([patch("late")], ())
        p.register()
        import vllm.late
        print(json.dumps([state(p), vllm.late.f(), [t for l, t in said if l == "WARNING"]]))
        """,
        **environ,
    )
    assert f == late and results.get("late", [None])[0] == waiting
    misspelt = [v for v in environ.values() if v not in ("off", "late")]
    assert len(said) == len(misspelt) and all(any(word in line for line in said) for word in misspelt)


@pytest.mark.parametrize("name", ["odd", "broken", "late"])
def test_strict_ends_the_process_where_something_is_unknown_or_failed(shelf, name):
    code = f"""
        p = process.Process([patch({name!r}, mend=fails)], ())
        p.register()
        print(json.dumps("went on"))
        """
    assert child(shelf, code) == "went on"
    error = child(shelf, code, status=1, ROCM_FIXES_STRICT="1")
    assert error.strip().startswith(f"vllm-rocm-fixes (ROCM_FIXES_STRICT): {name}: ") and "Traceback" not in error


def test_a_module_that_is_being_imported_waits_for_the_next_door(shelf):
    (shelf / "vllm/early.py").write_text("import doors\ndoors.p.register()\ndef f():\n    return 'stock'\n")
    (shelf / "doors.py").write_text("p = None\n")
    first, then, f = child(
        shelf,
        """
        import doors
        doors.p = process.Process([patch("early")], ())
        import vllm.early
        first = state(doors.p)
        doors.p.register()
        print(json.dumps([first["early"][0], state(doors.p)["early"][0], vllm.early.f()]))
        """,
    )
    assert (first, then, f) == ("waiting", "applied", "mended")


def late_switches(shelf, before, after):
    """States, answers and warnings where the switches change between the two doors, as in Ray's workers."""
    return child(
        shelf,
        f"""
        import vllm.early
        guard = Guard("watch", ("json.tool",), lambda package: 1 / 0, "", (), lambda: "")
        os.environ.update({before!r})
        p = process.Process([patch("early"), patch("late"), patch("fixed")], (guard,))
        p.prepare()
        for name in {before!r}:
            del os.environ[name]
        os.environ.update({after!r})
        p.register(); p.register()
        import vllm.late, vllm.fixed, json.tool
        states = {{name: entry[0] for name, entry in state(p).items()}}
        print(json.dumps([states, vllm.early.f(), vllm.late.f(), [t for l, t in said if l == "WARNING"]]))
        """,
    )


def test_switches_that_come_between_the_doors(shelf):
    states, early, late, warned = late_switches(shelf, {}, {"ROCM_FIXES_SKIP": "early,late,watch,no_such"})
    assert states == {"early": "applied", "late": "skipped", "fixed": "clear"}
    assert (early, late) == ("mended", "stock")
    assert len(warned) == 2 and any(w.startswith("early is mended already") for w in warned), warned
    assert any("no_such" in w for w in warned), warned
    states, early, late, warned = late_switches(shelf, {}, {"ROCM_FIXES": "off"})
    assert (early, late) == ("mended", "stock") and len(warned) == 1 and states["late"] == "skipped"
    states, early, late, warned = late_switches(shelf, {"ROCM_FIXES": "off"}, {"ROCM_FIXES_SKIP": "late,watch"})
    assert (early, late) == ("mended", "stock") and not warned and states["late"] == "skipped"
    states, early, late, warned = late_switches(shelf, {}, {})
    assert (early, late) == ("mended", "mended") and len(warned) == 1 and "a guard of json.tool failed" in warned[0]


def test_what_mended_code_calls_is_there_before_it_is_called(shelf):
    """An uninstall under a running server takes nothing from it; what is gone by then leaves the module as in stock."""
    got = child(
        shelf,
        """
        def calls(module):
            def edit_and_call(tree):
                edit(tree)
                tree.body[0].body[:0] = ast.parse(f"from vllm_rocm_fixes.{module} import anything").body
            return edit_and_call
        for name in ("late", "fixed", "early"):
            text = f"def f():\\n    return 'stock'\\n"
            open(vllm.__path__[0] + f"/{name}.py", "w").write(text)
        called = {"late": "checks", "fixed": "gone", "early": "locks"}
        p = process.Process([patch(name, mend=calls(module)) for name, module in called.items()], ())
        import vllm.early
        p.register()
        live = "vllm_rocm_fixes.locks" in sys.modules
        before = "vllm_rocm_fixes.checks" in sys.modules
        import vllm.late, vllm.fixed
        print(json.dumps([before, "vllm_rocm_fixes.checks" in sys.modules, state(p), vllm.fixed.f(), live]))
        """,
    )
    before, after, states, fixed, live = got
    assert live and states["early"][0] == "applied"
    assert (before, after) == (False, True) and states["late"][0] == "applied"
    assert states["fixed"][0] == "unknown" and "vllm_rocm_fixes.gone" in states["fixed"][1] and fixed == "stock"


def test_a_door_that_was_interrupted_is_gone_through_again(shelf):
    states, late = child(
        shelf,
        """
        interrupts = [KeyboardInterrupt()]
        def install():
            if interrupts:
                raise interrupts.pop()
        p = process.Process([patch("late")], (Guard("watch", ("wave",), None, "", (), lambda: "", install),))
        try:
            p.prepare()
        except KeyboardInterrupt:
            pass
        p.register()
        import vllm.late
        print(json.dumps([state(p)["late"][0], vllm.late.f()]))
        """,
    )
    assert (states, late) == ("applied", "mended")


def test_a_switch_that_comes_between_the_doors_is_asked_by_a_refusal_too(shelf, tmp_path):
    """And what such a process finds is no answer for one without the switch."""
    states, after = child(
        shelf,
        f"""
        os.environ["ROCM_FIXES_CACHE"] = {str(tmp_path)!r}
        refuse = lambda site: "not without safe" if "safe" in site.skipped else None
        guard = Guard("safe", ("wave",), lambda package: None, "", (), lambda: "")
        series = [patch("late", refuse=refuse), patch("fixed"), patch("fixed")._replace(name="twin")]
        os.environ["ROCM_FIXES"] = "off"
        first = process.Process(series, (guard,))
        first.prepare()
        del os.environ["ROCM_FIXES"]
        os.environ["ROCM_FIXES_SKIP"] = "safe,twin"
        first.register()
        del os.environ["ROCM_FIXES_SKIP"]
        second = process.Process(series, (guard,))
        second.register()
        print(json.dumps([{{n: r.state for n, r in p.results.items()}} for p in (first, second)]))
        """,
    )
    assert states == {"late": "refused", "fixed": "clear", "twin": "skipped"}
    assert after == {"late": "waiting", "fixed": "clear", "twin": "clear"}


@pytest.mark.parametrize("after", [{"ROCM_FIXES_SKIP": "safe,other"}, {"ROCM_FIXES": "off"}])
@pytest.mark.parametrize("refuse", ["'not without safe'", "1 / 0"])
def test_a_guard_that_an_applied_patch_needs_stays(shelf, after, refuse):
    applied, not_yet, worked, warned, line = child(
        shelf,
        f"""
        import contextlib
        worked = []
        def around(name):
            worked.append(name)
            return contextlib.nullcontext()
        guards = [Guard(n, (m,), around, "", (), lambda: "") for n, m in (("safe", "wave"), ("other", "colorsys"))]
        refuse = lambda site: {refuse} if "safe" in site.skipped else None
        p = process.Process([patch("early", refuse=refuse), patch("late", refuse=refuse)], guards)
        p.prepare()
        import vllm.early
        os.environ.update({after!r})
        p.register()
        import vllm.late, wave, colorsys
        warned = [t for l, t in said if l == "WARNING" and "stays" in t]
        print(json.dumps([vllm.early.f(), vllm.late.f(), worked, warned, p.line().partition("guards ")[2]]))
        """,
    )
    why = "not without safe" if "safe" in refuse else "ZeroDivisionError: division by zero"
    assert (applied, not_yet, worked, line) == ("mended", "stock", ["wave"], "safe")
    said = "safe stays, for early is mended already: its switch came too late, set it where `ray start` runs"
    assert warned == [f"{said} ({why})"]


def test_what_was_switched_off_at_the_platform_door_stays_off(shelf):
    before, after, line, f, warned = child(
        shelf,
        """
        installed = []
        guard = Guard("safe", (), None, "", (), lambda: "", lambda: installed.append("safe"))
        os.environ["ROCM_FIXES_SKIP"] = "safe,early"
        refuse = lambda site: "not without safe" if "safe" in site.skipped else None
        p = process.Process([patch("early"), patch("late", refuse=refuse)], (guard,))
        p.prepare()
        before = list(installed)
        del os.environ["ROCM_FIXES_SKIP"]
        p.register()
        import vllm.late
        warned = [t for l, t in said if l == "WARNING" and "taken back" in t]
        print(json.dumps([before, {n: r.state for n, r in p.results.items()}, p.line(), vllm.late.f(), warned]))
        """,
    )
    assert (before, after, f) == ([], {"early": "skipped", "late": "refused"}, "stock")
    assert line.endswith("guards none")
    back = "stays off: its switch was taken back too late, set it where `ray start` runs"
    assert warned == [f"early {back}", f"safe {back}"]


def test_a_loader_that_changes_the_source_itself_keeps_stock(shelf):
    results, f, g = child(
        shelf,
        """
        from importlib.machinery import PathFinder, SourceFileLoader
        class Typed(SourceFileLoader):
            def source_to_code(self, data, path, *, _optimization=-1):
                return super().source_to_code(bytes(data).replace(b"f()", b"g()"), path)
        class TypedFinder:
            @staticmethod
            def find_spec(name, path=None, target=None):
                spec = PathFinder.find_spec(name, path, target) if name == "vllm.late" else None
                if spec:
                    spec.loader = Typed(name, spec.origin)
                return spec
        sys.meta_path.insert(0, TypedFinder)
        p = process.Process([patch("late"), patch("early")], ())
        p.register()
        import vllm.late, vllm.early
        print(json.dumps([state(p), vllm.late.g(), vllm.early.f()]))
        """,
    )
    assert (f, g) == ("stock", "mended") and results["early"][0] == "applied"
    assert results["late"][0] == "unknown" and "Typed, somebody else's loader" in results["late"][1]


def test_anothers_tests_in_site_packages_are_not_looked_at(shelf):
    code = """
        p = process.Process([patch("helpers", module="tests.utils")], ())
        p.register()
        print(json.dumps([state(p)["helpers"][0], [t for l, t in said if l == "WARNING"]]))
        """
    (shelf / "tests").mkdir()
    (shelf / "tests" / "utils.py").write_text("def g(): ...\n")
    assert child(shelf, code) == ["absent", []]
    (shelf / "setup.py").touch()  # vLLM's own checkout
    assert child(shelf, code)[0] == "unknown"


def test_a_refusal_is_asked_for_anew_in_every_process(shelf, tmp_path):
    code = f"""
        import pathlib
        folder = pathlib.Path({str(tmp_path)!r})
        os.environ.update(ROCM_FIXES_CACHE=str(folder / "cache"), ROCM_FIXES_SKIP="fixed")
        refuse = lambda site: "something is there" if (folder / "something").exists() else None
        p = process.Process([patch("late", refuse=refuse), patch("fixed")], ())
        p.register()
        import vllm.late
        print(json.dumps([vllm.late.f(), state(p)["late"][0]]))
        """
    assert child(shelf, code) == ["mended", "applied"]
    (tmp_path / "something").write_text("")
    assert child(shelf, code) == ["stock", "refused"]


def test_switches_that_come_late_disturb_no_import_of_another_thread(shelf):
    (shelf / "goods.py").write_text("")
    got = child(
        shelf,
        """
        import threading
        from importlib.machinery import PathFinder
        asked, go, found = threading.Event(), threading.Event(), []
        class Slow:
            def find_spec(self, name, path=None, target=None):
                if name == "goods":
                    asked.set()
                    go.wait()
        def search():
            try:
                import goods
                found.append("found")
            except ImportError:
                found.append("missed")
        p = process.Process([patch("late")], ())
        p.prepare()
        sys.meta_path.insert(sys.meta_path.index(PathFinder), Slow())
        other = threading.Thread(target=search)
        other.start()
        asked.wait()
        os.environ["ROCM_FIXES"] = "off"
        p._read_again()
        go.set()
        other.join()
        import vllm.late
        print(json.dumps([found, vllm.late.f()]))
        """,
    )
    assert got == [["found"], "stock"]


def test_the_real_doors_return_none_whatever_happens(shelf):
    got = child(
        shelf,
        """
        import vllm_rocm_fixes as overlay
        overlay.current().prepare = lambda: 1 / 0
        overlay.current().register = lambda: 1 / 0
        print(json.dumps([overlay.prepare(), overlay.register(), [t for l, t in said if l == "WARNING"]]))
        """,
    )
    assert got[:2] == [None, None] and len(got[2]) == 2 and "ZeroDivisionError" in got[2][0]


def test_children_by_fork_and_spawn_are_mended_too(shelf):
    (shelf / "target.py").write_text("def work(q):\n    import vllm.late\n    q.put(vllm.late.f())\n")
    (shelf / "opener.py").write_text(CHILD + "p = process.Process([patch('late')], ())\np.register()\n")
    got = child(
        shelf,
        """
        import multiprocessing
        p = process.Process([patch("late")], ())
        p.register()
        import target
        found = {}
        for method in ("fork", "forkserver"):
            context = multiprocessing.get_context(method)
            q = context.Queue()
            c = context.Process(target=target.work, args=(q,)); c.start(); found[method] = q.get(timeout=30); c.join()
        print(json.dumps(found))
        """,
    )
    # A fork inherits the finder. A fresh interpreter has none until vLLM calls the doors there: test_serve shows that.
    assert got == {"fork": "mended", "forkserver": "stock"}


def test_a_second_thread_waits_until_the_finder_stands(shelf):
    got = child(
        shelf,
        """
        import threading, time
        begun = threading.Event()
        slow = Guard("slow", (), None, "", (), lambda: "", install=lambda: (begun.set(), time.sleep(0.5)))
        p = process.Process([patch("late")], (slow,))
        other = threading.Thread(target=p.prepare)
        other.start()
        begun.wait()
        p.prepare()
        import vllm.late
        other.join()
        print(json.dumps([vllm.late.f(), state(p)["late"][1]]))
        """,
    )
    assert got == ["mended", "stock; while it was imported"]


def test_applied_is_said_of_code_that_has_run(shelf):
    """And not of code that was asked for, or that ended with an error."""
    (shelf / "vllm/late.py").write_text(
        "import builtins\nif hasattr(builtins, 'bad'):\n    1 / 0\n\ndef f():\n    return 'stock'\n"
    )
    got = child(
        shelf,
        """
        import builtins, importlib.util
        p = process.Process([patch("late")], ())
        p.prepare(); p.register()
        states = [state(p)["late"][0]]
        importlib.util.find_spec("vllm.late").loader.get_code("vllm.late")
        states.append(state(p)["late"][0])
        builtins.bad = True
        try:
            import vllm.late
        except ZeroDivisionError:
            states.append(state(p)["late"][0])
        del builtins.bad
        import vllm.late
        vllm.late.__loader__.get_code("vllm.late")  # as inspect and debuggers may
        print(json.dumps([*states, *state(p)["late"]]))
        """,
    )
    assert got == ["waiting", "waiting", "waiting", "applied", "stock; while it was imported"]


def test_a_module_that_another_thread_imports_during_the_survey_stays_applied(shelf):
    got = child(
        shelf,
        """
        import threading
        real = process.remembered
        def remembered(*arguments):
            found = real(*arguments)
            other = threading.Thread(target=__import__, args=("vllm.late",))
            other.start()
            other.join()
            return found
        process.remembered = remembered
        p = process.Process([patch("late")], ())
        p.prepare(); p.register()
        print(json.dumps(state(p)["late"]))
        """,
    )
    assert got == ["applied", "stock; while it was imported"]


def test_threads_that_open_the_doors_at_once(shelf):
    got = child(
        shelf,
        """
        import threading, vllm.early
        p = process.Process([patch("early"), patch("late")], ())
        start, found = threading.Barrier(12), []

        def run():
            start.wait()
            p.prepare(); p.register()
            import vllm.late
            found.append([vllm.early.f(), vllm.late.f()])

        threads = [threading.Thread(target=run) for _ in range(12)]
        [t.start() for t in threads]; [t.join(30) for t in threads]
        finders = [f for f in sys.meta_path if type(f).__module__ == "vllm_rocm_fixes.importing"]
        print(json.dumps([found, len(finders), sum(l == "INFO" for l, _ in said)]))
        """,
    )
    assert got == [[["mended", "mended"]] * 12, 1, 1]


def test_a_start_that_is_switched_off_hands_that_to_ray(shelf):
    handed = child(
        shelf,
        """
        import types
        platform = type("Platform", (), {"additional_env_vars": ["OTHER"]})()
        sys.modules["vllm.platforms"] = types.SimpleNamespace(_current_platform=platform)
        os.environ["ROCM_FIXES"] = "off"
        p = process.Process([patch("late")], ())
        p.prepare()
        p.register()
        print(json.dumps(platform.additional_env_vars))
        """,
    )
    assert handed[0] == "OTHER" and "ROCM_FIXES" in handed
