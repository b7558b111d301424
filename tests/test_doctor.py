"""`vllm-rocm-fixes doctor`: what is wrong on a node, on real files, real processes and real libraries."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
import wheels
from releases import tree

from vllm_rocm_fixes import node
from vllm_rocm_fixes.patches import SERIES
from vllm_rocm_fixes.records import birth

pytestmark = pytest.mark.unit


@pytest.fixture
def place(tmp_path):
    """A stand-in node of an image: builds one, and returns the environment of a shell on it."""

    def build(version="0.23.0", tvm_ffi="0.1.10", aiter="0.1.13", packages=node.IMAGE, **extra):
        built = node.build(tmp_path / "node", version=version, vllm=tree(version), packages=packages, aiter=aiter)
        node._distribution(tmp_path / "node", "apache-tvm-ffi", tvm_ffi)
        base = {k: v for k, v in os.environ.items() if not k.startswith(("ROCM_FIXES", "VLLM_", "AITER_", "PYTHON"))}
        (tmp_path / "home").mkdir(exist_ok=True)
        env = built.environment(base | {"HOME": str(tmp_path / "home")})
        return env | extra

    return build


def doctor(env, *arguments):
    command = [sys.executable, "-m", "vllm_rocm_fixes", "doctor", "--json", *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert not done.stderr
    return done.returncode, json.loads(done.stdout)


def found(env, *arguments):
    """The findings that are no notes, one text for each, and the notes."""
    status, shown = doctor(env, *arguments)
    findings = [f"{f['what']} -> {f['do']}" for f in shown["findings"] if not f["note"]]
    assert status == bool(findings)
    return findings, [f["what"] for f in shown["findings"] if f["note"]]


def test_no_finding_no_noise(place):
    env = place()
    command = [sys.executable, "-m", "vllm_rocm_fixes", "doctor"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and not done.stderr
    assert [line.split()[:2] for line in lines[:6]] == [
        ["vLLM", "0.23.0"],
        ["torch", __import__("importlib.metadata").metadata.version("torch")],
        ["AITER", "0.1.13"],
        ["TileLang", "0.1.10"],
        ["tvm-ffi", "0.1.10"],
        ["Mori", "1.1.0"],
    ]
    assert lines[-1] == "Nothing found."


def test_nothing_is_imported(place):
    built_log = place()
    doctor(built_log)
    assert not os.path.exists(built_log["ROCM_STANDIN_LOG"])


@pytest.mark.parametrize(
    ("settings", "finding"),
    [
        ({"tvm_ffi": "0.1.12"}, "aborts the process"),
        ({"version": "0.27.0", "aiter": "0.1.13"}, "lacks the fused qk-rmsnorm kernel"),
        ({"version": "0.23.0", "VLLM_PLUGINS": "other"}, "keeps vllm-rocm-fixes out -> add rocm_fixes to it"),
        ({"VLLM_PLUGINS": ""}, "VLLM_PLUGINS= keeps vllm-rocm-fixes out"),
        ({"ROCM_FIXES": "off"}, "ROCM_FIXES=off switches vllm-rocm-fixes off -> unset it"),
        ({"ROCM_FIXES_SKIP": ",".join(patch.name for patch in SERIES)}, "ROCM_FIXES_SKIP names every patch"),
        ({"version": "0.23.0", "ROCM_FIXES_SKIP": "samplr"}, "did you mean sampler?"),
        ({"ROCM_FIXES_SKP": "sampler"}, "did you mean ROCM_FIXES_SKIP?"),
        ({"VLLM_ROCM_USE_AITR": "1"}, "did you mean VLLM_ROCM_USE_AITER?"),
        ({"VLLM_ROCM_USE_AITER_SAMPLER": "0"}, "set ROCM_FIXES_AITER_SAMPLER=0"),
        ({"VLLM_ROCM_USE_AITER": "0", "VLLM_ROCM_USE_AITER_MOE": "1"}, "VLLM_ROCM_USE_AITER_MOE without"),
        ({"HIP_VISIBLE_DEVICE": "0"}, "did you mean HIP_VISIBLE_DEVICES?"),
        ({"AITER_JITDIR": "/x"}, "did you mean AITER_JIT_DIR?"),
        ({"AITER_REBUILD": "1"}, "empties its build folder"),
        ({"AITER_JIT_DIR": "/dev/null/below"}, "isn't a folder -> set AITER_JIT_DIR"),
        ({"AITER_ROOT_DIR": "/proc/below"}, "-> set AITER_ROOT_DIR"),
    ],
)
def test_each_finding_comes_alone_and_says_what_to_do(place, settings, finding):
    findings, _ = found(place(**settings))
    assert len(findings) == 1, findings
    assert finding in findings[0]


def test_what_is_right_is_no_finding(place):
    env = place("0.27.0", aiter="0.1.19", VLLM_ROCM_USE_AITER_MOE="0", HIP_VISIBLE_DEVICES="0", ROCM_FIXES_SKIP="hip")
    assert found(env | {"AITER_CONFIG_FMOE": "/x", "AITER_JIT_DIR": env["HOME"] + "/jit"}) == ([], [])


def test_an_aiter_older_than_the_image_is_a_note(place):
    findings, notes = found(place("0.27.0", aiter="0.1.16"))
    assert findings == [] and notes == ["AITER 0.1.16 is older than the 0.1.19 in vLLM 0.27.0's own image"]


def test_the_stub_without_a_guard_is_found_on_rocm_alone(tmp_path):
    """An unpacked image, named with --vllm: its ROCm torch, TileLang with the stub, and a plug-in that is kept out."""
    image = tmp_path / "site-packages"
    image.mkdir()
    (image / "vllm").symlink_to(tree("0.24.0") / "vllm")
    for name, version in {"torch": "2.11.0+rocm7.2", "tilelang": "0.1.10", "apache-tvm-ffi": "0.1.10"}.items():
        node._distribution(image, name, version)
    env = {**os.environ, "ROCM_FIXES": "off"}
    findings, _ = found(env, "--vllm", str(image))
    assert [f for f in findings if "#51151" in f] and "guard hip is off: ROCM_FIXES=off" in " ".join(findings)
    assert doctor(env, "--vllm", str(image))[1]["versions"]["torch"] == "2.11.0+rocm7.2"
    assert not [f for f in found({**os.environ}, "--vllm", str(image))[0] if "#51151" in f]


# PYTHONPATH


def test_what_pollutes_pythonpath(place, tmp_path):
    env = place()
    tvm = wheels.tilelang("0.1.10") / "tilelang" / "3rdparty" / "tvm" / "python"
    assert (tvm / "tvm" / "__init__.py").is_file()
    other = tmp_path / "other"
    shutil.copytree(tree("0.22.1") / "vllm", other / "vllm", ignore=lambda d, n: [x for x in n if x != "__init__.py"])
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    for entry, finding in {
        str(tvm): "TileLang's own TVM",
        "": "an empty entry",
        str(other): "beside",
        str(open_to_all): "any user can put code",
    }.items():
        findings, _ = found(env | {"PYTHONPATH": env["PYTHONPATH"] + os.pathsep + entry})
        assert len(findings) == 1 and finding in findings[0], (entry, findings)
    assert "isn't there" in found(env | {"PYTHONPATH": env["PYTHONPATH"] + ":/nowhere"})[1][0]


# AITER's locks

_HOLD = """
import os, sys
fd = os.open(sys.argv[1], os.O_CREAT | os.O_EXCL | os.O_RDWR)
os.write(fd, sys.argv[2].encode())
print(os.getpid(), flush=True)
sys.stdin.read()
"""


@contextmanager
def builder(path, words=""):
    """A process that holds a lock as AITER's builders do, by keeping it open."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(path), words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield int(process.stdout.readline())
    finally:
        process.communicate()


@pytest.fixture
def build_folder(place):
    env = place()
    folder = os.path.join(env["HOME"], "jit", "build")
    os.makedirs(folder)
    return env | {"AITER_JIT_DIR": os.path.dirname(folder)}, os.path.join(folder, "lock_module_aiter_enum")


def _age(path, seconds):
    os.utime(path, (time.time() - seconds, time.time() - seconds))


def test_a_lock_is_stale_when_its_builder_was_killed(build_folder):
    env, path = build_folder
    with builder(path) as pid:
        _age(path, 7300)
        findings, _ = found(env)
        assert f"is held by process {pid}" in findings[0] and "2 hours" in findings[0]
        _age(path, 300)
        findings, notes = found(env)
        assert findings == [] and f"is held by process {pid}" in notes[0]
        os.kill(pid, 9)
    findings, _ = found(env)
    assert f"{path} is 5 minutes old and nobody here holds it" in findings[0] and f"-> rm {path}" in findings[0]
    _age(path, 1)
    assert found(env) == ([], [])  # its builder may not have written into it yet


def test_who_holds_a_lock_by_what_stands_in_it(build_folder):
    env, path = build_folder
    host, space = os.uname().nodename, os.readlink("/proc/self/ns/pid")
    start = birth(os.getpid())[0]
    for words, expected in {
        f"{os.getpid()}\n{host}\n{space}\n{start}\nflock\n": ([], f"held by process {os.getpid()}"),
        f"{os.getpid()}\n{host}\n{space}\n{start - 1}\nflock\n": (["nobody here holds it"], ""),
        f"4194303\n{host}\n": (["nobody here holds it"], ""),
        f"17\nanother-host\n{space}\n1\n": ([], "process 17 of host another-host"),
        f"17\n{host}\npid:[1]\n1\n": ([], "process 17 of another container"),
    }.items():
        with open(path, "w") as file:
            file.write(words)
        _age(path, 100)
        findings, notes = found(env)
        assert [bool(f) for f in findings] == [bool(f) for f in expected[0]], words
        assert all(e in f for e, f in zip(expected[0], findings, strict=True))
        assert expected[1] in " ".join(notes)


# A running process

_LOAD = """
import ctypes, sys
for argument in sys.argv[1:]:
    path, _, how = argument.partition("=")
    ctypes.CDLL(path, {"global": ctypes.RTLD_GLOBAL, "local": ctypes.RTLD_LOCAL}[how])
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """Two HIP runtimes, built here, and the real stub of TileLang 0.1.10."""
    folder = tmp_path_factory.mktemp("hip")
    paths = {"stub": wheels.tilelang("0.1.10") / "tilelang" / "lib" / "libhip_stub.so"}
    assert paths["stub"].is_file()
    for name in ("torch", "rocm"):
        (folder / name).mkdir()
        paths[name] = folder / name / "libamdhip64.so.7"
        code = f"int hipGetDeviceCount(int *n) {{ *n = {len(name)}; return 0; }}\n"
        command = ["gcc", "-x", "c", "-", "-shared", "-fPIC", "-o", str(paths[name]), f"-Wl,-soname,{name}.so.7"]
        subprocess.run(command, input=code, text=True, check=True)
    return paths


@pytest.mark.parametrize(
    ("loads", "first", "finding"),
    [
        ("torch=local", None, None),
        ("torch=local stub=global", "stub", "answers before the HIP runtime"),
        ("torch=local stub=global torch=global", "stub", "answers before the HIP runtime"),
        ("torch=local torch=global stub=global", "torch", None),
        ("torch=local rocm=local", None, "2 HIP runtimes"),
    ],
)
def test_who_comes_first_in_a_running_process(place, libraries, loads, first, finding):
    """The table of who answers: the order of loading isn't the order in the global scope."""
    arguments = [f"{libraries[name]}={how}" for name, how in (load.split("=") for load in loads.split())]
    env = place()
    process = subprocess.Popen(
        [sys.executable, "-c", _LOAD, *arguments], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout.readline() == b"ready\n"
        findings, _ = found(env, "--pid", str(process.pid))
        shown = doctor(env, "--pid", str(process.pid))[1]["process"]
    finally:
        process.communicate()
    names = {name for name in (load.split("=")[0] for load in loads.split())}
    assert set(shown["runtimes"]) == {str(libraries[name]) for name in names - {"stub"}}
    assert shown["stubs"] == [str(libraries["stub"])] * ("stub" in names)
    assert shown["first"] == (str(libraries[first]) if first else None)
    assert [finding in f for f in findings] == ([True] if finding else [])


def test_the_environment_of_a_running_process(place):
    env = place()
    code = "print(flush=True); import sys; sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=env | {"ROCM_FIXES_SKP": "1"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        process.stdout.readline()
        assert "ROCM_FIXES_SKP" in found(env, "--pid", str(process.pid))[0][0]
        assert found(env) == ([], [])
    finally:
        process.communicate()


def test_a_process_that_is_not_there(place):
    command = [sys.executable, "-m", "vllm_rocm_fixes", "doctor", "--pid", "4194303"]
    done = subprocess.run(command, env=place(), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "vllm-rocm-fixes: no process 4194303 runs here\n"
