"""Guard pythonpath with the real TileLang: what its import leaves behind in PYTHONPATH and sys.path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from wheels import tilelang

SCRIPT = Path(__file__).parent / "hip" / "imports.py"
SIMILAR = "/srv/tilelang/3rdparty/tvm/python"
UNTOUCHED = ("own",)  # the user's own entry is the folder itself: TileLang leaves PYTHONPATH alone
RAISES = {"ImportError": "ImportError: on purpose", "SystemExit": "SystemExit: 3", "KeyboardInterrupt": "Keyboard"}
CASES = ["unset", "empty", "set", "similar", "own", "named", "own and named", *RAISES, "second try", "thread"]
CASES += ["thread unsets"]


@pytest.fixture(scope="module", params=["0.1.10", "0.1.15"])
def seen(request):
    """Version, and for stock and ours what became of each case."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ROCM_FIXES", "TVM_", "TL_"))}
    environment["PYTHONPATH"] = str(tilelang(request.param))
    cases = CASES if request.param == "0.1.10" else ["set", "SystemExit", "second try"]
    started = [
        subprocess.Popen(
            [sys.executable, SCRIPT, door, *cases],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for door in ("stock", "ours")
    ]
    said = []
    for process in started:
        out, err = process.communicate(timeout=300)
        lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        assert [line["case"] for line in lines] == cases, err
        said.append({line["case"]: line for line in lines})
    return request.param, *said


def test_imports_end_as_in_stock(seen):
    version, stock, ours = seen
    for case in ours:
        assert stock[case]["outcome"] == ours[case]["outcome"]
        assert ours[case]["outcome"].startswith(RAISES.get(case, version))
        assert stock[case]["late"] == ours[case]["late"]


def test_everything_is_as_it_was(seen):
    _, stock, ours = seen
    for case in ours:
        if not case.startswith("thread"):
            assert ours[case]["after"] == ours[case]["before"], case
            assert stock[case]["after"][1] != stock[case]["before"][1], case
            if case not in UNTOUCHED:
                assert stock[case]["after"][0] != stock[case]["before"][0], case


def test_what_another_thread_changed_stays(seen):
    version, stock, ours = seen
    if version != "0.1.10":
        return
    variable, path = ours["thread"]["after"]
    assert variable == os.pathsep.join(["/theirs", SIMILAR, "/one", "/also"])
    assert path == ["/theirs", *ours["thread"]["before"][1], SIMILAR]
    assert stock["thread"]["after"][0] != variable
    assert ours["thread unsets"]["after"] == [None, ours["thread unsets"]["before"][1]]


def alone(code, folder):
    """What the code prints, in an interpreter of its own, with a folder that is TVM's by its looks."""
    (folder / "theirs" / "tvm").mkdir(parents=True)
    (folder / "theirs" / "tvm" / "__init__.py").write_text("")
    head = "import os, sys, threading\nfrom vllm_rocm_fixes.guards import pythonpath as guard\n"
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, "-c", head + code]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.unit
def test_a_fork_in_the_middle_of_another_threads_import(tmp_path):
    code = """
inside, go = threading.Event(), threading.Event()
def run():
    with guard.around("tilelang"):
        inside.set()
        go.wait()
other = threading.Thread(target=run)
other.start()
inside.wait()
for held in (False, True):
    if held:
        go.set()
        other.join()
        guard._lock[0].acquire()
    child = os.fork()
    if child == 0:
        with guard.around("tilelang"):
            with guard.around("tvm"):
                os.environ["PYTHONPATH"] = "theirs"
            left = os.environ.get("PYTHONPATH")
        print(left, os.environ.get("PYTHONPATH"), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
    assert alone(code, tmp_path) == ["theirs", "None"] * 2


@pytest.mark.unit
def test_a_search_of_another_thread_misses_no_folder(tmp_path):
    (tmp_path / "goods.py").write_text("")
    code = """
found, searching, go = [], threading.Event(), threading.Event()
class Slow:
    def find_spec(self, name, target=None):
        if name == "goods":
            searching.set()
            go.wait(1)
def hook(place):
    if place == "slow":
        return Slow()
    raise ImportError(place)
def search():
    try:
        import goods
        found.append("found")
    except ImportError:
        found.append("missed")
sys.path_hooks.insert(0, hook)
sys.path[:0] = ["slow", os.getcwd()]
guard._keep(["nowhere"])  # the second time: our finder is there already
other = threading.Thread(target=search)
with guard.around("tilelang"):
    sys.path.insert(0, "theirs")
    other.start()
    searching.wait()
go.set()
other.join()
print(*found, "theirs" in sys.path)
"""
    assert alone(code, tmp_path) == ["found", "False"]
