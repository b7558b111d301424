"""What SECURITY.md promises: no shell, no network, nothing started but what was asked for, nothing read from others."""

import ast
import json
import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from shelves import CHILD, environment, run, shelf

import vllm_rocm_fixes
from vllm_rocm_fixes import behaviour, patches, trial
from vllm_rocm_fixes.cli import verify
from vllm_rocm_fixes.patches import platform_import

pytestmark = pytest.mark.unit
ENGINE = Path(vllm_rocm_fixes.__file__).parent
# What runs beside a user's vLLM; standin/ holds the packages that a stand-in node is made of.
SOURCES = [p for p in ENGINE.rglob("*.py") if "standin" not in p.parts]
SOURCES += [p for place in patches.__path__ for p in Path(place).glob("*.py") if p not in SOURCES]
NETWORK = {"socket", "ssl", "http", "urllib", "ftplib", "smtplib", "xmlrpc", "asyncio", "socketserver", "requests"}
SHELLS = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "pty.spawn"}
CODE = {"pickle.loads", "pickle.load", "shelve.open", "eval"}
# The host's name is all that is asked of it; eval's argument is a constant.
KNOWN = {("locks.py", "socket"), ("live.py", "eval")}


def parsed():
    assert len(SOURCES) > 40
    return {path: ast.parse(path.read_bytes()) for path in SOURCES}


def test_no_shell_and_no_network():
    found = set()
    for path, tree in parsed().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
                found |= {(path.name, n) for n in names if n.split(".")[0] in NETWORK and not getattr(node, "level", 0)}
            elif isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                found |= {(path.name, name)} if name in SHELLS | CODE else set()
                shells = [k for k in node.keywords if k.arg == "shell" and ast.unparse(k.value) != "False"]
                assert not shells, (path, node.lineno)
    assert found == KNOWN
    asked = [n for n in ast.walk(ast.parse((ENGINE / "locks.py").read_bytes())) if isinstance(n, ast.Attribute)]
    assert {ast.unparse(a) for a in asked if ast.unparse(a).startswith("socket.")} == {"socket.gethostname"}


def test_every_program_is_started_as_a_list():
    """No command is a string, which a shell or a search on PATH could take for something else."""
    starts = {
        "subprocess.Popen",
        "subprocess.run",
        "subprocess.call",
        "subprocess.check_output",
        "os.execvp",
        "os.execv",
    }
    for path, tree in parsed().items():
        for call in [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) in starts]:
            command = call.args[0]
            if isinstance(command, ast.List):
                assert ast.unparse(command.elts[0]) == "sys.executable", (path, call.lineno)
            else:
                assert isinstance(command, ast.Name) and command.id == "command", (path, call.lineno)


def test_no_program_text_is_started_that_keeps_the_working_directory_on_its_path():
    """python -c puts it first, and there another user may have left a json.py."""
    texts = [
        ast.unparse(words.elts[place + 1])
        for tree in parsed().values()
        for words in ast.walk(tree)
        if isinstance(words, ast.List)
        for place, word in enumerate(words.elts)
        if isinstance(word, ast.Constant) and word.value == "-c"
    ]
    assert len(texts) == 4 and all(text.startswith("NOT_FROM_HERE + ") for text in texts), texts


CHILDREN = {
    "trial": lambda: trial.trial("colorsys", "another place") is not None,
    "verify": lambda: verify._json_of("import json; print(json.dumps({}))", os.environ, 60) == {},
    "behaviour": lambda: behaviour._stock_fails(["no_such_module"]) == ["no_such_module"],
    "platform_import": lambda: "amdsmi" in platform_import.behaves(),
}


@pytest.mark.parametrize("child", CHILDREN)
def test_a_child_imports_nothing_from_the_working_directory(tmp_path, monkeypatch, child):
    told = tmp_path / "told"
    (tmp_path / "here").mkdir()
    for name in ("amdsmi", "ctypes", "json", "resource", "signal", "torch", "vllm"):
        (tmp_path / "here" / f"{name}.py").write_text(f"open({str(told)!r}, 'a').write({name!r} + ' ')\n")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "vllm.py").write_text("")  # as good as no vLLM: a real one takes its time
    path = filter(None, (str(tmp_path / "there"), os.environ.get("PYTHONPATH")))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.setattr(platform_import.importlib.util, "find_spec", lambda name: name)
    done = CHILDREN[child]()
    assert not told.exists(), told.read_text()
    assert done


WATCH = textwrap.dedent("""\
    import os, sys
    events = []
    def hook(name, arguments):
        if name.startswith("socket.") and name != "socket.gethostname":
            events.append([name, ""])
        elif name in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "pty.spawn"):
            events.append([name, [str(a) for a in arguments[1]] if len(arguments) > 1 and arguments[1] else []])
        elif name == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            events.append([name, str(arguments[0])])
        elif name.startswith(("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.ch", "os.link", "os.symlink")):
            events.append([name, str(arguments[0])])
    sys.addaudithook(hook)
    """)


@pytest.fixture
def place(tmp_path, monkeypatch):
    made = shelf(tmp_path / "shelf")
    for name in ("XDG_RUNTIME_DIR", "XDG_CACHE_HOME"):
        (tmp_path / name).mkdir(mode=0o700)
        monkeypatch.setenv(name, str(tmp_path / name))
    return made


def test_a_start_opens_no_socket_and_writes_only_its_record_and_its_cache(place, tmp_path):
    code = "\n".join([WATCH, "start(); mended()", "print(json.dumps([mended(), events]))"])
    mended, events = run(code, environment(place, PYTHONDONTWRITEBYTECODE="1"))
    assert mended
    kinds = {name for name, _ in events}
    assert kinds <= {"open", "os.mkdir", "os.rename", "os.remove"}, kinds
    # Names without a folder are relative to the opened folder of the records.
    strange = [what for _, what in events if what.startswith("/") and not what.startswith(str(tmp_path / "XDG_"))]
    assert not strange
    # Only the probe for a package starts a process: this Python, once for a package that is there.
    code = "\n".join([WATCH, "print(json.dumps([facts() if start() is None else None, events]))"])
    _, events = run(code, environment(place, PYTHONDONTWRITEBYTECODE="1"))
    started = [what for name, what in events if name == "subprocess.Popen"]
    assert [command[0] for command in started] == [sys.executable] * 2
    assert not [e for e in events if e[0].startswith(("socket.", "os.system", "pty."))]


def test_what_a_start_keeps_is_this_users_alone(place, tmp_path):
    run("start(); mended()\nprint(1)", environment(place), before=("sh", "-c", 'umask 0; exec "$@"', "sh"))
    kept = [p for p in tmp_path.glob("XDG_*/**/*") if p.name != "vllm-rocm-fixes" or p.parent.name == "XDG_RUNTIME_DIR"]
    assert any(p.parent.name == "mended" for p in kept) and any(p.suffix == ".json" for p in kept)
    for path in kept:
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


POISON = """
import marshal, hashlib
from pathlib import Path
for entry in Path(os.environ["XDG_CACHE_HOME"]).rglob("mended/*"):
    data = entry.read_bytes()
    value = marshal.loads(data[64:])
    if not isinstance(value, tuple):
        continue  # what was seen of files, and not code
    outcomes, code, decorated, added = value
    payload = marshal.dumps((outcomes, compile("raise SystemExit('poisoned')", "x", "exec"), decorated, added))
    entry.write_bytes(data[:32] + hashlib.sha256(payload).digest() + payload)
print(1)
"""


@pytest.mark.parametrize("how", ["theirs", "folder theirs", "folder open", "open"])
def test_an_entry_that_another_user_could_have_written_is_not_run(place, tmp_path, how):
    """The entry is well-formed and of the right key, and would end the process."""
    theirs = how in ("theirs", "folder theirs")
    if theirs and os.geteuid() != 0:
        pytest.skip("giving a file to another user takes root, as CI runs")
    environ = environment(place)
    run("start(); mended()\nprint(1)", environ)
    run(POISON, environ)
    code = CHILD + "start(); mended()\n"
    done = subprocess.run([sys.executable, "-c", code], env=environ, cwd="/", capture_output=True, text=True)
    assert "poisoned" in done.stderr, "the poison works where this user alone could have put it"
    folder = tmp_path / "XDG_CACHE_HOME" / "vllm-rocm-fixes" / "mended"
    [entry] = [p for p in folder.iterdir() if b"poisoned" in p.read_bytes()]
    if theirs:
        os.chown(folder if "folder" in how else entry, 65534, 65534)
    else:
        (folder if "folder" in how else entry).chmod(0o777)
    assert run("start()\nprint(json.dumps(facts()))", environ)["mended"]


@pytest.mark.parametrize("command", ["trace", "verify"])
def test_a_command_starts_only_what_it_was_told_to(place, tmp_path, command):
    """trace: the command as it was given, by its words. verify: this Python, with code of the package."""
    wanted = [sys.executable, "-c", "print('; rm -rf $HOME `x`')"]
    arguments = {
        "trace": ["--output", str(tmp_path / "out"), "--", *wanted],
        "verify": ["--packages", "pip", "--limit", "20"],
    }
    code = WATCH + textwrap.dedent(f"""
        from vllm_rocm_fixes.cli import main
        try:
            main({[command, *arguments[command]]!r})
        except SystemExit:
            pass
        import json
        with open({str(tmp_path / "events")!r}, "w") as file:
            json.dump(events, file)
        """)
    subprocess.run([sys.executable, "-c", code], env=environment(place), cwd=tmp_path, timeout=120, capture_output=True)
    events = json.loads((tmp_path / "events").read_text())
    started = [what for name, what in events if name == "subprocess.Popen"]
    assert {name for name, _ in events if name.startswith(("socket.", "os.system", "os.exec", "pty."))} == set()
    if command == "trace":
        assert started == [wanted]
    else:
        assert started and {words[0] for words in started} == {sys.executable}
        modules = {words[2] for words in started if words[1] == "-m"}
        assert modules <= {"rocm_standin.start", "vllm_rocm_fixes.behaviour"}, modules
