"""Threads, forks, other starts of processes, other plugins, other copies: a start goes on, and as stock's does.

On a shelf of real stock files, whose doors stock's own vllm.plugins calls; real engines are started in test_serve.
"""

import json
import subprocess
import sys
import textwrap

import pytest
from shelves import CHILD, environment, overlay, plugin, run, shelf

pytestmark = pytest.mark.unit
STOCK = {"VLLM_PLUGINS": ""}  # vLLM loads no plugin then
SIDES = {"stock": STOCK, "ours": {}}


@pytest.fixture
def place(tmp_path, monkeypatch):
    made = shelf(tmp_path / "shelf")
    (tmp_path / "runtime").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return made


def both(place, code, *places, options=()):
    return {side: run(code, environment(*places, place, **environ), options=options) for side, environ in SIDES.items()}


def test_threads_that_start_and_import_at_once(place):
    got = both(
        place,
        """
        import threading
        gate, found, errors = threading.Barrier(24), [], []

        def one(number):
            gate.wait()
            try:
                if number % 2:
                    start()
                import vllm.utils.import_utils as target
                found.append(id(target))
                target._has_module("whole_package")
            except BaseException as error:
                errors.append(repr(error))

        threads = [threading.Thread(target=one, args=(n,)) for n in range(24)]
        [t.start() for t in threads]; [t.join(60) for t in threads]
        start()
        finders = sum(type(f).__module__ == "vllm_rocm_fixes.importing" for f in sys.meta_path)
        print(json.dumps([len(found), len(set(found)), errors, finders, mended()]))
        """,
    )
    assert got == {"stock": [24, 1, [], 0, False], "ours": [24, 1, [], 1, True]}


FORK = """
    import signal, threading, time
    start()
    thread = threading.Thread(target=lambda: __import__(WHAT))
    thread.start()
    while "slow" not in sys.modules:
        time.sleep(0.001)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(3)
        start()
        os.write(writer, b"yes" if mended() else b"no")
        os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    thread.join()
    print(json.dumps([said, os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, mended()]))
    """


@pytest.mark.parametrize("what", ["vllm.utils.import_utils", "other"])
def test_a_fork_while_another_thread_imports(place, what):
    """Of a module that a thread was importing, a forked child waits for a thread that it doesn't have: in stock too."""
    (place / "slow.py").write_text("import time\ntime.sleep(1.5)\n")
    (place / "other.py").write_text("import slow\n")
    target = place / "vllm/utils/import_utils.py"
    text = target.read_text()
    if what != "other":
        target.write_text(text.replace("import importlib.util\n", "import importlib.util\nimport slow\n", 1))
        assert target.read_text() != text
    got = both(place, f"WHAT = {what!r}\n" + textwrap.dedent(FORK))
    child = {side: answer[:2] for side, answer in got.items()}
    assert child["ours"][1] == child["stock"][1], "a child that goes on in stock goes on with us"
    assert child["ours"][0].replace("yes", "no") == child["stock"][0]
    assert [answer[2] for answer in got.values()] == [False, True]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_of_every_kind(place, method):
    """A fork has what its parent had; a fresh interpreter gets it when vLLM calls the doors there, as it does."""
    (place / "worker.py").write_text(CHILD + "def work(q):\n    start()\n    q.put(facts())\n")
    script = place / "main.py"
    script.write_text(
        CHILD + "if __name__ == '__main__':\n"
        "    import multiprocessing, worker\n    start()\n"
        f"    context = multiprocessing.get_context({method!r})\n    q = context.Queue()\n"
        "    p = context.Process(target=worker.work, args=(q,)); p.start(); got = q.get(timeout=60); p.join()\n"
        "    print(json.dumps([got, p.exitcode]))\n"
    )
    for side, environ in SIDES.items():
        done = subprocess.run(
            [sys.executable, str(script)], env=environment(place, **environ), capture_output=True, text=True, timeout=90
        )
        assert done.returncode == 0, done.stderr
        got, status = json.loads(done.stdout.splitlines()[-1])
        assert status == 0 and got["mended"] == (side == "ours")
        assert got["answers"] == [True, False, False]


def test_a_subinterpreter(place):
    """torch doesn't load in one, so vLLM doesn't run there; what can run there is mended there, and alone."""
    got = both(
        place,
        """
        try:
            import _interpreters as interpreters
            sub = interpreters.create("legacy")
            run = interpreters.exec
        except ImportError:
            import _xxsubinterpreters as interpreters
            sub = interpreters.create(isolated=False)
            run = interpreters.run_string
        code = CODE + '''
        start()
        with open(PLACE, "w") as file:
            json.dump(mended(), file)
        '''.replace("        ", "")
        place = os.path.join(os.environ["XDG_RUNTIME_DIR"], "sub")
        failed = run(sub, f"PLACE = {place!r}\\n" + code)
        with open(place) as file:
            inner = json.load(file)
        before = "vllm_rocm_fixes" in sys.modules
        interpreters.destroy(sub)
        start()
        print(json.dumps([str(failed), inner, before, mended()]))
        """.replace("CODE", repr(CHILD)),
    )
    assert got == {"stock": ["None", False, False, False], "ours": ["None", True, False, True]}


def test_a_hundred_starts_in_a_row(place, tmp_path):
    environ = environment(place)
    code = CHILD + "start()\nprint(json.dumps(facts()))\n"
    answers = set()
    for _ in range(100):
        done = subprocess.run(
            [sys.executable, "-c", code], env=environ, cwd="/", capture_output=True, text=True, timeout=60
        )
        answers.add((done.returncode, done.stdout, done.stderr))
    assert len(answers) == 1, answers
    [(status, output, errors)] = answers
    assert (status, errors) == (0, "") and json.loads(output)["mended"]
    entries = list((tmp_path / "cache" / "vllm-rocm-fixes" / "mended").iterdir())
    assert len(entries) < 5, "a start leaves no more than the first one did"
    records = list((tmp_path / "runtime").rglob("*.json"))
    assert len(records) <= 2, "the records of dead processes go"


RAISES = {
    "while it is loaded": "raise RuntimeError('theirs')\n",
    "when it is called": "def door():\n    raise RuntimeError('theirs')\n",
    "an exit": "def door():\n    raise SystemExit('theirs')\n",
}


@pytest.mark.parametrize("how", RAISES)
@pytest.mark.parametrize("order", ["before", "after"])
def test_a_plugin_that_raises(place, tmp_path, order, how):
    """What it does to vLLM stays what it does in stock; ours comes first by the platform door in any case."""
    theirs = plugin(tmp_path / "theirs", "theirs", RAISES[how])
    code = f"""
        if {order!r} == "after":
            sys.path.append({str(theirs)!r})
        try:
            start()
            end = None
        except BaseException as error:
            end = [type(error).__name__, str(error)]
        from vllm.plugins import load_plugins_by_group
        found = list(load_plugins_by_group("vllm.general_plugins"))
        print(json.dumps([end, mended(), found]))
        """
    places = [theirs] if order == "before" else []
    ours = run(code, environment(*places, place))
    stock = run(code, environment(*places, place, VLLM_PLUGINS="theirs"))
    assert ours[0] == stock[0] and (ours[0] is None) == (how == "while it is loaded")
    assert (stock[1], ours[1]) == (False, True)
    if how != "while it is loaded":
        assert ours[2] == (["theirs", "rocm_fixes"] if order == "before" else ["rocm_fixes", "theirs"])


def test_two_copies_on_the_path(place, tmp_path):
    """Python takes the first, the entry points of the second are the same names, and one finder stands there."""
    old = overlay(tmp_path / "old", "0.0.1")
    got = run(
        """
        start()
        import vllm_rocm_fixes
        finders = sum(type(f).__module__ == "vllm_rocm_fixes.importing" for f in sys.meta_path)
        print(json.dumps([vllm_rocm_fixes.__version__, finders, facts()]))
        """,
        environment(old, place),
    )
    version, finders, facts = got
    assert (version, finders, facts["mended"], facts["warnings"]) == ("0.0.1", 1, True, [])
    assert len(facts["said"]) == 1 and "vllm-rocm-fixes 0.0.1 on vLLM 0.23.0" in facts["said"][0]


def test_an_upgrade_in_place(place, tmp_path):
    """The new version's edit is used, and nothing that the old one kept; a downgrade finds its own again."""
    site = tmp_path / "site"
    code = """
        start()
        import vllm.utils.import_utils as target
        names = target._has_module.__wrapped__.__code__.co_varnames
        print(json.dumps([names, [line.split(" on ")[0] for line in facts()["said"]]]))
        """
    kept = tmp_path / "cache" / "vllm-rocm-fixes" / "mended"
    seen = []
    for version, variable in (("1.0", "known"), ("1.1", "known_by_the_new_one"), ("1.0", "known")):
        overlay(site, version)
        patch = site / "vllm_rocm_fixes" / "patches" / "import_utils.py"
        text = patch.read_text()
        for word in ("known = answer", "if known is", 'return known"'):
            assert word in text
            text = text.replace(word, word.replace("known", variable))
        patch.write_text(text)
        for _ in range(2):  # the second start finds what the first one kept
            names, line = run(code, environment(site, place))
            assert variable in names and line == [f"vllm-rocm-fixes {version}"]
        seen.append(len(list(kept.iterdir())))
    assert seen[0] < seen[1], "the new version keeps its own"
