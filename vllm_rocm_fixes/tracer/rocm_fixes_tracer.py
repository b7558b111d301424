"""The tracer in one process: writes down what is imported, who asks for the GPU, and what changes for children.

What is hooked: importlib's _find_and_load, which only runs for modules that aren't loaded; torch's _lazy_init until the
GPU is initialised; what sets variables and dlopen flags, opens libraries and starts programs. Nothing is imported that
isn't loaded or built in at this moment, no hook stays in a path that runs often, and whatever a hook does beside
calling what it stands for is guarded: its errors are nobody else's.

Each process appends lines to a file of its own, each with one write, so that nothing is lost when it is killed. Fields
are separated by tabs; the first names the kind, the second is time.monotonic_ns(). vllm_rocm_fixes/traces.py reads it:

    P  process: id, those above it, "start" or "fork", Python, program
    I  an import has ended: begin, thread, depth, module, file and line of who asked, outcome, tracer's own ns so far
    H  a watched module begins: name, chain          h  it has ended: name, outcome, kB of memory it took
    G  the GPU is asked for: function, chain         g  what came of it
    D  a device file was found open: path, where     N  multiprocessing named this process
    V  a variable changed: name, old, new, chain     F  dlopen flags changed: old, new, chain
    L  a library was opened for all: file, chain     S  a program was started: id, traced or not, words
    X  the process ends: tracer's own ns
"""

from __future__ import annotations

import _thread
import atexit
import os
import sys
import time

TYPE_CHECKING = False  # typing and types aren't loaded at this moment
if TYPE_CHECKING:
    from types import CodeType, FrameType
    from typing import Any

_clock, _ident, _fstat, _append = time.monotonic_ns, _thread.get_ident, os.fstat, os.write
_bootstrap: Any = sys.modules["_frozen_importlib"]
_local: Any = _thread._local()
_LOADER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "importing.py")
_OWN = (__file__, os.__file__, "<frozen os>", _LOADER)  # frames of these aren't the one that asked
_VARIABLES = ("PYTHONPATH", "LD_LIBRARY_PATH")
_FILE = 873  # where our file lies: programs that close or reuse numbers count from three
_SLOW = 1_000_000  # ns: after a shorter import nobody looks for open devices, which takes 30 us itself

# Under importlib's own file name, so that tracebacks are trimmed and warnings counted as without it.
_FIND_AND_LOAD = """
def _find_and_load(name, import_):
    token = enter(name)
    if token is None:
        return stock(name, import_)
    try:
        module = stock(name, import_)
    except BaseException as error:
        leave(token, name, type(error).__name__)
        raise
    leave(token, name, "ok")
    return module
"""


class _State:
    folder = ""
    file = inode = -1
    spent = 0  # ns
    name = "MainProcess"
    watched: frozenset[str] = frozenset()
    devices: frozenset[str] = frozenset()
    variables: dict[bytes, bytes | None] = {}
    seen: set[str] = set()  # watched modules that were imported
    asked: set[object] = set()  # places that asked for the GPU
    opened: set[str] = set()  # libraries that were opened for all, and device files


def guarded(function: Any) -> Any:
    """The same function, whose errors end the tracing of this process and are nobody else's."""

    def call(*args: Any) -> Any:
        try:
            return function(*args)
        except Exception:
            _State.file = -1
            return None

    return call


def start(folder: str) -> None:
    """Trace this process into a folder whose file `config` says what is watched."""
    with open(os.path.join(folder, "config"), encoding="utf-8") as file:
        config = dict(line.rstrip("\n").split("\t", 1) for line in file)
    _State.folder = folder
    _State.watched, _State.devices = frozenset(config["watch"].split()), frozenset(config["devices"].split())
    _State.variables = {name.encode(): os.environb.get(name.encode()) for name in _VARIABLES}
    _begin("start")
    for name in list(_AFTER):
        if name in sys.modules:
            _AFTER.pop(name)()
    names = {"enter": guarded(_enter), "leave": guarded(_leave), "stock": _bootstrap._find_and_load}
    exec(compile(_FIND_AND_LOAD, "<frozen importlib._bootstrap>", "exec"), names)
    _bootstrap._find_and_load = names["_find_and_load"]
    os.putenv, os.unsetenv = _first(_change, os.putenv), _first(_change, os.unsetenv)
    os.posix_spawn = _then(_spawned, os.posix_spawn)
    sys.setdlopenflags = _first(_flags, sys.setdlopenflags)
    os.register_at_fork(after_in_child=guarded(_forked))
    atexit.register(guarded(_ended))


# The file


def _begin(kind: str) -> None:
    """Open the file of this process, and write who it is."""
    now, pid = _clock(), os.getpid()
    path = os.path.join(_State.folder, f"{pid}-{now}")
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        _State.file = os.dup2(file, _FILE, inheritable=False)
        os.close(file)
    except OSError:
        _State.file = file
    _State.inode, _State.spent = _fstat(_State.file).st_ino, 0
    words = [os.path.basename(word) if word[:1] == "/" else word for word in sys.orig_argv[:3]]
    words = [word if len(word) < 60 else f"{word[:60]}..." for word in words]  # of later ones, some may hold secrets
    _write("P", now, pid, " ".join(_above(pid)), kind, sys.version.split()[0], "\x1f".join(words))


def _above(pid: int) -> list[str]:
    """The processes above this one, nearest first: what lies between two Pythons may not be one."""
    found: list[str] = []
    try:
        while pid > 1 and len(found) < 12:
            with open(f"/proc/{pid}/stat", "rb") as file:
                pid = int(file.read().rpartition(b")")[2].split()[1])
            found.append(str(pid))
    except (OSError, ValueError, IndexError):
        pass
    return found


def _write(*fields: object) -> None:
    """Append one line of these fields."""
    escaped = [str(f).replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n") for f in fields]
    _put("\t".join(escaped))


def _put(line: str) -> None:
    """Append a line as it is. A program may have closed our file, and opened one of its own under the same number."""
    try:
        if _State.file >= 0:
            if _fstat(_State.file).st_ino == _State.inode:
                _append(_State.file, f"{line}\n".encode("utf-8", "replace"))
            else:
                _State.file = -1
    except Exception:
        _State.file = -1


# Who asked


def _caller(frame: FrameType | None) -> FrameType | None:
    """The frame that asked, below those of the import system."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith("<frozen importlib") and not file.endswith("importlib/__init__.py"):
            return frame
        frame = frame.f_back
    return None


def _chain(frame: FrameType | None) -> str:
    """The frames from the program down to this one, without the import system's, os's and the tracer's."""
    found = []
    while frame is not None:
        frame = _caller(frame)
        if frame is not None:
            code = frame.f_code
            if code.co_filename not in _OWN:
                found.append(f"{code.co_filename}:{frame.f_lineno or 0} {code.co_name}")
            frame = frame.f_back
    return "\x1f".join(found[::-1])


# Imports


def _enter(name: str) -> tuple[int, int, str, int, tuple[str, int] | None]:
    begun = _clock()
    _local.depth = depth = getattr(_local, "depth", -1) + 1
    frame = _caller(sys._getframe(2))
    file, line = (frame.f_code.co_filename, frame.f_lineno or 0) if frame else ("", 0)
    del frame
    hazard = name if name in _State.watched else name.partition(".")[0]
    entered = None
    if hazard in _State.watched and hazard not in _State.seen:
        _State.seen.add(hazard)
        entered = hazard, _memory()
        _write("H", begun, hazard, _chain(sys._getframe(2)))
    _State.spent += _clock() - begun
    return begun, depth, file, line, entered


def _leave(token: tuple[int, int, str, int, tuple[str, int] | None], name: str, outcome: str) -> None:
    now = _clock()
    begun, depth, file, line, hazard = token
    _local.depth = depth - 1
    if outcome == "ok" and name in _AFTER:
        _AFTER.pop(name)()
    if hazard:
        _write("h", now, hazard[0], outcome, _memory() - hazard[1])
        if outcome != "ok":
            _State.seen.discard(hazard[0])
    if hazard or (not depth and now - begun > _SLOW):
        _device(f"the import of {name}")
        process = sys.modules.get("multiprocessing.process")
        title = getattr(getattr(process, "_current_process", None), "_name", None)
        if title and title != _State.name:
            _State.name = title
            _write("N", now, title)
    text = f"I\t{now}\t{begun}\t{_ident()}\t{depth}\t{name}\t{file}\t{line}\t{outcome}\t{_State.spent}"
    if "\\" in text or "\n" in text or text.count("\t") != 9:
        _write("I", now, begun, _ident(), depth, name, file, line, outcome, _State.spent)
    else:
        _put(text)
    _State.spent += _clock() - now


def _memory() -> int:
    """Resident memory in kB."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def _device(where: str) -> None:
    """Say once when a device file is open: the native way to the GPU, which no Python function sees."""
    for number in os.listdir("/proc/self/fd") if _State.devices - _State.opened else ():
        try:
            path = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if path in _State.devices and path not in _State.opened:
            _State.opened.add(path)
            _write("D", _clock(), path, where)


# The GPU


class _Lazy:
    """The watch on torch.cuda._lazy_init, whose code is replaced so that every holder of the function follows."""

    function: Any = None
    code: CodeType | None = None


def _watch_cuda() -> None:
    cuda: Any = sys.modules["torch.cuda"]
    function: Any = vars(cuda).get("_lazy_init")
    if type(function) is not type(_watch_cuda) or function.__closure__:
        return
    stock = function.__code__
    kind: Any = type(function)
    real = kind(stock, function.__globals__, function.__name__)

    def ask() -> None:
        if not guarded(_asks)(cuda, sys._getframe(2)):
            real()
            return
        try:
            real()
        except BaseException as error:
            guarded(_write)("g", _clock(), f"{type(error).__name__}: {str(error)[:200]}")
            raise
        guarded(_write)("g", _clock(), "initialised")
        function.__code__ = stock
        guarded(_device)("torch.cuda._lazy_init")

    # What the new code calls is one of its constants: the module's names stay as they are.
    blank = compile("def _lazy_init():\n    ask = 12345678\n    return ask()\n", __file__, "exec").co_consts[0]
    code = blank.replace(co_consts=tuple(ask if constant == 12345678 else constant for constant in blank.co_consts))
    _Lazy.function, _Lazy.code = function, code
    function.__code__ = code


def _asks(cuda: Any, frame: FrameType | None) -> bool:
    """Write down who asks for a GPU that isn't initialised, once for each place."""
    if cuda.is_initialized() or hasattr(getattr(cuda, "_tls", None), "is_initializing") or len(_State.asked) > 20:
        return False
    place = _caller(frame)
    key = place and (place.f_code.co_filename, place.f_lineno)
    if key in _State.asked:
        return False
    _State.asked.add(key)
    _write("G", _clock(), "torch.cuda._lazy_init", _chain(frame))
    return True


# What children and the loader are told


def _first(note: Any, stock: Any) -> Any:
    """stock, and before it note(frame of the caller, *arguments)."""

    def call(*args: Any, **options: Any) -> Any:
        guarded(note)(sys._getframe(1), *args)
        return stock(*args, **options)

    return call


def _then(note: Any, stock: Any) -> Any:
    """stock, and after it note(its result, *arguments)."""

    def call(*args: Any, **options: Any) -> Any:
        result = stock(*args, **options)
        guarded(note)(result, *args)
        return result

    return call


def _change(frame: FrameType, name: Any, *values: Any) -> None:
    key, value = os.fsencode(name), os.fsencode(values[0]) if values else None
    if key in _State.variables and _State.variables[key] != value:
        old, _State.variables[key] = _State.variables[key], value
        shown = ["" if v is None else f"={os.fsdecode(v)}" for v in (old, value)]
        _write("V", _clock(), os.fsdecode(key), *shown, _chain(frame))


def _flags(frame: FrameType, value: int) -> None:
    if value != sys.getdlopenflags():
        _write("F", _clock(), sys.getdlopenflags(), value, _chain(frame))


def _opening(frame: FrameType, name: Any, *mode: int) -> None:
    if name and mode and mode[0] & os.RTLD_GLOBAL and os.fsdecode(name) not in _State.opened:
        _State.opened.add(os.fsdecode(name))
        _write("L", _clock(), os.fsdecode(name), _chain(frame))


def _spawned(pid: int, path: Any, words: Any, environ: Any) -> None:
    """os.posix_spawn, which subprocess uses from 3.13 on; environ is a mapping, or None for this process's own."""
    _started(pid, words, None if environ is None else [os.fsencode(name) + b"=" for name in environ])


def _started(pid: int, words: Any, environ: Any) -> None:
    traced = environ is None or any(bytes(entry).startswith(b"_ROCM_FIXES_TRACE=") for entry in environ)
    shown = [os.fsdecode(word)[:60] for word in list(words)[:4]]
    _write("S", _clock(), pid, int(traced), "\x1f".join(shown))


def _watch_ctypes() -> None:
    module: Any = sys.modules["_ctypes"]
    module.dlopen = _first(_opening, module.dlopen)


def _watch_subprocess() -> None:
    module: Any = sys.modules["_posixsubprocess"]
    module.fork_exec = _then(lambda pid, *args: _started(pid, args[0], args[5]), module.fork_exec)


_AFTER = {  # once, after the first import of these
    "torch.cuda": guarded(_watch_cuda),
    "_ctypes": guarded(_watch_ctypes),
    "_posixsubprocess": guarded(_watch_subprocess),
}


# The process


def _forked() -> None:
    _State.asked = set()
    _begin("fork")
    if _Lazy.function is not None:
        _Lazy.function.__code__ = _Lazy.code


def _ended() -> None:
    _device("all else")
    _write("X", _clock(), _State.spent)
