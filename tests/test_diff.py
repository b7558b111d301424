"""`vllm-rocm-fixes diff`: what it prints, applied to stock, is what the import way runs; and a series stands alone."""

import ast
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from releases import NIGHTLIES, releases, tree
from setuptools import find_namespace_packages

from vllm_rocm_fixes import diffs
from vllm_rocm_fixes.guards import GUARDS
from vllm_rocm_fixes.patches import SERIES
from vllm_rocm_fixes.rewrite import same
from vllm_rocm_fixes.survey import modules

pytestmark = pytest.mark.unit
COMMAND = [sys.executable, "-m", "vllm_rocm_fixes", "diff"]
CLEAN = {k: v for k, v in os.environ.items() if not k.startswith("ROCM_FIXES")}
ALL = [*releases(), *NIGHTLIES]


def diff(*arguments, environ=CLEAN):
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, env=environ, timeout=60)


@functools.cache
def mended(version):
    """(path, source, mended tree) of every module that is mended by the import way."""
    found = [m for m in modules(tree(version), SERIES) if m.mended.tree]
    return [(m.path.relative_to(tree(version)), m.source, m.mended.tree) for m in found]


def stock(version, folder: Path) -> Path:
    """A copy of the stock files that change."""
    for path, source, _ in mended(version):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(source)
    return folder


def apply(tool, folder, text):
    environ = {**CLEAN, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    command = {"git": ["git", "apply", "-"], "patch": ["patch", "-p1", "--no-backup-if-mismatch", "--fuzz=0"]}[tool]
    done = subprocess.run(command, cwd=folder, input=text, capture_output=True, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert b"offset" not in done.stdout


@pytest.mark.parametrize("version", ALL)
def test_applied_it_gives_the_tree_of_the_import_way(version, tmp_path):
    found, outcomes = diffs.differences(tree(version), SERIES, version)
    assert not [(o.patch.name, o.verdict.reason, o.failed) for o in outcomes if o.verdict.kind == "unknown" or o.failed]
    assert {d.patch.name for d in found} == {o.patch.name for o in outcomes if o.applied}
    stock(version, tmp_path)
    apply("git", tmp_path, diffs.text(found))
    for path, source, wanted in mended(version):
        written = (tmp_path / path).read_bytes()
        assert same(ast.parse(written), wanted), path
        assert ast.dump(ast.parse(written)) == ast.dump(wanted), path
        assert not same(ast.parse(source), wanted), path


def test_no_two_patches_are_described_alike():
    assert len({p.summary for p in SERIES}) == len(SERIES)


@pytest.mark.parametrize("tool", ["git", "patch"])
@pytest.mark.parametrize("version", ["0.14.1", "0.23.0", "0.33.0"])
def test_the_command_prints_it_for_git_and_patch(tool, version, tmp_path):
    done = diff("--vllm", tree(version))
    assert done.returncode == 0, done.stderr
    stock(version, tmp_path)
    apply(tool, tmp_path, done.stdout)
    for path, _, wanted in mended(version):
        assert same(ast.parse((tmp_path / path).read_bytes()), wanted)
    said = dict(line.split(": ", 1) for line in done.stderr.decode().splitlines())
    applied = {p.name for p in SERIES if f"Description: {p.summary}\n".encode() in done.stdout}
    assert said.keys() | applied == {p.name for p in SERIES} and not said.keys() & applied


def test_line_ends_of_a_file_are_kept_through_the_diff(tmp_path):
    crlf = tmp_path / "crlf"
    stock("0.23.0", crlf)
    shutil.copy(tree("0.23.0") / "vllm" / "_version.py", crlf / "vllm")
    (crlf / "vllm" / "__init__.py").touch()
    path = next(p for p, _, _ in mended("0.23.0") if p.name == "topk_topp_sampler.py")
    (crlf / path).write_bytes((crlf / path).read_bytes().replace(b"\n", b"\r\n").rstrip())
    done = diff("sampler", "--vllm", crlf)
    assert done.returncode == 0, done.stderr
    apply("git", crlf, done.stdout)
    written = (crlf / path).read_bytes()
    assert written.count(b"\n") == written.count(b"\r\n") > 100
    assert same(ast.parse(written), next(t for p, _, t in mended("0.23.0") if p == path))


def test_every_patch_has_its_record_in_its_header():
    for patch in SERIES:
        said = diffs.header(patch).decode()
        assert "\n Stock" in said or "\n What stock does" in said, patch.name


def test_names_choose_patches_and_the_header_is_of_dep_3():
    done = diff("aiter_ops", "--vllm", tree("0.23.0"))
    assert done.returncode == 0
    text = done.stdout.decode()
    assert re.findall(r"^--- a/(.*)", text, re.M) == ["vllm/_aiter_ops.py"]
    header = text.partition("\n\n")[0].splitlines()
    fields = dict(line.split(": ", 1) for line in header if not line.startswith(" "))
    assert fields["Description"] and fields["Origin"].startswith("vendor, vllm-rocm-fixes ")
    assert fields["Bug"] == "https://github.com/vllm-project/vllm/issues/47992"
    assert fields["Applied-Upstream"] == "0.27.0"
    assert all(line.startswith(" ") and line.strip() for line in header if line.split(": ")[0] not in fields)


def test_what_is_skipped_is_no_part_of_it():
    done = diff("--vllm", tree("0.23.0"), environ={**CLEAN, "ROCM_FIXES_SKIP": "sampler"})
    assert b"topk_topp_sampler" not in done.stdout and b"_aiter_ops" in done.stdout


def test_errors_are_one_line_each(tmp_path):
    for arguments in (
        ["smpler"],
        ["--vllm", tmp_path],
        ["--output", tmp_path / "x", "--vllm", "/dev/null"],
        ["--what"],
    ):
        done = diff(*arguments)
        assert done.returncode == 2 and done.stdout == b""
        assert done.stderr.startswith(b"vllm-rocm-fixes: ") and done.stderr.count(b"\n") == 1, done.stderr


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("smapler", "no patch is called smapler; did you mean sampler?"),
        ("xyzzy", "no patch is called xyzzy (there are: "),
        *((g.name, f"{g.name} is a guard: it acts on a process and edits no file of vLLM's") for g in GUARDS),
    ],
)
def test_a_name_that_is_no_patch_is_told(name, said):
    done = diff(name, "--vllm", tree("0.23.0"))
    assert done.returncode == 2 and done.stderr.decode().startswith(f"vllm-rocm-fixes: {said}")


# The series


@pytest.mark.parametrize("version", ["0.18.1", "0.23.0", "0.33.0"])
def test_a_series_gives_the_fixes_without_the_overlay(version, tmp_path):
    output = tmp_path / "patches"
    done = diff("--vllm", tree(version), "--output", output)
    assert done.returncode == 0 and done.stdout == b"", done.stderr
    names = (output / "series").read_text().split()
    assert names == sorted(names) == sorted(p.name for p in output.glob("0*.patch"))
    folder = stock(version, tmp_path / "tree")
    for name in names:
        assert re.match(rb"Description: .*\n(.*\n)*?Applied-Upstream: .*\n\n--- ", (output / name).read_bytes()), name
        apply("patch", folder, (output / name).read_bytes())
    # The same trees, but for what isn't safe without a guard.
    without = frozenset(g.name for g in GUARDS)
    expected = {
        m.path.relative_to(tree(version)): m for m in modules(tree(version), SERIES, version, without) if m.path
    }
    helpers = set()
    for path, source, _ in mended(version):
        written = ast.parse((folder / path).read_bytes())
        assert same(written, expected[path].mended.tree or ast.parse(source)), path
        froms = [n for n in ast.walk(written) if isinstance(n, ast.ImportFrom) and n.module]
        helpers |= {(n.module, a.name) for n in froms for a in n.names if n.module.startswith("vllm_rocm_fixes")}
    assert helpers
    # What the mended code imports is there, in the tree, and runs with nothing but the standard library.
    code = (
        "import importlib, json, sys\nfor module, name in json.loads(sys.argv[1]):\n"
        "    getattr(importlib.import_module(module), name)\nimport vllm_rocm_fixes\nprint(vllm_rocm_fixes.__file__)"
    )
    child = [sys.executable, "-S", "-c", code, json.dumps(sorted(helpers))]
    said = subprocess.run(child, cwd=folder, env={**CLEAN, "PYTHONPATH": str(folder)}, capture_output=True, text=True)
    assert said.stdout.strip() == str(folder / "vllm_rocm_fixes" / "__init__.py"), said.stderr


def test_every_release_packages_what_a_series_adds(tmp_path):
    sections = {}
    for version in releases():
        text = (tree(version) / "pyproject.toml").read_text()
        sections[version] = re.search(r"\[tool\.setuptools\.packages\.find\]\n(.*?)\n\n", text, re.S)[1]
    assert set(sections.values()) == {'where = ["."]\ninclude = ["vllm*"]'}
    for path in diffs.runtime(diffs.differences(tree("0.23.0"), SERIES, "0.23.0")[0]):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    assert {"vllm_rocm_fixes", "vllm_rocm_fixes.patches"} <= set(find_namespace_packages(tmp_path, include=["vllm*"]))


def test_a_series_replaces_a_series_and_nothing_else(tmp_path):
    output = tmp_path / "out"
    assert diff("--vllm", tree("0.23.0"), "--output", output).returncode == 0
    first = sorted(p.name for p in output.iterdir())
    assert diff("--vllm", tree("0.33.0"), "--output", output).returncode == 0
    assert sorted(p.name for p in output.iterdir()) != first
    (output / "mine.txt").touch()
    done = diff("--vllm", tree("0.23.0"), "--output", output)
    assert done.returncode == 2 and b"mine.txt" in done.stderr
