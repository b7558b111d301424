"""`vllm-rocm-fixes ps`, and the records that each process writes: real processes, real sources of vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from releases import tree

from vllm_rocm_fixes import records
from vllm_rocm_fixes.cli import ps as cli_ps

pytestmark = pytest.mark.unit

# A process that vLLM's plugin loader has reached, without the seconds that vLLM itself takes to import.
_REGISTER = """
import os, sys, types
tree, action = sys.argv[1:3]
vllm = sys.modules["vllm"] = types.ModuleType("vllm")
vllm.__path__ = [tree + "/vllm"]
import vllm_rocm_fixes
vllm_rocm_fixes.register()
def told(what="ready"):
    os.write(1, f"{what} {os.getpid()}\\n".encode())
def idle():
    sys.stdin.read()
"""
_ALONE = _REGISTER + "told(); idle()"
_FORK = (
    _REGISTER
    + """
child = os.fork()
if child == 0:
    if action == "applies":
        process = vllm_rocm_fixes.current()
        name, result = next((n, r) for n, r in process.results.items() if r.state == "waiting")
        process._put(result._replace(state="applied"))
    told("child")
    idle()
    os._exit(0)
told()
idle()
"""
)
_SPAWN = """
import subprocess, sys, os
env = dict(os.environ)
one = subprocess.Popen([sys.executable, "-c", sys.argv[3], sys.argv[1], "-"], env=env)
two = subprocess.Popen([sys.executable, "-c", sys.argv[3], sys.argv[1], "-"], env=env | {"ROCM_FIXES_SKIP": "sampler"})
""" + _ALONE.replace("told(); ", "told('parent'); ")


@pytest.fixture
def home(tmp_path):
    """An environment whose records lie in a folder of the test."""
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("ROCM_FIXES", "VLLM_"))}
    return env | {"XDG_RUNTIME_DIR": str(runtime), "HOME": str(tmp_path)}


@contextmanager
def running(code, env, *arguments, lines=1, root=None):
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(root or tree("0.23.0")), *arguments],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield [process.stdout.readline().split() for _ in range(lines)]
    finally:
        process.stdin.close()
        process.wait(20)
        process.stdout.close()


def ps(env):
    done = subprocess.run(
        [sys.executable, "-m", "vllm_rocm_fixes", "ps", "--json"], env=env, capture_output=True, text=True, check=False
    )
    assert not done.stderr
    services = json.loads(done.stdout)["services"]
    return done.returncode, {p["pid"]: p for service in services for p in service["processes"]}


def folder(env):
    return os.path.join(env["XDG_RUNTIME_DIR"], "vllm-rocm-fixes")


def test_a_process_is_shown_while_it_runs(home):
    with running(_ALONE, home, "-") as [(_, pid)]:
        shown = ps(home)[1][int(pid)]
        assert shown["patches"]["sampler"]["state"] == "waiting"
        assert shown["patches"]["sampler"]["reason"]
        assert shown["overlay"] and shown["milliseconds"] > 0 and shown["guards"]
        text = subprocess.run(
            [sys.executable, "-m", "vllm_rocm_fixes", "ps"], env=home, capture_output=True, text=True, check=False
        ).stdout
        assert "vLLM 0.23.0 in" in text and pid in text
        assert os.stat(folder(home)).st_mode & 0o777 == 0o700
        assert [os.stat(os.path.join(folder(home), f)).st_mode & 0o777 for f in os.listdir(folder(home))] == [0o600]
    assert int(pid) not in ps(home)[1]
    assert os.listdir(folder(home)) == []


def test_a_fork_has_what_its_parent_has(home):
    with running(_FORK, home, "-", lines=2) as told:
        pids = {what: int(pid) for what, pid in told}
        shown = ps(home)[1]
        assert shown[pids["child"]]["forked"] and not shown[pids["ready"]]["forked"]
        assert shown[pids["child"]]["patches"] == shown[pids["ready"]]["patches"]
        assert len(os.listdir(folder(home))) == 1


def test_a_fork_writes_a_record_when_something_changes(home):
    with running(_FORK, home, "applies", lines=2) as told:
        pids = {what: int(pid) for what, pid in told}
        shown = ps(home)[1]
        assert not shown[pids["child"]]["forked"]
        states = [{p["state"] for p in shown[pids[what]]["patches"].values()} for what in ("child", "ready")]
        assert "applied" in states[0] and "applied" not in states[1]
        assert shown[pids["child"]]["marks"] == []  # applied, and applied when imported: no difference that matters


def test_the_one_that_differs_is_marked(home):
    with running(_SPAWN, home, "-", _ALONE, lines=3) as told:
        status, shown = ps(home)
        marked = {pid: shown[int(pid)]["marks"] for _, pid in told if shown[int(pid)]["marks"]}
        assert len(marked) == 1
        [(pid, marks)] = marked.items()
        assert marks == ["differs: patch sampler is skipped, and applied in 2 others"]
        assert shown[int(pid)]["patches"]["sampler"]["state"] == "skipped"
        assert status == 1


@pytest.mark.parametrize(
    ("switch", "mark"),
    [
        ({"ROCM_FIXES": "off"}, "not mended here: ROCM_FIXES=off switches vllm-rocm-fixes off"),
        ({"VLLM_PLUGINS": "a,b"}, "not mended here: VLLM_PLUGINS=a,b keeps vllm-rocm-fixes out"),
        ({"VLLM_PLUGINS": "a,rocm_fixes"}, None),  # it may still be starting
    ],
)
def test_a_vllm_without_the_overlay_is_shown(home, switch, mark):
    """A process that calls itself as vLLM's do, and has no record."""
    code = "import sys; print('ready', flush=True); sys.stdin.read()"
    words = ["VLLM::EngineCore", "-c", code]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen(words, executable=sys.executable, env=home | switch, **pipes)
    try:
        process.stdout.readline()
        shown = ps(home)[1][process.pid]
        assert shown["role"] == "EngineCore" and shown["overlay"] is None
        assert shown["marks"] == ([mark] if mark else [])
        command = [sys.executable, "-m", "vllm_rocm_fixes", "ps"]
        text = subprocess.run(command, env=home, capture_output=True, text=True, check=False).stdout
        [group] = [group for group in text.split("\n\n") if f" {process.pid} " in group]
        assert group.startswith("vLLM, and no process here has a record of vllm-rocm-fixes\n")
        old = cli_ps.Shown(process.pid, 1, 0, "EngineCore", None, seconds=600)
        assert mark or cli_ps._kept_out(old) == "the overlay isn't installed for its Python, or no plugin is loaded yet"
    finally:
        process.communicate()


def test_a_script_without_a_record_is_not_listed_and_help_says_so(home):
    code = "import sys; print('ready', flush=True); sys.stdin.read()"
    words, pipes = [sys.executable, "-c", code], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen(words, env=home | {"ROCM_FIXES": "off"}, **pipes)
    try:
        process.stdout.readline()
        assert process.pid not in ps(home)[1]
    finally:
        process.communicate()
    command = [sys.executable, "-m", "vllm_rocm_fixes", "ps", "--help"]
    told = subprocess.run(command, env=home, capture_output=True, text=True, check=True).stdout
    assert "Not listed is a Python script that uses vLLM and has no record" in told


def test_ray_workers_go_below_the_service_of_the_same_vllm(home, tmp_path):
    """Ray starts a worker itself, titles it, and tells it its job; another vLLM's worker stays by itself."""
    code = "import os, ray, setproctitle; setproctitle.setproctitle('ray::RayWorkerWrapper.execute_method')\n" + _ALONE
    (tmp_path / "ray.py").touch()
    env = home | {"PYTHONPATH": str(tmp_path), "RAY_JOB_ID": "01000000"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    here, there = tmp_path / "here", tmp_path / "there"  # on a machine where others may run the same tree
    here.symlink_to(tree("0.23.0"))
    there.symlink_to(tree("0.22.1"))
    with running(_ALONE, home, "-", root=here) as [(_, driver)]:
        command = [sys.executable, "-c", code]
        workers = [subprocess.Popen([*command, str(root), "-"], env=env, **pipes) for root in (here, there)]
        try:
            pids = [int(worker.stdout.readline().split()[1]) for worker in workers]
            command = [sys.executable, "-m", "vllm_rocm_fixes", "ps", "--json"]
            done = subprocess.run(command, env=home, capture_output=True, text=True, check=False)
            services = [[p["pid"] for p in s["processes"]] for s in json.loads(done.stdout)["services"]]
            assert [service for service in services if int(driver) in service] == [[int(driver), pids[0]]]
            assert [pids[1]] in services
            assert ps(home)[1][pids[0]]["role"] == "Ray worker RayWorkerWrapper"
        finally:
            for worker in workers:
                worker.communicate()


def test_a_reused_process_id_is_not_taken_for_the_writer(home):
    with running(_ALONE, home, "-") as [(_, pid)]:
        [name] = os.listdir(folder(home))
        path = os.path.join(folder(home), name)
        data = records._get(os.open(folder(home), os.O_RDONLY), name)
        # As if this process had died, and its id had gone to the one that runs now.
        os.unlink(path)
        data["start"] -= 1
        stale = name.replace(f"-{data['start'] + 1}.", f"-{data['start']}.")
        assert stale != name
        with open(os.path.join(folder(home), stale), "w") as file:
            json.dump(data, file)
        assert int(pid) not in ps(home)[1]
        assert not os.path.exists(os.path.join(folder(home), stale))


def test_a_writer_sweeps_dead_records(home):
    for _ in range(3):
        with running(_ALONE, home, "-"):
            pass
    assert len(os.listdir(folder(home))) == 1


@pytest.mark.parametrize("what", ["link", "open", "file"])
def test_a_folder_that_others_can_write_is_neither_read_nor_written(home, tmp_path, what):
    place = folder(home)
    if what == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        os.symlink(tmp_path / "elsewhere", place)
    elif what == "open":
        os.mkdir(place)
        os.chmod(place, 0o770)
    else:
        open(place, "w").close()
    with running(_ALONE, home, "-") as [(_, pid)]:
        assert what == "file" or os.listdir(place) == []
        assert ps(home)[1][int(pid)]["overlay"]  # the next folder took it


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's folder")
def test_another_users_folder_is_neither_read_nor_written(home):
    with running(_ALONE, home, "-") as [(_, pid)]:
        os.chown(folder(home), 12345, 12345)
        assert int(pid) not in ps(home)[1]
        with running(_ALONE, home, "-") as [(_, other)]:
            assert other in ps(home)[1] or int(other) in ps(home)[1]
            assert len(os.listdir(folder(home))) == 1


@pytest.mark.parametrize("folders", [["/proc/nowhere"], ["/dev/null/below"], []])
def test_no_folder_costs_only_the_record(tmp_path, monkeypatch, folders):
    monkeypatch.setattr(records, "folders", lambda: [type(tmp_path)(f) for f in folders])
    from vllm_rocm_fixes.guards import GUARDS
    from vllm_rocm_fixes.process import Process

    assert records.write(Process([], GUARDS)) is None
    assert records.read() == ([], 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="a small file system is root's to mount")
def test_a_full_disk_costs_only_the_record(home, tmp_path):
    """In a mount namespace of its own, where every place for a record is full."""
    fill = " && ".join(
        f"mount -t tmpfs -o size=4k,mode=700 none {place} && head -c 8192 /dev/zero > {place}/full 2>/dev/null; true"
        for place in (home["XDG_RUNTIME_DIR"], "/dev/shm", "/run", tmp_path)
        if os.path.isdir(place)
    )
    code = _REGISTER + "print('registered', vllm_rocm_fixes.current().results['sampler'].state)\n"
    code += "import vllm_rocm_fixes.records as r\nprint(r.write(vllm_rocm_fixes.current()))"
    env = home | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", fill + '; exec "$@"', "sh", sys.executable, "-c", code, str(tree("0.23.0")), "-"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "registered waiting\nNone\n", done.stderr


def test_a_record_takes_less_than_a_start_notices(home, tmp_path, monkeypatch):
    """Not a benchmark: writing must not have become something else than one small file."""
    from vllm_rocm_fixes.guards import GUARDS
    from vllm_rocm_fixes.process import Process

    monkeypatch.setenv("XDG_RUNTIME_DIR", home["XDG_RUNTIME_DIR"])
    process = Process([], GUARDS)
    begun = time.perf_counter()
    for _ in range(20):
        assert records.write(process)
    assert time.perf_counter() - begun < 2
    assert len(os.listdir(folder(home))) == 1
