"""A start that waits for a lock file of AITER's, with a stand-in that waits as AITER's FileBaton does."""

import os
import re
import subprocess
import sys
import textwrap
import time

import pytest

pytestmark = pytest.mark.unit

# What jit/core.py and jit/utils/file_baton.py do: create the file, or wait until it is gone.
AITER = textwrap.dedent("""\
    import os, time
    lock = os.path.join(os.environ["AITER_JIT_DIR"], "build", "lock_module_aiter_enum")
    while True:
        try:
            made = os.open(lock, os.O_CREAT | os.O_EXCL)
            break
        except FileExistsError:
            time.sleep(0.1)
    time.sleep(float(os.environ.get("BUILD", 0)))
    os.close(made)
    os.unlink(lock)
    """)
START = textwrap.dedent("""\
    import logging, os, sys
    logging.basicConfig(format="%(levelname)s %(message)s")
    import vllm
    if os.environ["SIDE"] == "ours":
        from vllm_rocm_fixes.guards import GUARDS, aiter_locks
        from vllm_rocm_fixes.process import Process
        aiter_locks.SECONDS = 0.5
        Process((), GUARDS).prepare()
    print("begun", flush=True)
    import aiter
    print("imported", flush=True)
    """)


@pytest.fixture
def place(tmp_path):
    for name, text in {"vllm/__init__.py": "", "aiter/__init__.py": AITER}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "jit" / "build").mkdir(parents=True)
    return tmp_path


def start(place, side, stdout=subprocess.PIPE, **environ):
    environ = {**os.environ, "PYTHONPATH": str(place), "AITER_JIT_DIR": str(place / "jit"), "SIDE": side, **environ}
    command = [sys.executable, "-u", "-c", START]
    return subprocess.Popen(command, env=environ, cwd=place, stdout=stdout, stderr=subprocess.STDOUT, text=True)


def lines_until(place, side, wanted, seconds=20):
    """What a start says until a line holds the wanted words; it is ended then, or when its seconds are over."""
    with open(place / side, "w+") as log:
        process = start(place, side, stdout=log)
        deadline = time.monotonic() + seconds
        while wanted not in (place / side).read_text() and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.05)
        process.kill()
        process.wait()
    return (place / side).read_text().splitlines()


def test_a_stale_lock_is_named_where_stock_hangs_in_silence(place):
    lock = place / "jit" / "build" / "lock_module_aiter_enum"
    lock.touch()
    os.utime(lock, (time.time() - 7200, time.time() - 7200))
    assert lines_until(place, "stock", "lock", 4) == ["begun"]
    said = lines_until(place, "ours", "rm ")
    [line] = [line for line in said if "lock file" in line]
    assert line.startswith("WARNING guard aiter_locks: ") and f"rm {lock}" in line
    assert re.search(r"is 72\d\d s old", line)
    assert lock.exists() and "imported" not in said


def test_a_start_that_nothing_holds_says_nothing_and_ends(place):
    output, _ = start(place, "ours").communicate(timeout=30)
    assert output.splitlines() == ["begun", "imported"]
    output, _ = start(place, "ours", BUILD="2").communicate(timeout=30)  # its own build takes its time
    assert output.splitlines() == ["begun", "imported"]


def test_a_build_of_another_process_is_named_and_waited_for(place):
    first = start(place, "stock", BUILD="6")
    assert first.stdout.readline() == "begun\n"
    lock = place / "jit" / "build" / "lock_module_aiter_enum"
    deadline = time.monotonic() + 20
    while not lock.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    said, _ = start(place, "ours").communicate(timeout=60)
    first.communicate(timeout=30)
    begun, line, imported = said.splitlines()
    assert (begun, imported) == ("begun", "imported")
    assert f"{lock} is" in line and f"process {first.pid} holds it" in line


def test_a_first_request_that_waits_is_told_too(place):
    """A kernel is built when it is first called. Whoever reads the line removes the file; the request is answered."""
    lock = place / "jit" / "build" / "lock_module_sampling"
    lock.touch()
    os.utime(lock, (time.time() - 7200, time.time() - 7200))
    code = START.partition('print("begun"')[0] + textwrap.dedent("""
        import threading, time, types
        from vllm_rocm_fixes.patches.sampler import answer
        lock = os.path.join(os.environ["AITER_JIT_DIR"], "build", "lock_module_sampling")
        class Remove(logging.Handler):
            def emit(self, record):
                os.unlink(lock)
        logging.getLogger("vllm.rocm_fixes").addHandler(Remove())
        def kernel(*arguments):
            begun = time.monotonic()
            while os.path.exists(lock) and time.monotonic() < begun + 30:
                time.sleep(0.05)
            return "late" if os.path.exists(lock) else "tokens"
        sampler = types.SimpleNamespace(aiter_ops=1, aiter_sample=kernel, forward_native=None)
        print(answer(sampler, None, {}, None, None))
        print([t.name for t in threading.enumerate()])
        """)
    environ = {**os.environ, "PYTHONPATH": str(place), "AITER_JIT_DIR": str(place / "jit"), "SIDE": "ours"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environ, cwd=place, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["('tokens', None)", "['MainThread']"], done.stderr
    assert f"rm {lock}" in done.stderr
