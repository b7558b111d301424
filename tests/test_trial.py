"""The trial of an import in a child process: real packages, real crashes, real forks."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import types

import pytest
from native import packages

from vllm_rocm_fixes import trial as module
from vllm_rocm_fixes.patches.import_utils import answer
from vllm_rocm_fixes.trial import Trial, trial

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return packages(tmp_path_factory.mktemp("packages"))


@pytest.fixture(autouse=True)
def _on_the_path(folder, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(module, "_known", {})


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("pure", ""),
        ("pure.inner", ""),
        ("json", ""),
        ("leaves_a_child", ""),
        ("ends_badly", ""),
        ("raises_import_error", "ImportError: a part is missing"),
        ("raises_other", "RuntimeError: no such GPU"),
        ("ends_with_exit", "SystemExit: [aiter] build failed"),
        ("leaves", "the import ends the interpreter (exit code 0)"),
        ("lacks_a_part", "ModuleNotFoundError: No module named 'some_other_package_that_is_not_here'"),
        ("lacks_a_library", "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory"),
        ("aborts", "the import ends the interpreter (SIGABRT)"),
        ("illegal", "the import ends the interpreter (SIGILL)"),
    ],
)
def test_answer(name, reason):
    start = time.monotonic()
    found = trial(name)
    assert (found.ok, found.reason) == (not reason, reason)
    assert name.partition(".")[0] not in sys.modules or name == "json"
    assert time.monotonic() - start < 20


def test_nothing_of_the_import_reaches_this_process():
    before = os.environ.get("PYTHONPATH"), list(sys.path)
    assert "ElasticBuffer" in trial("heavy").names
    assert (os.environ.get("PYTHONPATH"), sys.path) == before


def test_a_hang_is_ended_with_all_it_started(monkeypatch):
    monkeypatch.setattr(module, "SECONDS", 1.0)
    start = time.monotonic()
    assert trial("hangs") == Trial(False, "the import took more than 1 s")
    assert time.monotonic() - start < 10
    assert not _alive("time.sleep(600)")


def test_what_is_waited_for_is_said(monkeypatch, caplog):
    """A package that sleeps: which, for how long, and what it counts as."""
    monkeypatch.setattr(module, "SECONDS", 1.5)
    monkeypatch.setattr(module, "_PATIENCE", 0.5)
    assert answer("hangs") is False and answer("hangs") is False
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "The import of hangs in a child process has taken 0.5 s; in 1 s it is ended, and counts as failed",
        *["hangs is installed but counts as absent: the import took more than 1.5 s"] * 2,
    ]
    caplog.clear()
    assert trial("pure").ok and not caplog.records


def test_a_child_whose_parent_is_killed_ends(folder, tmp_path):
    """Also where the package ignores every signal that can be ignored, and never comes back."""
    told = tmp_path / "pid"
    (tmp_path / "stubborn.py").write_text(
        "import os, signal, time\n"
        "for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:\n"
        "    signal.signal(number, signal.SIG_IGN)\n"
        f"open({str(told)!r}, 'w').write(f'{{os.getpid()}}\\n')\n"
        "time.sleep(600)\n"
    )
    code = "from vllm_rocm_fixes import trial\ntrial.SECONDS = 1.0\ntrial._GRACE = 600\ntrial.trial('stubborn')"
    parent = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(tmp_path)})
    try:
        deadline = time.monotonic() + 20
        while not (told.exists() and told.read_text().endswith("\n")):
            assert time.monotonic() < deadline, "the child never began"
            time.sleep(0.05)
    finally:
        parent.kill()
        parent.wait()
    child = int(told.read_text())
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    try:
        assert not _runs(child)
    finally:
        if _runs(child):
            os.kill(child, signal.SIGKILL)


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_build_is_interrupted_where_this_thread_blocks_signals(tmp_path, monkeypatch):
    lock = tmp_path / "lock"
    (tmp_path / "waits.py").write_text(
        f"import os, time\nopen({str(lock)!r}, 'x').close()\n"
        f"try:\n    time.sleep(600)\nfinally:\n    os.remove({str(lock)!r})\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(module, "SECONDS", 2.0)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        assert trial("waits") == Trial(False, "the import took more than 2 s")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert not lock.exists()


def test_a_build_that_takes_too_long_takes_its_lock_file_away(tmp_path, monkeypatch):
    lock = tmp_path / "lock"
    (tmp_path / "builds.py").write_text(
        "import os, subprocess, sys\n"
        f"os.close(os.open({str(lock)!r}, os.O_CREAT | os.O_EXCL))\n"
        "try:\n    subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'], check=True)\n"
        f"finally:\n    os.remove({str(lock)!r})\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(module, "SECONDS", 2.0)
    assert trial("builds") == Trial(False, "the import took more than 2 s")
    assert not lock.exists()


def test_what_cannot_be_killed_is_not_waited_for(monkeypatch):
    sent = []

    class Stuck:  # in a driver: no signal reaches it
        pid, returncode = 1 << 30, None

        def wait(self, timeout=None):
            assert timeout is not None, "this would wait for ever"
            raise subprocess.TimeoutExpired("stuck", timeout)

    monkeypatch.setattr(os, "killpg", lambda group, number: sent.append((group, number)))
    module._end(Stuck())
    assert sent == [(1 << 30, signal.SIGINT), (1 << 30, signal.SIGKILL)]


def test_what_a_package_left_running_is_ended():
    assert trial("leaves_a_child").ok
    assert not _alive("import time; time.sleep(600)")


def _alive(word):
    """Processes of that command that were ours; a process that is being killed gets a moment."""
    deadline = time.monotonic() + 5
    while (found := _running(word)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def _running(word):
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/cmdline", "rb") as file:
                    command = file.read()
                with open(f"/proc/{entry}/stat") as file:
                    state = file.read().rpartition(")")[2].split()[0]
                with open(f"/proc/{entry}/status") as file:
                    parent = next(line for line in file if line.startswith("PPid")).split()[1]
            except OSError:
                continue
            if word.encode() in command and state != "Z" and parent in ("1", str(os.getpid())):
                found.append(entry)
    return found


def test_threads_share_one_child_and_forks_its_answer(folder, tmp_path, monkeypatch):
    log = tmp_path / "imports"
    package = tmp_path / "counted"
    package.mkdir()
    (package / "__init__.py").write_text(f"open({str(log)!r}, 'a').write('x')\nimport time\ntime.sleep(0.3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(trial("counted").ok)) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    pid = os.fork()  # while another thread holds the lock
    if pid == 0:
        os._exit(0 if trial("pure").ok else 1)
    assert os.waitpid(pid, 0)[1] == 0
    for thread in threads:
        thread.join()
    assert answers == [True] * 4
    pid = os.fork()
    if pid == 0:
        os._exit(0 if trial("counted").ok else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert log.read_text() == "x"


def test_another_place_is_another_trial():
    assert trial("pure", "one").ok
    module._known["pure", "one", ""] = Trial(False, "kept")
    assert trial("pure", "one").reason == "kept"
    assert trial("pure", "two").ok


def test_an_attribute_that_is_made_when_asked_for(tmp_path, monkeypatch):
    (tmp_path / "makes.py").write_text(
        "def __getattr__(name):\n    if name == 'Made':\n        return 1\n    raise AttributeError(name)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [trial("makes", None, name).ok for name in ("Made", "Other", "")] == [True, False, True]


@pytest.fixture
def with_torch(tmp_path, monkeypatch):
    """A torch that this process has loaded; what its file is, and how often children imported that."""
    log = tmp_path / "torch_imports"

    def call(then=""):
        (tmp_path / "torch.py").write_text(f"open({str(log)!r}, 'a').write('x')\n{then}\n")
        (tmp_path / "needs_torch.py").write_text(
            "import sys, time\n"
            "if 'torch' not in sys.modules:\n"
            "    raise ImportError('libc10.so: cannot open shared object file')\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
        return lambda: len(log.read_text()) if log.exists() else 0

    return call


def test_what_needs_the_libraries_of_a_torch_that_is_loaded(with_torch, monkeypatch):
    imported = with_torch("print('torch speaks')")
    assert trial("pure").ok and not imported(), "where it goes without, torch costs nothing"
    assert trial("needs_torch").ok and imported() == 1
    assert trial("raises_other") == Trial(False, "RuntimeError: no such GPU") and imported() == 1
    assert trial("nothing_of_that_name") is None and imported() == 1
    module._known.clear()
    monkeypatch.delitem(sys.modules, "torch")
    assert trial("needs_torch").reason.startswith("ImportError: libc10.so") and imported() == 1


@pytest.mark.parametrize(
    "then", ["raise ImportError('torch')", "import os; os.abort()", "import time; time.sleep(600)"]
)
def test_a_torch_that_a_child_cannot_import_tells_nothing_of_a_package(with_torch, monkeypatch, then):
    imported = with_torch(then)
    monkeypatch.setattr(module, "SECONDS", 3.0)
    start = time.monotonic()
    assert trial("needs_torch") == Trial(False, "ImportError: libc10.so: cannot open shared object file")
    assert imported() == 1 and time.monotonic() - start < 10


def test_the_limit_is_that_of_both_trials(with_torch, tmp_path, monkeypatch):
    imported = with_torch()
    (tmp_path / "slow.py").write_text(
        "import sys, time\ntime.sleep(600 if 'torch' in sys.modules else 1.6)\nraise ImportError('libc10.so')\n"
    )
    monkeypatch.setattr(module, "SECONDS", 4.0)
    start = time.monotonic()
    assert trial("slow") == Trial(False, "the import took more than 4 s") and imported() == 1
    assert time.monotonic() - start < 6
    assert trial("hangs") == Trial(False, "the import took more than 4 s") and imported() == 1


def test_no_child_no_answer(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    assert trial("pure") is None


def test_a_child_that_never_gets_to_the_import_tells_nothing(tmp_path, monkeypatch):
    program = tmp_path / "server"  # a program that embeds Python
    program.write_text("#!/bin/sh\necho 'unknown option: -c' >&2\nexit 2\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert trial("pure") is None


def test_where_no_fork_is_allowed(folder):
    code = """
import os, resource, sys, tempfile
from vllm_rocm_fixes.trial import trial
import json, encodings.idna
if os.getuid() == 0:  # no limit holds for root
    os.setgid(65534)
    os.setuid(65534)
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
print(trial("pure"))
"""
    env = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("None\n", 0), done.stderr


def test_who_is_not_found_in_the_child_is_unknown(monkeypatch):
    assert trial("nothing_of_that_name") is None
    assert trial("pure.nothing_of_that_name") is None


def test_a_child_that_somebody_ended_tells_nothing(tmp_path, monkeypatch):
    (tmp_path / "killed.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert trial("killed") is None


def test_the_child_is_as_this_interpreter(tmp_path, monkeypatch):
    (tmp_path / "asks.py").write_text(
        "import os, sys, json, resource\n"
        "core, off = resource.getrlimit(resource.RLIMIT_CORE)[0], os.environ['ROCM_FIXES']\n"
        "raise ImportError(json.dumps([sys.executable, sys.path, os.environ['KEPT'], off, core, sys.argv]))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("KEPT", "yes")
    monkeypatch.setattr(module, "_CUT", 10_000)
    told = json.loads(trial("asks").reason.partition(": ")[2])
    assert told == [sys.executable, sys.path, "yes", "off", 0, ["-c"]]
    assert "ROCM_FIXES" not in os.environ
