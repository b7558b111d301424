"""Guard hip with TileLang's real libraries and a HIP runtime that only says which one it is. No GPU, no ROCm.

Most of it loads TileLang's libraries as TileLang does, in 0.1 s a process. The last part imports the real TileLang
beside the real torch, and looks at the children of that process too.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
from wheels import TILELANG, tilelang

from vllm_rocm_fixes.guards import GUARDS
from vllm_rocm_fixes.guards import hip as module

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "hip"))
from build import build  # noqa: E402

VERSIONS = list(TILELANG)
WRONG_STRUCT = ("0.1.10", "0.1.12")  # the stub of 0.1.14 and later hands on the right one


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """The fake runtime and what is linked against it, in a folder with a space in its name."""
    return build(tmp_path_factory.mktemp("hip") / "a build")


def load(built, version, *steps, findable=True, **switches):
    """Take these steps in a fresh process; findable: whether the loader finds an unversioned libamdhip64.so by name."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ROCM_FIXES", "LD_", "PYTHONPATH"))}
    environment |= switches
    if findable:
        environment["LD_LIBRARY_PATH"] = str(built / ("torch" if findable is True else findable))
    child = subprocess.run(
        [sys.executable, HERE / "hip" / "load.py", built, tilelang(version), *steps],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    if child.returncode:
        return {"ended": child.returncode, "said": child.stderr}
    answer = json.loads(child.stdout)
    answer["owners"] = [
        "runtime" if "libamdhip64" in owner else "stub" if "stub" in owner else owner
        for owner in answer.get("owners", ())
    ]
    return answer


# Load orders, from the public report (AITER #4585) and beyond it. Where the extension ends up in stock and behind the
# guard: at the stub or at the runtime.
TABLE = {
    "no stub": ("extension ask:extension", "runtime", "runtime"),
    "stub, local": ("torch stub:local extension ask:extension", "runtime", "runtime"),
    "stub, global": ("torch stub:global extension ask:extension", "stub", "runtime"),
    "stub, then runtime, both global": ("torch stub:global runtime:global extension ask:extension", "stub", "runtime"),
    "runtime, then stub, both global": (
        "torch runtime:global stub:global extension ask:extension",
        "runtime",
        "runtime",
    ),
    "runtime local, stub global": ("torch runtime stub:global extension ask:extension", "stub", "runtime"),
    "torch, then TVM": ("torch tvm extension ask:extension", "stub", "runtime"),
    "torch global, then TVM": ("torch:global tvm extension ask:extension", "runtime", "runtime"),
    "TVM, then runtime global": ("torch tvm runtime:global extension ask:extension", "stub", "runtime"),
    "extension, then TVM": ("torch extension tvm ask:extension", "runtime", "runtime"),
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("order", TABLE)
def test_load_order(built, version, order):
    steps, stock, ours = TABLE[order]
    for guard, owner in ([], stock), (["--guard"], ours):
        answer = load(built, version, *guard, *steps.split())
        wrong = owner == "stub" and version in WRONG_STRUCT
        assert answer["owners"][:2] == [owner, owner]
        assert answer["owners"][2] == "runtime"  # not in the stub: an extension ends up half here, half there
        assert answer["layout"] == ("LEGACY" if wrong else "R0600")
        assert len(answer["runtimes"]) == 1
        assert answer["warnings"] == []


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "steps",
    ["torch tvm python", "torch extension_lazy tvm ask:extension_lazy", "torch tvm extension_lazy ask:extension_lazy"],
)
def test_python_extension_and_lazy_binding(built, version, steps):
    wrong = "LEGACY" if version in WRONG_STRUCT else "R0600"
    assert load(built, version, *steps.split())["layout"] == wrong
    assert load(built, version, "--guard", *steps.split())["layout"] == "R0600"


@pytest.mark.parametrize("version", VERSIONS)
def test_extension_that_needs_no_runtime_by_itself(built, version):
    steps = "torch", "tvm", "extension_free", "ask:extension_free"
    assert "undefined symbol: hipFuncSetAttribute" in load(built, version, *steps)["error"]
    assert load(built, version, "--guard", *steps)["owners"] == ["runtime"] * 3


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("steps", ["torch tvm extension ask:extension", "torch tvm python"])
def test_only_the_versioned_runtime_can_be_found(built, version, steps):
    stock = load(built, version, *steps.split(), findable=False)
    assert stock["ended"] == -signal.SIGABRT
    assert "HIP runtime library (libamdhip64.so) not found" in stock["said"]
    assert load(built, version, "--guard", *steps.split(), findable=False)["layout"] == "R0600"


@pytest.mark.parametrize("version", VERSIONS)
def test_stub_that_would_load_a_second_runtime(built, version):
    """A wheel's torch brings its own runtime, and the loader finds another one by name."""
    steps = "torch", "tvm", "extension", "ask:extension"
    stock = load(built, version, *steps, findable="other")
    assert (stock["mark"], len(stock["runtimes"])) == ("0xdd1", 2)
    ours = load(built, version, "--guard", *steps, findable="other")
    assert (ours["mark"], len(ours["runtimes"])) == ("0x7001", 1)


def test_nothing_happens_without_rocm_torch_or_runtime(built):
    cpu = load(built, "0.1.10", "--guard", "torch:cpu", "tvm", "extension", "ask:extension")
    assert cpu["owners"] == ["stub", "stub", "runtime"]
    assert (cpu["warnings"], cpu["state"]) == ([], "torch isn't a ROCm build, or not loaded: nothing to do")
    unmapped = load(built, "0.1.10", "--guard", "torch:alone", "tvm", "extension", "ask:extension")
    assert unmapped["owners"] == ["stub", "stub", "runtime"]
    assert (unmapped["warnings"], unmapped["state"]) == ([], "no HIP runtime is mapped: nothing to do")


@pytest.mark.parametrize("first", ["", ":global"])
def test_several_runtimes(built, first):
    """Only the one that torch's own libraries are bound to is put first; a wrong owner is told apart."""
    steps = "tvm", "extension", "ask:extension"
    known = load(built, "0.1.10", "--guard", "c10", f"other{first}", *steps)
    assert known["mark"] == ("0xdd1" if first else "0x7001")
    assert len(known["warnings"]) == (2 if first else 1)
    assert "2 HIP runtimes are mapped" in known["warnings"][0] and "torch uses" in known["warnings"][0]
    untold = load(built, "0.1.10", "--guard", "torch", f"other{first}", *steps)
    assert untold["mark"] == ("0xdd1" if first else "0x7001")
    assert len(untold["warnings"]) == 1 and "torch's can't be told" in untold["warnings"][0]
    meaning = "another HIP runtime than torch" if first else "invalid configuration argument"
    assert meaning in known["warnings"][-1] or not first
    assert meaning in untold["warnings"][0]


@pytest.mark.parametrize("change", ["delete", "replace"])
def test_runtime_whose_file_is_gone(built, tmp_path, change):
    """As after an upgrade under a running process: the mapped one is meant, whatever lies at its path now."""
    own = tmp_path / "copy"
    shutil.copytree(built, own, symlinks=True)
    answer = load(own, "0.1.10", "--guard", "torch", change, "tvm", "extension_free", "ask:extension_free")
    assert (answer["owners"], answer["mark"]) == (["runtime"] * 3, "0x7001")
    assert [path.endswith(" (deleted)") for path in answer["runtimes"]] == [True]


def test_no_maps(built):
    answer = load(built, "0.1.10", "--guard", "torch", "no-maps", "tvm", "extension", "ask:extension")
    assert answer["owners"] == ["stub", "stub", "runtime"]
    assert len(answer["warnings"]) == 1 and "the process's maps can't be read" in answer["warnings"][0]


@pytest.mark.parametrize("version", VERSIONS)
def test_too_late_is_said_once_with_what_still_helps(built, version):
    steps = "torch", "tvm", "late", "extension", "ask:extension"
    answer = load(built, version, "--guard", *steps[:1], "unguarded-tvm", *steps[2:])
    assert answer["owners"] == ["stub", "stub", "runtime"]
    (warning,) = answer["warnings"]
    assert "TVM was loaded before this guard" in warning and "\n" not in warning
    assert ("ROCM_FIXES_HEAL=1" in warning) == (version in WRONG_STRUCT)
    assert ("hands on the right struct" in warning) == (version not in WRONG_STRUCT)
    early = load(built, version, "torch:global", "unguarded-tvm", "late", "extension", "ask:extension")
    assert (early["owners"], early["warnings"]) == (["runtime"] * 3, [])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("steps", ["torch tvm extension late", "torch tvm late extension"])
def test_heal(built, version, steps):
    """Behind its switch, the repair reaches extensions that were bound before it and after it."""
    steps = *steps.split(), "ask:extension"
    wrong = version in WRONG_STRUCT
    off = load(built, version, *steps)
    assert off["layout"] == ("LEGACY" if wrong else "R0600")
    on = load(built, version, *steps, ROCM_FIXES_HEAL="1")
    assert (on["layout"], on["owners"]) == ("R0600", ["stub", "stub", "runtime"])
    assert len(on["warnings"]) == 1
    assert ("was repaired" in on["warnings"][0]) == wrong


def test_heal_leaves_alone_what_it_does_not_know(built):
    """No runtime for the stub: asking for its table would end the process. Another runtime in it: no slot matches."""
    steps = "torch", "tvm", "late"
    nothing = load(built, "0.1.10", *steps, findable=False, ROCM_FIXES_HEAL="1")
    assert "the stub finds no runtime" in nothing["warnings"][0]
    assert "set ROCM_FIXES_HEAL" not in nothing["warnings"][0]
    other = load(built, "0.1.10", *steps, "extension", "ask:extension", findable="other", ROCM_FIXES_HEAL="1")
    assert "0 slots of the stub's table look wrong" in other["warnings"][0]
    assert other["layout"] == "LEGACY"


@pytest.mark.parametrize("remedy", ["TORCH_USE_RTLD_GLOBAL", "LD_PRELOAD"])
def test_remedies_that_the_warning_names(built, tmp_path, remedy):
    steps = "tvm", "late", "extension", "ask:extension"
    if remedy == "LD_PRELOAD":
        own = shutil.copytree(built, tmp_path / "copy", symlinks=True)  # the variable takes no path with a space
        answer = load(own, "0.1.10", "torch", *steps, LD_PRELOAD=str(own / "torch" / "libamdhip64.so.7"))
    else:  # what that variable makes of torch's import
        answer = load(built, "0.1.10", "torch:global", *steps)
    assert (answer["owners"], answer["warnings"]) == (["runtime"] * 3, [])


def test_tvm_before_torch(built, tmp_path):
    """tvm_ffi imports torch, but inside tvm: a ROCm torch is imported before, and no other torch is."""
    made = {
        "torch/__init__.py": f"import ctypes\nfrom . import version\nctypes.CDLL({str(built / 'libc10_hip.so')!r})\n",
        "tvm_ffi/__init__.py": "import torch\n",
        "tvm/__init__.py": "import sys\nhad_torch = 'torch' in sys.modules\nimport tvm_ffi\n",
    }
    for hip in "'7.2.53211'", "None":
        folder = tmp_path / hip.strip("'")
        for name, text in {**made, "torch/version.py": f"cuda = None\nhip: str | None = {hip}\n"}.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        code = (
            "from vllm_rocm_fixes.guards import GUARDS, hip\nfrom vllm_rocm_fixes.process import Process\n"
            "Process((), GUARDS).prepare()\nimport tvm\nprint(tvm.had_torch, hip.state())"
        )
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        child = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert child.returncode == 0, child.stderr
        assert child.stdout.startswith(
            "True torch's HIP runtime answers first" if hip != "None" else "False torch isn't"
        )


# The real import. Every way to start a child once; the others are the same code in each version.
METHODS = {"0.1.10": ("subprocess", "fork", "spawn", "forkserver"), "0.1.12": (), "0.1.15": ("subprocess", "spawn")}
FRESH = "subprocess", "spawn", "forkserver"


@pytest.fixture(scope="module", params=VERSIONS)
def imported(request, built):
    """What end_to_end.py says of stock and of ours, side by side."""
    site = tilelang(request.param)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ROCM_FIXES", "LD_", "TVM_", "TL_"))}
    environment |= {
        "PYTHONPATH": str(site),
        "LD_LIBRARY_PATH": str(built / "torch"),
        "TILELANG_DISABLE_CACHE": "1",
    }
    started = {
        door: subprocess.Popen(
            [sys.executable, HERE / "hip" / "end_to_end.py", built, door, *METHODS[request.param]],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for door in ("stock", "ours")
    }
    said = {}
    for door, process in started.items():
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        said[door] = json.loads(out.splitlines()[-1])
    assert said["stock"]["version"] == said["ours"]["version"] == request.param
    return request.param, site, said["stock"], said["ours"]


def test_real_import_keeps_torchs_runtime_first(imported):
    version, _, stock, ours = imported
    wrong = "LEGACY" if version in WRONG_STRUCT else "R0600"
    assert (stock["layout"], stock["python"]) == (wrong, wrong)
    assert "stub" in stock["owner"]
    assert (ours["layout"], ours["python"], ours["owner"]) == ("R0600", "R0600", "libamdhip64.so.7")
    assert ours["states"]["hip"].startswith("torch's HIP runtime answers first")


def test_real_import_leaves_the_process_as_it_was(imported):
    """TVM_LIBRARY_PATH and TL_* stay: nothing is found through them but by TVM and TileLang themselves."""
    _, site, stock, ours = imported
    assert "PYTHONPATH" in stock["variables"] and stock["path"]
    assert set(stock["variables"]) - set(ours["variables"]) == {"PYTHONPATH"}
    assert not ours["path"]
    assert ours["states"]["pythonpath"].startswith(f"taken away: {site}")


def test_tilelang_still_compiles_for_the_cpu(imported):
    _, _, stock, ours = imported
    assert stock["sum"] and ours["sum"]


def test_children_are_clean(imported):
    """A fresh child that merely asks for TVM must not get TileLang's, and with it the stub."""
    version, site, stock, ours = imported
    for method in METHODS[version]:
        polluted, clean = stock["children"][method], ours["children"][method]
        assert polluted["PYTHONPATH"] != str(site) and polluted["path"]
        assert (clean["PYTHONPATH"], clean["path"]) == (str(site), [])
        if method in FRESH:
            assert (polluted["loaded"], polluted["tvm"], polluted["stub"]) == (False, True, True)
            assert clean["loaded"] is clean["stub"] is False
            assert clean["tvm"] == "ModuleNotFoundError: No module named 'tvm'"
        else:  # it has what its parent loaded, and from the right place
            assert clean["loaded"] and clean["tvm"] is True


@pytest.mark.unit
def test_a_tilelang_that_counts_as_absent_did_not_come_first(monkeypatch):
    looked = []
    [guard] = [guard for guard in GUARDS if guard.name == "hip"]
    monkeypatch.setattr(module, "_late", lambda: looked.append("late"))
    monkeypatch.delitem(sys.modules, "tvm", raising=False)
    for standing in (None, types.ModuleType("tilelang")):
        monkeypatch.setitem(sys.modules, "tilelang", standing)
        guard.install()
        looked.append(standing)
    assert looked == [None, "late", standing]
