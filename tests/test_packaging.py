"""The archives that are shipped: what they hold, that a second build is the same, what installing them changes."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "vllm_rocm_fixes" / "__init__.py").read_text())[1]
WHEEL = f"vllm_rocm_fixes-{VERSION}-py3-none-any.whl"
SDIST = f"vllm_rocm_fixes-{VERSION}.tar.gz"
SITE = Path(sysconfig.get_path("purelib"))  # stock vLLM, and the overlay from the checkout


def run(*command, **environment):
    done = subprocess.run(
        [str(part) for part in command],
        env={**{k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "SOURCE_DATE_EPOCH")}, **environment},
        cwd="/",  # not the checkout: Python would find the overlay there
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def checkout(target):
    """A copy of the tracked files, as they are now."""
    for name in run("git", "-C", ROOT, "ls-files").splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)
    return target


def build(source, out, *options, umask=0o022):
    old = os.umask(umask)
    try:
        run(sys.executable, "-m", "build", "--no-isolation", *options, "-o", out, source)
    finally:
        os.umask(old)
    return out


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """A folder with the wheel and the sdist: `python -m build` makes the wheel out of the sdist."""
    work = tmp_path_factory.mktemp("first")
    return build(checkout(work / "source"), work / "dist")


@pytest.fixture(scope="module")
def wheel(dist):
    return dist / WHEEL


def test_wheel_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    tracked = run("git", "-C", ROOT, "ls-files", "vllm_rocm_fixes", "patches").splitlines()
    wanted = {re.sub("^patches/", "vllm_rocm_fixes/patches/", name) for name in tracked}
    info = f"vllm_rocm_fixes-{VERSION}.dist-info"
    about = ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt", "licenses/LICENSE")
    assert held == wanted | {f"{info}/{name}" for name in about}


def test_metadata_takes_nothing_along_and_opens_the_doors(wheel):
    with zipfile.ZipFile(wheel) as archive:
        info = f"vllm_rocm_fixes-{VERSION}.dist-info"
        metadata = archive.read(f"{info}/METADATA").decode()
        doors = archive.read(f"{info}/entry_points.txt").decode()
    assert f"Version: {VERSION}\n" in metadata
    assert "License-Expression: Apache-2.0\n" in metadata
    assert "Requires-Python: <3.15,>=3.10\n" in metadata
    assert "Requires-Dist" not in metadata
    assert "[vllm.general_plugins]\nrocm_fixes = vllm_rocm_fixes:register" in doors
    assert "[vllm.platform_plugins]\nrocm_fixes = vllm_rocm_fixes:prepare" in doors
    assert "[console_scripts]\nvllm-rocm-fixes = vllm_rocm_fixes.cli:main" in doors


def test_version_stands_in_one_place():
    """In __init__.py, and as a heading of the changelog once it is released."""
    found = run(
        "git", "-C", ROOT, "grep", "-lE", rf"version.*['\"]{re.escape(VERSION)}['\"]", "--", "*.py", "*.toml", "*.cfg"
    )
    assert found.splitlines() == ["vllm_rocm_fixes/__init__.py"]


def test_sdist_builds_the_same_wheel(dist, tmp_path):
    with tarfile.open(dist / SDIST) as archive:
        archive.extractall(tmp_path / "source")
    again = build(tmp_path / "source" / SDIST.removesuffix(".tar.gz"), tmp_path / "dist", "--wheel")
    assert (again / WHEEL).read_bytes() == (dist / WHEEL).read_bytes()


def test_built_twice_the_same_bytes(dist, tmp_path):
    """Elsewhere, later, with other file times and another umask."""
    source = checkout(tmp_path / "elsewhere")
    for path in source.rglob("*"):
        path.chmod(path.stat().st_mode & 0o700)
        os.utime(path, (2e9, 2e9))
    again = build(source, tmp_path / "dist", umask=0o077)
    for name in (WHEEL, SDIST):
        assert (again / name).read_bytes() == (dist / name).read_bytes(), name


@pytest.fixture(scope="module", params=["pip", "uv"])
def fresh(request, wheel, tmp_path_factory):
    """An empty environment with the overlay alone in it; and the installer's command line."""
    venv = tmp_path_factory.mktemp(request.param) / "venv"
    if request.param == "uv":
        uv = [SITE.parents[2] / "bin" / "uv"]
        run(*uv, "venv", "--offline", "--python", sys.executable, venv)
        installer = [*uv, "pip"]
        run(*installer, "install", "--offline", wheel, VIRTUAL_ENV=str(venv))
    else:
        run(sys.executable, "-m", "venv", venv)
        installer = [venv / "bin" / "python", "-m", "pip"]
        run(*installer, "install", "--no-index", wheel)
    return venv, installer


def test_installed_alone_it_answers(fresh):
    """Without vLLM: the command explains itself, and says of a folder of sources what it would do there."""
    venv, _ = fresh
    command = venv / "bin" / "vllm-rocm-fixes"
    assert VERSION in run(command, "--version")
    assert "status" in run(command, "--help")
    assert (
        run(venv / "bin" / "python", "-c", "import vllm_rocm_fixes as v; print(v.prepare(), v.register())")
        == "None None\n"
    )


@pytest.fixture(scope="module")
def beside(tmp_path_factory):
    """A second environment with stock vLLM and no overlay: vllm/ is a copy, everything else a link into this one."""
    venv = tmp_path_factory.mktemp("beside") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    site = venv / SITE.relative_to(sys.prefix)
    for entry in SITE.iterdir():
        if "vllm_rocm_fixes" in entry.name:
            continue
        if entry.name == "vllm":
            # Real files, but for the big compiled ones: what the overlay could change is Python and .pyc.
            shutil.copytree(entry, site / "vllm", copy_function=copy, symlinks=True)
        else:
            (site / entry.name).symlink_to(entry)
    return venv


def copy(source, target):
    if source.endswith(".so"):
        os.symlink(source, target)
    else:
        shutil.copy2(source, target)


def contents(folder):
    """Path -> digest of every file, .pyc included, that isn't a link."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


USE = """
import sys
from vllm.plugins import load_general_plugins
load_general_plugins()
import vllm.v1.sample.ops.topk_topp_sampler as sampler, vllm.config.vllm, vllm._aiter_ops
print(sorted(name for name in sys.modules if name.startswith("vllm_rocm_fixes")), type(sampler.__loader__).__module__)
"""


def test_beside_stock_vllm_nothing_else_changes(beside, wheel):
    """Installed, used and removed again: no other distribution and no file of vLLM differs, .pyc files included."""
    python = beside / "bin" / "python"
    vllm = beside / SITE.relative_to(sys.prefix) / "vllm"
    pip = [python, "-m", "pip", "--disable-pip-version-check"]

    stock_said = run(python, "-c", USE)
    assert "vllm_rocm_fixes" not in stock_said
    packages, files = run(*pip, "freeze", "--all").splitlines(), contents(vllm)
    assert len(files) > 1000
    assert any(name.endswith("topk_topp_sampler.cpython-{}{}.pyc".format(*sys.version_info[:2])) for name in files)

    run(*pip, "install", "--no-index", wheel)
    assert [line for line in run(*pip, "freeze", "--all").splitlines() if line not in packages] == [
        f"vllm-rocm-fixes @ {wheel.as_uri()}#sha256={hashlib.sha256(wheel.read_bytes()).hexdigest()}"
    ]
    said = run(python, "-c", USE)
    assert said.endswith("vllm_rocm_fixes.importing\n"), said  # it was mended, so there was something to leave behind
    assert contents(vllm) == files

    run(*pip, "uninstall", "-y", "vllm-rocm-fixes")
    assert not list(vllm.parent.glob("vllm_rocm_fixes*"))
    assert run(python, "-c", USE) == stock_said
    assert contents(vllm) == files


@pytest.mark.parametrize("installed", [True, False], ids=["installed", "a checkout"])
def test_two_builds_of_the_same_second_and_size_share_no_code(installed, tmp_path):
    """What one build keeps the next doesn't find, though all files have the names, sizes and seconds of before."""
    place, source, keys = tmp_path / "site", checkout(tmp_path / "source"), []
    mend = source / "vllm_rocm_fixes" / "mend.py"
    for build_ in range(2):
        mend.write_bytes(mend.read_bytes().replace(b"begin again", b"BEGIN AGAIN") if build_ else mend.read_bytes())
        shutil.rmtree(place, ignore_errors=True)
        if installed:
            wheel = next(build(source, tmp_path / f"dist{build_}", "--wheel").glob("*.whl"))
            run(sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", place, wheel)
        else:
            shutil.copytree(source / "vllm_rocm_fixes", place / "vllm_rocm_fixes")
            shutil.copytree(source / "patches", place / "vllm_rocm_fixes" / "patches")
        for file in place.rglob("*.py"):
            os.utime(file, ns=(0, 1_700_000_000 * 10**9 + (0 if installed else build_)))
        ask = "from vllm_rocm_fixes.store import digest; print(digest().hex())"
        keys += [run(sys.executable, "-c", ask, PYTHONPATH=str(place)).strip() for _ in range(2)]
    assert keys[0] == keys[1] != keys[2] == keys[3]
