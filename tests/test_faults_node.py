"""A node that is short of something: a start goes on as stock's does, and is mended.

On a shelf of real stock files, started with stock's side (no plugin is loaded) beside ours.
"""

import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
from shelves import CHILD, environment, overlay, run, shelf

from vllm_rocm_fixes import __version__

pytestmark = pytest.mark.unit
ROOT = os.geteuid() == 0
NOBODY = 65534
REPOSITORY = Path(__file__).parent.parent
START = "start()\nprint(json.dumps(facts()))\n"
STOCK = {"VLLM_PLUGINS": ""}


def standard_library():
    """Code that imports what the overlay and the shelf take from the standard library.

    The Python of these tests may lie in a folder that is closed to other users, as /root is.
    """
    names = {
        "email.parser",
        "email.policy",
        "importlib.metadata._adapters",
        "importlib.readers",
        "regex",
        "uuid",
        "resource",
    }
    for file in [*REPOSITORY.glob("vllm_rocm_fixes/**/*.py"), *REPOSITORY.glob("patches/*.py")]:
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Import):
                names |= {a.name for a in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module)
    names = sorted(n for n in names if n.split(".")[0] in {*sys.stdlib_module_names, "typing_extensions", "regex"})
    return f"for part in {names}:\n    try:\n        __import__(part)\n    except ImportError:\n        pass\n"


def mounts():
    """Whether this machine lets us mount: root in most containers, where unshare isn't forbidden."""
    if not ROOT or not shutil.which("unshare"):
        return False
    done = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True)
    return done.returncode == 0


def mounted(*commands):
    """What runs a command in a mount namespace of its own, in which these were run before."""
    if not mounts():
        pytest.skip("mounting takes root and a kernel that lets a container do it, as CI has")
    return ("unshare", "-m", "sh", "-c", "; ".join(["set -e", *commands, 'exec "$@"']), "sh")


@pytest.fixture
def place():
    folder = Path(tempfile.mkdtemp(prefix="node-"))  # any user may enter it, which pytest's own folders forbid
    folder.chmod(0o755)
    yield overlay(shelf(folder), __version__)
    shutil.rmtree(folder)


def both(place, code=START, options=(), before=(), **environ):
    """The facts of both sides; that of ours is checked: mended, and nothing of ours failed."""
    stock = run(code, environment(place, **environ, **STOCK), options=options, before=before)
    ours = run(code, environment(place, **environ), options=options, before=before)
    assert stock["answers"] == ours["answers"] == [True, False, False]
    assert not stock["mended"] and not stock["warnings"] and not stock["said"]
    assert ours["mended"] and len(ours["said"]) == 1
    unexpected = [line for line in ours["warnings"] if "broken_package" not in line]
    assert not unexpected, unexpected
    return stock, ours


@pytest.mark.parametrize(
    "options",
    [("-O",), ("-OO",), ("-B",), ("-s",), ("-X", "utf8=0"), ("-X", "importtime"), ("-W", "error")],
    ids=" ".join,
)
def test_options(place, options):
    both(place, options=options)


@pytest.mark.parametrize("name", ["PYTHONDONTWRITEBYTECODE", "PYTHONSAFEPATH", "PYTHONOPTIMIZE", "PYTHONNOUSERSITE"])
def test_variables(place, name):
    both(place, **{name: "1"})
    assert name != "PYTHONDONTWRITEBYTECODE" or not list(place.rglob("*.pyc"))


def test_isolated(place):
    """-I takes no path from the environment: the shelf stands where site-packages does, and -I goes to a trial too."""
    both(place, f"sys.path.insert(0, {str(place)!r})\n" + START, options=("-I",))


FROZEN = """
class Frozen(list):
    def _no(self, *a, **k):
        raise RuntimeError("sys.path is frozen")
    insert = append = extend = remove = pop = clear = sort = reverse = __setitem__ = __delitem__ = __iadd__ = _no
"""


@pytest.mark.parametrize("kind", ["Frozen", "tuple"])
def test_a_frozen_path(place, kind):
    """A list that refuses changes, or a tuple. TileLang's import, which the guards stand around, goes on."""
    code = textwrap.dedent(FROZEN) + f"sys.path = {kind}(sys.path)\nbefore = os.environ.get('PYTHONPATH')\n"
    code += "start()\nimport tilelang\nkept = os.environ.get('PYTHONPATH') == before\n"
    code += "print(json.dumps({**facts(), 'kept': kept, 'path': type(sys.path).__name__}))\n"
    stock, ours = both(place, code)
    assert (stock["kept"], ours["kept"]) == (False, True), "PYTHONPATH is put back"
    assert stock["path"] == ours["path"] == kind


def test_a_read_only_file_system(place, tmp_path):
    """Site-packages, caches and everything else: what can't be kept is made again at the next start."""
    home = tmp_path / "home"
    home.mkdir()
    # /dev/shm stays writable in most containers that are read-only; it goes too here.
    readonly = [f"mount --bind {p} {p}; mount -o remount,ro,bind {p}" for p in (place, home)]
    hidden = "mount -t tmpfs -o ro none /dev/shm"
    environ = {"HOME": str(home), "TMPDIR": str(home), "XDG_RUNTIME_DIR": str(home)}
    before = mounted(*readonly, hidden)
    refused = subprocess.run([*before, "touch", str(home / "x")], capture_output=True)
    assert refused.returncode, "the file system isn't read-only"
    # Without a place for temporary files no trial can be had, and stock's own probe answers.
    both(place, before=before, **environ)
    assert not list(home.iterdir())


def test_a_full_disk(place, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    fill = f"mount -t tmpfs -o size=16k none {disk}; dd if=/dev/zero of={disk}/full bs=4k 2>/dev/null || true"
    hidden = "mount -t tmpfs -o ro none /dev/shm"
    before = mounted(fill, hidden)
    full = subprocess.run([*before, "sh", "-c", f"echo x > {disk}/more"], capture_output=True)
    assert full.returncode, "the disk isn't full"
    environ = {"HOME": str(disk), "TMPDIR": str(disk), "XDG_RUNTIME_DIR": str(disk), "ROCM_FIXES_CACHE": str(disk)}
    both(place, before=before, **environ)


@pytest.mark.parametrize("home", [None, "", "/nonexistent", "/proc", "relative", "\udcff"], ids=repr)
def test_no_home_folder(place, home):
    code = (
        "for name in ('HOME', 'XDG_CACHE_HOME', 'XDG_RUNTIME_DIR', 'XDG_STATE_HOME'):\n    os.environ.pop(name, None)\n"
    )
    code += f"os.environ.update({{}} if {home!r} is None else {{'HOME': {home!r}}})\n"
    if ROOT:  # a user that has no entry in the password file, as containers have
        code += "os.setgroups([]); os.setgid(54321); os.setuid(54321)\n"
    both(place, standard_library() + code + START)


@pytest.mark.skipif(not ROOT, reason="becoming another user takes root, as CI runs")
def test_another_user(place, tmp_path):
    """nobody finds caches and records of root, and of somebody else, and uses none of them."""
    home = tmp_path / "home"
    home.mkdir()
    run(START, environment(place, HOME=str(home), XDG_RUNTIME_DIR=str(home)))
    entries = {p: p.read_bytes() for p in home.rglob("*") if p.is_file()}
    assert entries
    code = f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
    both(place, standard_library() + code + START, HOME=str(home), XDG_RUNTIME_DIR=str(home))
    assert {p: p.read_bytes() for p in home.rglob("*") if p.is_file()} == entries


def test_no_proc(place):
    before = mounted("mount -t tmpfs none /proc")
    gone = subprocess.run([*before, "ls", "/proc/self"], capture_output=True)
    assert gone.returncode, "/proc is there"
    both(place, before=before)


def test_no_new_process(place):
    """Where no child can be started, stock's own probe answers."""
    code = "import resource\nresource.setrlimit(resource.RLIMIT_NPROC, (0, 0))\n"
    if ROOT:
        code = standard_library() + f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n" + code
    both(place, code + START)


def test_few_open_files(place):
    code = (
        "import resource\nstart()\nresource.setrlimit(resource.RLIMIT_NOFILE, (12, 12))\nprint(json.dumps(facts()))\n"
    )
    both(place, code)


@pytest.mark.parametrize("stream", [0, 1, 2])
def test_a_closed_stream(place, tmp_path, stream):
    """A service manager may start a process without stdin, stdout or stderr."""
    out = tmp_path / "out.json"
    code = CHILD + f"start()\nwith open({str(out)!r}, 'w') as file:\n    json.dump(facts(), file)\n"
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {stream}{"<" if stream == 0 else ">"}&-', "sh", sys.executable, "-c", code],
        env=environment(place), cwd="/", timeout=60,
    )  # fmt: skip
    assert done.returncode == 0
    got = json.loads(out.read_text())
    assert got["mended"] and got["answers"] == [True, False, False]
