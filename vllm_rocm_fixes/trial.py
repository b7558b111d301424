"""Whether a package can be imported, found out in a child process.

An import may fail, end the interpreter (a native library built for another processor), never return, or change its
process for good: a HIP runtime, libraries in the global scope, PYTHONPATH. A child takes all of that with it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any, NamedTuple

_LOG = logging.getLogger("vllm.rocm_fixes.trial")
_TORCHS = re.compile(r"libc10|libtorch|undefined symbol")  # how a loader says that torch isn't there
SECONDS = 60.0  # how long an import may take; a cold network disk needs some, and a hang must end
_PATIENCE = 10.0  # after so long it is said what is waited for
_GRACE = 2.0  # what a build that is interrupted gets to take its lock file away
_CUT = 300  # characters of a reason, which becomes one line in a log
# Signals that are sent to a process from outside; they say nothing about the package.
_FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}

# What every program text for python -c begins with: that puts the working directory first on its path, where another
# user may have left a json.py.
NOT_FROM_HERE = """
import sys
if sys.path[:1] == [""]:
    del sys.path[0]
"""
_CHILD = """
import ctypes, json, os, signal, sys
answer, rest = os.dup(1), sys.argv.pop()
os.dup2(2, 1)  # what the package prints is no answer
name, attribute, torch, path, parent = json.loads(rest)
sys.path[:] = path
# PR_SET_PDEATHSIG: when the parent is gone this ends, whatever the package does with signals and handlers.
ctypes.CDLL(None).prctl(1, ctypes.c_ulong(signal.SIGKILL))
if os.getppid() != parent:
    os._exit(0)
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the parent ignores it
signal.pthread_sigmask(signal.SIG_SETMASK, ())  # or blocks it
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
except Exception:
    pass
if torch:
    import torch
found = {"ok": False, "lost": False, "reason": "", "names": []}
os.write(answer, b"\\n")  # from here on it is the import
try:
    import importlib
    module = importlib.import_module(name)
    found["names"] = [str(x) for x in dir(module)]
    found["ok"] = not attribute or hasattr(module, attribute)
except BaseException as error:
    found["reason"] = type(error).__name__ + ": " + str(error)
    found["lost"] = isinstance(error, ModuleNotFoundError) and (name + ".").startswith(str(error.name) + ".")
os.write(answer, json.dumps(found).encode())
os._exit(0)  # what a package does when an interpreter ends may hang or crash
"""


class Trial(NamedTuple):
    """What became of an import: the reason is empty where it went well, names are those the module offers."""

    ok: bool
    reason: str = ""
    names: frozenset[str] = frozenset()


_known: dict[tuple[str, object, str], Trial | None] = {}
_lock = threading.Lock()
# A forked child has none of the threads that may hold it.
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]


def trial(name: str, place: object = None, attribute: str = "") -> Trial | None:
    """Try to import a module in a child process, once for each name and place (where its file lies).

    With an attribute, the module must have that too (for one that makes its attributes when they are asked for).
    The answer is kept in this process, and children that it forks have it too. None: it could not be found out, because
    no child could be started, it ended before the import, somebody ended it, or it didn't find the module at all.
    """
    with _lock:  # two threads that ask at the same time start one child
        key = name, place, attribute
        if key not in _known:
            _known[key] = _try(name, attribute)
        return _known[key]


def _try(name: str, attribute: str) -> Trial | None:
    """Without torch, which is quick; with it what lacks a library of it, where this process has torch loaded."""
    end = time.monotonic() + SECONDS
    found = _try_once(name, attribute, False, SECONDS)
    left = round(end - time.monotonic())
    lacks = found and not found.ok and _TORCHS.search(found.reason)
    if lacks and sys.modules.get("torch") and left > 0:
        return _try_once(name, attribute, True, left) or found
    return found


def _try_once(name: str, attribute: str, torch: bool, seconds: float) -> Trial | None:
    try:
        with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as told:
            code = _run([name, attribute, torch, sys.path], seconds, said, told)
            answer, errors = (_read(file) for file in (said, told))
    except Exception:  # no fork allowed, no space for its output: it can't be found out
        return None
    if not answer:  # not an interpreter, or one that can't start: the package has no part in that
        return None
    if code is None:
        return Trial(False, f"the import took more than {SECONDS:g} s")
    try:
        found = json.loads(answer)
    except ValueError:
        if -code in _FROM_OUTSIDE:
            return None
        how = _signal(-code) if code < 0 else f"exit code {code}"
        last = errors.strip().splitlines()[-1:]
        return Trial(False, _line(": ".join([f"the import ends the interpreter ({how})", *last])))
    if found["lost"]:
        return None
    return Trial(found["ok"], _line(found["reason"]), frozenset(found["names"]))


def _run(wanted: list[Any], seconds: float, said: Any, told: Any) -> int | None:
    """The exit code of a child that imports what is wanted, None where it took too long and was ended."""
    flags: list[str] = getattr(subprocess, "_args_from_interpreter_flags", list)()  # -I, -X and the like
    given = json.dumps([*wanted, os.getpid()])
    # Off: if the package imports vLLM, that one shall not start children of its own.
    environment = {**os.environ, "ROCM_FIXES": "off"}
    child = subprocess.Popen(
        [sys.executable, *flags, "-c", NOT_FROM_HERE + _CHILD, given],
        stdin=subprocess.DEVNULL,
        stdout=said,
        stderr=told,
        env=environment,
        start_new_session=True,
    )
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(min(_PATIENCE, seconds))
        name, left = wanted[0], max(seconds - _PATIENCE, 0)
        line = "The import of %s in a child process has taken %g s; in %g s it is ended, and counts as failed"
        _LOG.warning(line, name, min(_PATIENCE, seconds), left)
        return child.wait(left)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the child, where it still runs, and what it has started.

    It is interrupted first: a kernel build that is killed leaves its lock file behind, and the next one waits for it.
    One that hangs in a driver can't even be killed, and isn't waited for.
    """
    if child.returncode is None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            os.killpg(child.pid, signal.SIGINT)
            child.wait(_GRACE)
    with contextlib.suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_GRACE)


def _read(file: Any) -> str:
    file.seek(0)
    return str(file.read().decode("utf-8", "replace"))


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _CUT else line[: _CUT - 3] + "..."
