"""imports.py DOOR NAME...: import the real TileLang under these circumstances, each in a forked child; JSON lines.

DOOR is "stock" or "ours". Each line tells PYTHONPATH and sys.path before and after, and how the import ended.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import threading
from pathlib import Path

SITE = Path(importlib.util.find_spec("tilelang").origin).parents[1]
VENDORED = str(SITE / "tilelang" / "3rdparty" / "tvm" / "python")
SIMILAR = "/srv/tilelang/3rdparty/tvm/python"  # a user's own, that merely looks like it


class When:
    """Does something at the moment when a module is looked for."""

    def __init__(self, module, action):
        self.module, self.action = module, action

    def find_spec(self, name, path=None, target=None):
        if name == self.module:
            sys.meta_path.remove(self)
            self.action()


def at(module, action):
    sys.meta_path.insert(0, When(module, action))


def raising(error):
    def action():
        raise error

    return action


def in_a_thread(action):
    def start():
        thread = threading.Thread(target=action)
        thread.start()
        thread.join()

    return start


def put(value):
    if value is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = value


def theirs():
    put(os.pathsep.join([f"/theirs{os.pathsep}{SIMILAR}", os.environ["PYTHONPATH"], "/also"]))
    sys.path.insert(0, "/theirs")
    sys.path.append(SIMILAR)
    os.environ["THEIRS"] = "1"


def a_second_try():
    """What kept TVM from loading is gone: TileLang's env.py isn't executed again, and TVM must still be found."""
    sys.modules["tvm_ffi"] = None
    try:
        import tilelang  # noqa: F401
    except ImportError:
        del sys.modules["tvm_ffi"]
        return
    raise AssertionError("TileLang was imported without tvm_ffi")


CASES = {
    "unset": lambda: put(None),
    "empty": lambda: put(""),
    "set": lambda: put(f"/one{os.pathsep}{os.pathsep}/two{os.pathsep}"),
    "similar": lambda: (put(SIMILAR), sys.path.insert(0, SIMILAR)),
    "own": lambda: (put(f"{VENDORED}{os.pathsep}/one"), sys.path.insert(0, VENDORED)),
    "named": lambda: (put("/one"), os.environ.__setitem__("TVM_IMPORT_PYTHON_PATH", VENDORED)),
    "own and named": lambda: (
        put(VENDORED),
        sys.path.insert(0, VENDORED),
        os.environ.__setitem__("TVM_IMPORT_PYTHON_PATH", VENDORED),
    ),
    "ImportError": lambda: at("tilelang.jit", raising(ImportError("on purpose"))),
    "SystemExit": lambda: at("tilelang.jit", raising(SystemExit(3))),
    "KeyboardInterrupt": lambda: at("tvm.base", raising(KeyboardInterrupt())),
    "second try": a_second_try,
    "thread": lambda: (put("/one"), at("tilelang.jit", in_a_thread(theirs))),
    "thread unsets": lambda: (put("/one"), at("tilelang.jit", in_a_thread(lambda: put(None)))),
}


def run(case, door):
    if door == "ours":
        import vllm_rocm_fixes

        vllm_rocm_fixes.prepare()
    if case != "second try":
        CASES[case]()
    before = os.environ.get("PYTHONPATH"), list(sys.path)
    if case == "second try":
        CASES[case]()
    try:
        import tilelang

        outcome = tilelang.__version__
    except BaseException as error:
        outcome = f"{type(error).__name__}: {error}"
    late = importlib.util.find_spec("tvm.contrib.popen_pool") if "tvm" in sys.modules else None
    return {
        "case": case,
        "before": before,
        "after": (os.environ.get("PYTHONPATH"), list(sys.path)),
        "outcome": outcome,
        "late": late is not None,
    }


if __name__ == "__main__":
    import torch  # noqa: F401  # once for all of them

    for name in sys.argv[2:] or CASES:
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            try:
                print(json.dumps(run(name, sys.argv[1])), flush=True)
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
