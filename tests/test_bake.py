"""`bake` and `unbake` on real stock files: whole or not at all, byte for byte back, killed at every step."""

import ast
import json
import os
import pickle
import py_compile
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
import zipfile
from pathlib import Path

import pytest
from releases import tree

from vllm_rocm_fixes import baking, installation, installed
from vllm_rocm_fixes.baking import STORE, Refused
from vllm_rocm_fixes.guards import GUARDS
from vllm_rocm_fixes.patches import SERIES
from vllm_rocm_fixes.rewrite import same
from vllm_rocm_fixes.survey import modules, survey

unit = pytest.mark.unit
VERSION = "0.23.0"
CLEAN = {k: v for k, v in os.environ.items() if not k.startswith("ROCM_FIXES")}
SMALL = tuple(p for p in SERIES if p.name in ("sampler", "import_utils"))
ROOT = os.geteuid() == 0
OTHER = "vllm/utils/import_utils.py"
SAMPLER = "vllm/v1/sample/ops/topk_topp_sampler.py"


def command(*arguments, environ=CLEAN):
    line = [sys.executable, "-m", "vllm_rocm_fixes", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, env=environ, timeout=60)


@pytest.fixture
def root():
    """A vLLM with the stock files that the series asks for, in a folder that any user may enter."""
    folder = Path(tempfile.mkdtemp(prefix="bake-"))
    folder.chmod(0o755)
    yield stock(folder)
    for path in folder.rglob("*"):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o755)
    shutil.rmtree(folder)


def stock(folder, version=VERSION):
    names = [m.path.relative_to(tree(version)) for m in modules(tree(version), SERIES) if m.path]
    for name in [*names, *map(Path, ("setup.py", "vllm/__init__.py", "vllm/_version.py"))]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(tree(version) / name, folder / name)
        (folder / name).chmod(0o644)
    return folder


def everything(root):
    """Each file below root: bytes, mode, owner and time."""
    files = sorted(p for p in root.rglob("*") if p.is_file())
    status = {p: p.stat() for p in files}
    return {
        str(p.relative_to(root)): (p.read_bytes(), s.st_mode, s.st_uid, s.st_gid, s.st_mtime_ns)
        for p, s in status.items()
    }


def contents(root):
    return {path: facts[0] for path, facts in everything(root).items() if not path.startswith(STORE)}


def in_child(function, user=None):
    """What function returns in a forked child, as another user where one is named; "killed" where it was killed."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if user is not None:
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)
            try:
                result = function()
            except Refused as refused:
                result = refused
            os.write(writer, pickle.dumps(result))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(writer)
    with open(reader, "rb") as pipe:
        content = pipe.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return "killed"
    assert os.WEXITSTATUS(status) == 0
    return pickle.loads(content)


def bake(root, series=SMALL, version=VERSION, skipped=frozenset()):
    return baking.bake(root, series, version, skipped)


@unit
def test_baked_files_have_the_tree_of_the_import_way_and_come_back_to_the_byte(root):
    before = everything(root)
    unguarded = list(modules(root, SERIES, VERSION, frozenset(g.name for g in GUARDS)))
    wanted = {str(m.path.relative_to(root)): m.mended.tree for m in unguarded if m.mended.tree}
    done = command("bake", "--vllm", root)
    assert done.returncode == 0, done.stderr
    after = contents(root)
    assert SAMPLER in wanted and len(wanted) > 1
    for path, (content, *_) in before.items():
        assert (after[path] != content) == (path in wanted), path
        if path in wanted:
            assert same(ast.parse(after[path]), wanted[path])
            assert ast.dump(ast.parse(after[path])) == ast.dump(wanted[path])
    assert set(done.stdout.splitlines()) >= {f"written: {path}" for path in wanted}
    verdicts = {o.patch.name: o.verdict.kind for o in survey(root, SERIES)}
    applied = {
        o.patch.name for o in survey(tree(VERSION), SERIES, VERSION, frozenset(g.name for g in GUARDS)) if o.applied
    }
    assert {verdicts[name] for name in applied} == {"clear"}
    done = command("unbake", "--vllm", root)
    assert done.returncode == 0, done.stderr
    assert everything(root) == before
    assert not (root / STORE).exists()
    assert command("unbake", "--vllm", root).stdout == "nothing is baked\n"


@unit
def test_twice_is_once_and_check_tells(root):
    assert command("bake", "--check", "--vllm", root).returncode == 1
    assert everything(root) == everything(stock(root))
    bake(root, SERIES)
    once = everything(root)
    assert bake(root, SERIES).written == ()
    assert everything(root) == once
    done = command("bake", "--check", "--vllm", root)
    assert (done.returncode, done.stdout) == (0, f"baked: vLLM {VERSION} in {root}\n")
    (root / SAMPLER).write_bytes(tree(VERSION).joinpath(SAMPLER).read_bytes())
    done = command("bake", "--check", "--vllm", root)
    assert done.returncode == 1 and SAMPLER in done.stdout
    assert everything(root).keys() == once.keys()


@unit
def test_owner_and_mode_stay_and_bytecode_goes(root):
    path = root / SAMPLER
    path.chmod(0o640)
    if ROOT:
        os.chown(path, 12, 34)
    cached = [
        Path(py_compile.compile(str(path))),
        path.parent / "__pycache__" / "topk_topp_sampler.cpython-312.opt-1.pyc",
    ]
    cached[1].write_bytes(b"of another Python")
    other = path.parent / "__pycache__" / "topk_topp_sampler_more.cpython-312.pyc"
    other.write_bytes(b"of another module")
    before = path.stat()
    bake(root)
    after = path.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert not any(p.exists() for p in cached) and other.exists()
    py_compile.compile(str(path))
    baking.unbake(root)
    after = path.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert after.st_mtime_ns == before.st_mtime_ns
    assert not any(p.exists() for p in cached) and other.exists()


STEPS = ("replace", "unlink", "mkdir", "rmdir", "fsync", "utime", "open")


def killed_at(step, function):
    """Run function in a child that kills itself, as kill -9 does, before the step-th call that writes."""

    def run():
        count, opened = 0, os.open

        def counted(original):
            def call(*args, **kwargs):
                nonlocal count
                count += original is not opened or bool(args[1] & os.O_CREAT)
                if count == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*args, **kwargs)

            return call

        for name in STEPS:
            setattr(os, name, counted(getattr(os, name)))
        function()

    return in_child(run)


@unit
@pytest.mark.parametrize("first", ["bake", "unbake"])
def test_killed_at_any_step_the_next_run_finishes_or_reverts(root, first):
    stock_files = everything(root)
    bake(root)
    baked_files = contents(root)
    baked_record = (root / STORE / "record.json").read_bytes()
    start = {"bake": stock_files, "unbake": everything(root)}[first]
    act = {"bake": lambda: bake(root), "unbake": lambda: baking.unbake(root)}[first]
    steps, states = 0, set()
    while True:
        steps += 1
        for then in ("bake", "unbake"):
            put_back(root, start)
            ended = killed_at(steps, act)
            if ended != "killed":
                break
            found = contents(root)
            for path, (content, *_) in stock_files.items():
                assert found[path] in (content, baked_files[path]), (steps, path)  # whole, the one or the other
            states.add(tuple(found[path] == stock_files[path][0] for path in stock_files))
            if then == "bake":
                bake(root)
                assert contents(root) == baked_files, steps
                assert (root / STORE / "record.json").read_bytes() == baked_record, steps
                assert not baking.check(root, SMALL, VERSION)
            baking.unbake(root)
            assert everything(root) == stock_files, (steps, then)
            assert not (root / STORE).exists()
        if ended != "killed":
            break
    assert steps > 20
    assert len(states) == 3  # killed before the first file, between two, and after the last


def put_back(root, files):
    for path in [root / STORE, *root.rglob("__pycache__")]:
        shutil.rmtree(path, ignore_errors=True)
    for path in root.rglob("*"):
        if path.is_file() and str(path.relative_to(root)) not in files:
            path.unlink()
    for path, (content, mode, _, _, mtime) in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
        (root / path).chmod(mode)
        os.utime(root / path, ns=(mtime, mtime))


@unit
def test_a_full_disk_changes_nothing(root, monkeypatch):
    before = contents(root)
    written = baking._temporary

    def full(path, content, mode):
        if path.name == "import_utils.py":
            raise OSError(28, "No space left on device", str(path))
        return written(path, content, mode)

    monkeypatch.setattr(baking, "_temporary", full)
    with pytest.raises(OSError):
        bake(root)
    assert contents(root) == before
    monkeypatch.undo()
    baking.unbake(root)
    assert contents(root) == before and not (root / STORE).exists()


@unit
def test_a_newer_overlay_bakes_from_the_stock_files_and_an_unbake_needs_no_series(root, monkeypatch):
    before = everything(root)
    bake(root, SMALL)
    old = contents(root)
    # Another version: another edit of the sampler, and no patch for the other file any more.
    sampler = SMALL[0]

    def mend(module):
        sampler.mend(module)
        module.body.append(ast.parse("ADDED_LATER = 1").body[0])

    monkeypatch.setattr(baking, "__version__", "9.0.0")
    newer = [sampler._replace(mend=mend)]
    assert baking.check(root, newer, VERSION)
    assert set(bake(root, newer).written) == {SAMPLER, OTHER}
    assert contents(root)[SAMPLER] == old[SAMPLER] + b"ADDED_LATER = 1\n"
    assert contents(root)[OTHER] == before[OTHER][0]
    assert json.loads((root / STORE / "record.json").read_text())["overlay"] == "9.0.0"
    assert not baking.check(root, newer, VERSION)
    baking.unbake(root)
    assert everything(root) == before


@unit
def test_unknown_source_is_refused_and_a_skipped_patch_is_no_reason(root):
    text = (root / SAMPLER).read_text().replace("class TopKTopPSampler", "class Renamed")
    (root / SAMPLER).write_text(text)
    before = everything(root)
    done = command("bake", "--vllm", root)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "sampler is unknown" in done.stderr
    assert command("bake", "--check", "--vllm", root).returncode == 1
    assert everything(root) == before
    assert command("bake", "--vllm", root, environ={**CLEAN, "ROCM_FIXES_SKIP": "sampler"}).returncode == 0
    assert contents(root)[SAMPLER] == text.encode()
    assert contents(root)[OTHER] != before[OTHER][0]


@unit
def test_a_vllm_that_may_not_be_written_to_is_refused(root):
    folder = (root / SAMPLER).parent
    folder.chmod(0o555)
    before = everything(root)
    refused = in_child(lambda: bake(root), user=65534 if ROOT else None)
    assert isinstance(refused, Refused) and str(root) in str(refused)
    assert everything(root) == before
    folder.chmod(0o755)
    bake(root)
    before = everything(root)
    folder.chmod(0o555)
    refused = in_child(lambda: baking.unbake(root), user=65534 if ROOT else None)
    assert isinstance(refused, Refused)
    assert everything(root) == before


@unit
@pytest.mark.skipif(not ROOT, reason="only root can give a file to another user")
def test_a_file_that_would_change_its_owner_is_refused(root):
    for path in [root, *root.rglob("*")]:
        os.chown(path, 65534, 65534)
    os.chown(root / SAMPLER, 12, 34)
    before = everything(root)
    assert "belongs to another user" in str(in_child(lambda: bake(root), user=65534))
    assert everything(root) == before
    os.chown(root / SAMPLER, 65534, 65534)
    assert set(in_child(lambda: bake(root), user=65534).written) == {SAMPLER, OTHER}
    # What another user baked isn't put back by root, whom that user could lead anywhere.
    assert "can be written by another user" in str(in_child(lambda: baking.unbake(root)))
    assert in_child(lambda: baking.state(root))["finished"] is True
    assert len(in_child(lambda: baking.unbake(root), user=65534).written) == 2


@unit
@pytest.mark.parametrize("what", [".", "record.json", "*.stock"])
@pytest.mark.parametrize("how", ["group", "others", "owner", "link"])
def test_originals_that_another_user_can_write_are_not_put_back(root, what, how):
    bake(root)
    before = contents(root)
    place = next((root / STORE).glob(what)) if "*" in what else root / STORE / what
    if how == "link":
        place = root / STORE if what == "." else place
        place.rename(root / "elsewhere")
        place.symlink_to(root / "elsewhere")
    elif how == "owner":
        if not ROOT:
            return  # nobody but root can make this place
        os.chown(place, 65534, 65534)
    else:
        place.chmod(place.stat().st_mode | (0o020 if how == "group" else 0o002))
    with pytest.raises(Refused) as refused:
        baking.unbake(root)
    assert str(refused.value).count("\n") == 0
    assert {p: c for p, c in contents(root).items() if "elsewhere" not in p} == before


@unit
def test_a_record_names_no_file_outside_and_originals_are_held_to_their_hashes(root):
    bake(root)
    record = root / STORE / "record.json"
    data = json.loads(record.read_text())
    for path in ("../outside.py", "/etc/outside.py", "vllm/../../outside.py", "vllm/notes.txt"):
        record.write_text(json.dumps({**data, "files": {path: data["files"][SAMPLER]}}))
        with pytest.raises(Refused):
            baking.unbake(root)
    for content in ("", "[]", "{}", '{"format": 1}', json.dumps({**data, "format": 2})):
        record.write_text(content)
        with pytest.raises(Refused):
            baking.unbake(root)
    record.write_text(json.dumps(data))
    original = root / STORE / f"{data['files'][SAMPLER]['original']}.stock"
    original.write_bytes(b"import os\n")
    before = contents(root)
    done = command("unbake", "--vllm", root)
    assert done.returncode == 2 and "damaged" in done.stderr and done.stderr.count("\n") == 1
    assert contents(root) == before


@unit
def test_a_file_behind_a_link_is_refused(root):
    path = root / SAMPLER
    real = path.with_name("real.py")
    path.rename(real)
    path.symlink_to(real)
    with pytest.raises(Refused, match="link"):
        bake(root)
    assert path.is_symlink() and b"vllm_rocm_fixes" not in real.read_bytes()


@unit
def test_a_hard_link_elsewhere_keeps_the_stock_text(root):
    os.link(root / SAMPLER, root / "cache-of-an-installer")
    stock_text = (root / SAMPLER).read_bytes()
    bake(root)
    assert (root / "cache-of-an-installer").read_bytes() == stock_text != (root / SAMPLER).read_bytes()


@unit
def test_a_vllm_that_was_upgraded_over_a_bake_is_never_overwritten_by_the_old_one(root):
    bake(root)
    stock(root, "0.26.0")
    upgraded = contents(root)
    state = baking.state(root)
    assert {f["on_disk"] for f in state["files"]} == {"changed"}
    done = command("unbake", "--vllm", root)
    assert done.returncode == 0
    assert done.stdout.count("isn't what was baked") == 2
    assert contents(root) == upgraded and not (root / STORE).exists()
    # The other way: a bake over the upgrade starts from the new files.
    stock(root)
    bake(root)
    stock(root, "0.26.0")
    bake(root, version="0.26.0")
    assert not baking.check(root, SMALL, "0.26.0")
    baking.unbake(root)
    assert contents(root) == upgraded


@unit
def test_a_baked_file_that_somebody_edited_is_left_alone_and_told(root):
    bake(root)
    edited = (root / SAMPLER).read_bytes() + b"EDITED = 1\n"
    (root / SAMPLER).write_bytes(edited)
    with pytest.raises(Refused, match="edited"):
        bake(root)
    done = command("unbake", "--vllm", root)
    assert done.returncode == 1 and "edited after it was baked" in done.stdout
    assert (root / SAMPLER).read_bytes() == edited
    assert contents(root)[OTHER] == tree(VERSION).joinpath(OTHER).read_bytes()
    (root / SAMPLER).write_bytes(edited.removesuffix(b"EDITED = 1\n"))
    assert command("unbake", "--vllm", root).returncode == 0
    assert contents(root) == contents(stock(root))


@unit
def test_one_at_a_time(root):
    with baking._locked(root):
        done = command("bake", "--vllm", root)
    assert done.returncode == 2 and "is running" in done.stderr
    assert command("bake", "--vllm", root).returncode == 0


def pip(python, *arguments):
    line = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "--no-input",
        "--disable-pip-version-check",
        *map(str, arguments),
    ]
    return subprocess.run(line, capture_output=True, text=True, timeout=120)


@unit
def test_pip_checks_upgrades_and_uninstalls_a_baked_vllm(root, tmp_path):
    wheels = {}
    for version in (VERSION, "0.26.0"):
        wheels[version] = tmp_path / f"vllm-{version}-py3-none-any.whl"
        with zipfile.ZipFile(wheels[version], "w") as wheel:
            files = contents(stock(tmp_path / version, version)) if (tmp_path / version).mkdir() is None else {}
            info = f"vllm-{version}.dist-info"
            files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n".encode()
            files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            for path, content in files.items():
                if path.startswith("vllm"):
                    wheel.writestr(path, content)
            names = [*files, f"{info}/RECORD"]
            wheel.writestr(f"{info}/RECORD", "".join(f"{p},,\n" for p in names if p.startswith("vllm")))
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    (site,) = environment.glob("lib/python3*/site-packages")
    assert pip(python, "install", "--no-index", wheels[VERSION]).returncode == 0
    installed_files = contents(site)
    assert command("bake", "--vllm", site).returncode == 0
    done = pip(python, "check")
    assert done.returncode == 0, done.stdout
    # An upgrade over the bake, and back.
    assert pip(python, "install", "--no-index", wheels["0.26.0"]).returncode == 0
    assert installation.find(site).version == installation.find(site).metadata[0].version == "0.26.0"
    assert command("bake", "--vllm", site).returncode == 0
    assert command("bake", "--check", "--vllm", site).returncode == 0
    assert command("unbake", "--vllm", site).returncode == 0
    assert command("bake", "--vllm", site).returncode == 0
    done = pip(python, "uninstall", "-y", "vllm")
    assert done.returncode == 0, done.stderr
    assert not (site / "vllm").exists() and not list(site.glob("vllm-*.dist-info"))
    assert pip(python, "install", "--no-index", wheels[VERSION]).returncode == 0
    assert command("unbake", "--vllm", site).returncode == 0
    assert {p: c for p, c in contents(site).items() if ".pyc" not in p} == {
        p: c for p, c in installed_files.items() if ".pyc" not in p
    }
    assert not (site / STORE).exists()


IN_VLLM = """
import inspect, json, sys
from vllm.plugins import load_general_plugins
import vllm.v1.sample.ops.topk_topp_sampler as module
load_general_plugins()
overlay = sys.modules.get("vllm_rocm_fixes")
print("SAID", json.dumps({
    "file": module.__file__,
    "calls": "vllm_rocm_fixes.patches.sampler" in inspect.getsource(module.TopKTopPSampler),
    "state": overlay and overlay.current().results["sampler"].state,
}))
"""


def test_a_real_vllm_imports_its_baked_files_and_the_plugin_finds_them_clear(tmp_path):
    root = tmp_path / "site"
    vllm = installation.find().root / "vllm"
    try:
        shutil.copytree(vllm, root / "vllm", copy_function=os.link, ignore=shutil.ignore_patterns("__pycache__"))
    except (OSError, shutil.Error):  # another file system
        shutil.rmtree(root)
        shutil.copytree(vllm, root / "vllm", ignore=shutil.ignore_patterns("__pycache__"))
    text = (vllm / SAMPLER.removeprefix("vllm/")).read_bytes()
    bake(root, SERIES, installed.version(root))
    assert (vllm / SAMPLER.removeprefix("vllm/")).read_bytes() == text
    said = {}
    for plugins in ("rocm_fixes", ""):
        environ = {**CLEAN, "PYTHONPATH": str(root), "VLLM_PLUGINS": plugins, "VLLM_LOGGING_LEVEL": "ERROR"}
        child = [sys.executable, "-c", IN_VLLM]
        done = subprocess.run(child, env=environ, capture_output=True, text=True, cwd=tmp_path, timeout=300)
        assert "SAID" in done.stdout, done.stderr
        said[plugins] = json.loads(done.stdout.partition("SAID ")[2])
    file = str(root / SAMPLER)
    assert said[""] == {"file": file, "calls": True, "state": None}
    assert said["rocm_fixes"] == {"file": file, "calls": True, "state": "clear"}
