"""`vllm-rocm-fixes status`, on real trees and on environments of every kind, and the command line around it."""

import json
import os
import pty
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from releases import NIGHTLIES, tree

from vllm_rocm_fixes import __version__, baking, doors, installed
from vllm_rocm_fixes.cli import COMMANDS, main
from vllm_rocm_fixes.guards import GUARDS
from vllm_rocm_fixes.patches import SERIES
from vllm_rocm_fixes.survey import modules, survey

pytestmark = pytest.mark.unit
CLEAN = {k: v for k, v in os.environ.items() if not k.startswith(("ROCM_FIXES", "VLLM_"))}
SAMPLER = "vllm/v1/sample/ops/topk_topp_sampler.py"


@pytest.fixture(autouse=True)
def no_switches(monkeypatch):
    for name in os.environ.keys() - CLEAN.keys():
        monkeypatch.delenv(name)


@pytest.fixture
def status(capsys):
    def call(*arguments):
        code = main(["status", *map(str, arguments)])
        out = capsys.readouterr().out
        return code, json.loads(out) if "--json" in arguments else out

    return call


@pytest.fixture
def root(tmp_path):
    """The files of 0.23.0 that the series asks for."""
    folder = tmp_path / "root"
    names = [m.path.relative_to(tree("0.23.0")) for m in modules(tree("0.23.0"), SERIES) if m.path]
    for name in [*names, *map(Path, ("setup.py", "vllm/__init__.py", "vllm/_version.py"))]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tree("0.23.0") / name, folder / name)
    return folder


def distribution(folder, name, version, **groups):
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    text = "".join(f"[{group.replace('__', '.')}]\n{points}\n" for group, points in groups.items())
    (info / "entry_points.txt").write_text(text)
    return info


OURS = {
    "vllm__platform_plugins": "rocm_fixes = vllm_rocm_fixes:prepare",
    "vllm__general_plugins": "rocm_fixes = vllm_rocm_fixes:register",
}


# What is told of vLLM and of the patches


@pytest.mark.parametrize("version", ["0.14.0", "0.23.0", "0.33.0", *NIGHTLIES])
def test_json_tells_what_the_survey_finds(status, version):
    code, said = status("--json", "--vllm", tree(version))
    assert code == 0
    assert (said["vllm"]["version"], said["vllm"]["root"]) == (version, str(tree(version)))
    assert said["vllm"]["believed"] is True and said["vllm"]["doubt"] is None
    found = {o.patch.name: o for o in survey(tree(version), SERIES)}
    assert [p["name"] for p in said["patches"]] == [p.name for p in SERIES]
    for patch in said["patches"]:
        outcome = found[patch["name"]]
        assert patch["verdict"] == outcome.verdict.kind != "unknown", patch
        assert patch["reason"].startswith(outcome.verdict.reason)
        assert patch["module"] == outcome.patch.module and patch["origin"] == list(outcome.patch.origin)
        assert (patch["since"], patch["until"]) == (outcome.patch.since, outcome.patch.until)
        assert patch["outcome"] == ("applies" if outcome.applied else "none")
    assert [g["name"] for g in said["guards"]] == [g.name for g in GUARDS]
    assert said["baked"] is None


def test_text_is_plain_when_piped_and_a_table_at_a_terminal(status):
    code, text = status("--vllm", tree("0.23.0"))
    lines = text.splitlines()
    assert code == 0 and "\x1b" not in text
    assert lines[0] == f"vLLM 0.23.0 in {tree('0.23.0')} (its metadata says the same)"
    rows = {line.split()[0]: line.split() for line in lines if line}
    found = {o.patch.name: o.verdict.kind for o in survey(tree("0.23.0"), SERIES)}
    assert {p: rows[p][1] for p in found} == found
    assert all(rows[p.name][2] == (p.until or "-") for p in SERIES)
    ours, theirs = pty.openpty()
    child = [sys.executable, "-m", "vllm_rocm_fixes", "status", "--vllm", str(tree("0.23.0"))]
    process = subprocess.Popen(child, stdout=theirs, env={**CLEAN, "TERM": "xterm", "COLUMNS": "100"})
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 65536):
            shown += chunk
    except OSError:  # the terminal has gone with the process
        pass
    assert process.wait() == 0
    _is_readable(re.sub(r"\x1b\[[0-9;]*m", "", shown.decode()).replace("\r", ""), tree("0.23.0"))
    try:
        import rich  # noqa: F401
    except ImportError:
        assert b"\x1b" not in shown
    else:
        assert b"\x1b[33mneeded" in shown


@pytest.mark.parametrize("version", ["0.14.0", "0.33.0", *NIGHTLIES])
def test_the_table_fits_in_100_columns_and_loses_nothing(status, version):
    _is_readable(status("--vllm", tree(version))[1], tree(version))


def _is_readable(text, root):
    """The lines of the table are no longer than 100; verdict, reason, module and origins are there, in one style."""
    table = [line for line in text.splitlines() if not line.startswith(("vLLM ", "door ")) and str(root) not in line]
    assert max(map(len, table)) <= 100
    whole = "".join("".join(line.strip("│ ").split()) for line in table).replace("│", "")
    for outcome in survey(root, SERIES):
        patch, (verdict, reason) = outcome.patch, outcome.verdict
        named = "".join(f"#{origin.rpartition('#')[2]}" for origin in patch.origin)
        start = f"{patch.name}{verdict}{patch.until or '-'}{''.join(reason.split())}{patch.module};"
        assert start in whole
        said = whole.partition(start)[2]
        assert "".join(re.findall(r"#\d+", said)[: len(patch.origin)]) == named
    assert "vllm-project" not in text and re.findall(r"vLLM\s+#\d+", text)


def test_nothing_of_vllm_or_torch_is_imported():
    code = (
        "import sys\nfrom vllm_rocm_fixes.cli import main\n"
        "for line in (['status'], ['status', '--json'], ['diff'], ['bake', '--check']):\n    main(line)\n"
        "print('LOADED', [m for m in sys.modules if m.split('.')[0] in ('vllm', 'torch', 'numpy', 'packaging')])"
    )
    done = subprocess.run([sys.executable, "-c", code], env=CLEAN, capture_output=True, text=True)
    assert "LOADED []" in done.stdout, done.stdout + done.stderr


def test_strict_fails_on_unknown_but_not_on_what_is_skipped(status, root, monkeypatch):
    assert status("--strict", "--vllm", root)[0] == 0
    text = (root / SAMPLER).read_text()
    (root / SAMPLER).write_text(text.replace("class TopKTopPSampler", "class Renamed"))
    assert status("--vllm", root)[0] == 0
    code, said = status("--strict", "--json", "--vllm", root)
    assert code == 1
    assert [p["name"] for p in said["patches"] if p["verdict"] == "unknown"] == ["sampler"]
    monkeypatch.setenv("ROCM_FIXES_SKIP", "sampler")
    code, said = status("--strict", "--json", "--vllm", root)
    assert (code, said["patches"][0]["outcome"]) == (0, "skipped")


@pytest.mark.parametrize("shut", [{"ROCM_FIXES": "off"}, {"VLLM_PLUGINS": "other"}], ids=lambda shut: next(iter(shut)))
def test_strict_fails_where_the_overlay_is_not_let_in(shut):
    """As a gate of an image: nothing would be mended there."""
    command = [sys.executable, "-m", "vllm_rocm_fixes", "status", "--strict"]
    assert subprocess.run(command, env=CLEAN, capture_output=True).returncode == 0
    assert subprocess.run(command, env=CLEAN | shut, capture_output=True).returncode == 1
    assert subprocess.run(command[:-1], env=CLEAN | shut, capture_output=True).returncode == 0


def test_a_patch_that_needs_a_guard_says_that_it_is_refused(status, monkeypatch):
    monkeypatch.setenv("ROCM_FIXES_SKIP", "hip")
    _, said = status("--json", "--vllm", tree("0.23.0"))
    patch = next(p for p in said["patches"] if p["name"] == "all2all_utils")
    assert patch["verdict"] == "needed" and patch["outcome"] == "refused" and "hip" in patch["reason"]
    assert next(g for g in said["guards"] if g["name"] == "hip")["verdict"] == "clear"


@pytest.mark.parametrize(
    "release, module, since, until, expected",
    [
        ("0.23.0", "vllm.not_there", "0.24.0", None, "absent"),  # came later
        ("0.23.0", "vllm.not_there", "0.23.0", None, "unknown"),  # should be there: moved
        ("0.23.0", "vllm.not_there", "0.14.0", "0.22.0", "absent"),  # gone with the defect
        ("0.23.0", "vllm.not_there", "0.14.0", "0.23.1", "unknown"),
        ("0.23.1.dev202608050841", "vllm.not_there", "0.23.1", None, "absent"),
        ("0.23.1.dev202608050841", "vllm.not_there", "0.14.0", "0.23.0", "absent"),
        ("0.23.0+rocm723", "vllm.not_there", "0.23.0", None, "unknown"),
        (None, "vllm.not_there", "0.24.0", None, "unknown"),
        ("0.23.0", "tests.not_there", "0.14.0", None, "unknown"),  # a checkout has its tests
    ],
)
def test_a_missing_module_is_absent_only_where_that_is_as_it_should_be(release, module, since, until, expected):
    patch = SERIES[0]._replace(module=module, since=since, until=until)
    root = tree("0.23.0")
    assert installed.path_of(root, module) is None
    assert installed.missing(patch, root, release).kind == expected


def test_the_tests_of_another_project_in_site_packages_are_nobodys(tmp_path):
    patch = next(p for p in SERIES if p.module == "tests.utils")
    assert installed.path_of(tree("0.23.0"), "tests.utils") == tree("0.23.0") / "tests" / "utils.py"
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "utils.py").touch()
    assert installed.path_of(tmp_path, "tests.utils") is None
    assert installed.missing(patch, tmp_path, "0.23.0").kind == "absent"


def test_versions_are_in_the_order_of_pep_440():
    from packaging.version import Version

    versions = ["0.9.0", "0.14.0", "0.23.0.dev1", "0.23.0a1", "0.23.0rc1.dev3", "0.23.0rc1", "0.23.0"]
    versions += ["0.23.0.post1.dev2", "0.23.0.post1", "0.23.1.dev202608050841", "0.23.1", "0.26.0", "1.0"]
    assert sorted(versions, key=Version) == versions
    for i, one in enumerate(versions):
        for j, other in enumerate(versions):
            assert installed.older(one, other) == (i < j), (one, other)
            assert installed.older(f"{one}+rocm723", f"{other}+gabc") == (i < j)
    assert not installed.older("0.23", "0.23.0") and not installed.older("0.23.0", "0.23")


def test_whether_the_version_can_be_believed(status, root):
    assert status("--vllm", root)[1].startswith(f"vLLM 0.23.0 in {root} (there is no metadata beside it)")
    distribution(root, "vllm", "0.23.0+rocm723")
    assert status("--json", "--vllm", root)[1]["vllm"]["believed"] is True
    shutil.rmtree(root / "vllm-0.23.0+rocm723.dist-info")
    distribution(root, "vllm", "0.22.1")
    _, said = status("--json", "--vllm", root)
    assert said["vllm"]["believed"] is False
    assert said["vllm"]["doubt"] == "the files say 0.23.0, the metadata says 0.22.1"
    (root / "vllm" / "_version.py").write_text("raise SystemExit('run')\n")
    _, said = status("--json", "--vllm", root)
    assert said["vllm"]["version"] is None and said["vllm"]["doubt"] == "vllm/_version.py names no version"
    (root / "vllm" / "_version.py").unlink()
    assert status("--vllm", root)[1].startswith("vLLM of unknown version")


def test_an_editable_vllm_has_its_metadata_elsewhere(root, tmp_path):
    distribution(tmp_path / "site", "vllm", "0.20.0")
    child = [sys.executable, "-S", "-m", "vllm_rocm_fixes", "status", "--json"]
    package = tmp_path / "code" / "vllm_rocm_fixes"
    checkout = Path(baking.__file__).parent
    package.parent.mkdir()
    shutil.copytree(checkout, package, ignore=shutil.ignore_patterns("patches", "__pycache__"))
    shutil.copytree(Path(sys.modules["vllm_rocm_fixes.patches"].__file__).parent, package / "patches")
    path = os.pathsep.join(map(str, (root, tmp_path / "site", tmp_path / "code")))
    done = subprocess.run(child, env={**CLEAN, "PYTHONPATH": path}, cwd=tmp_path, capture_output=True, text=True)
    said = json.loads(done.stdout)
    assert said["vllm"]["root"] == str(root)
    assert said["vllm"]["doubt"] == "the files say 0.23.0, the metadata says 0.20.0"
    # Here the overlay runs from a folder and isn't installed: vLLM would not find it.
    assert [d["open"] for d in said["doors"]] == [False, False]
    assert "isn't installed" in said["doors"][0]["reason"]


# Doors


def test_doors_of_an_environment(tmp_path):
    site = tmp_path / "site"
    distribution(site, "vllm-rocm-fixes", __version__, **OURS)
    here = [str(site)]
    assert [(d.group, d.open) for d in doors.look(here, {})] == [
        ("vllm.platform_plugins", True),
        ("vllm.general_plugins", True),
    ]
    assert all(d.open for d in doors.look(here, {"VLLM_PLUGINS": "other,rocm_fixes"}))
    for value, why in {
        "": "keeps vllm-rocm-fixes out: add rocm_fixes",
        "lora_filesystem_resolver": "keeps vllm-rocm-fixes out: add rocm_fixes",
        "vllm_rocm_fixes": "called rocm_fixes, not vllm_rocm_fixes",
        "other, rocm_fixes": "called rocm_fixes",  # vLLM doesn't take the space away
    }.items():
        found = doors.look(here, {"VLLM_PLUGINS": value})
        assert not any(d.open for d in found) and why in found[0].reason, value
    found = doors.look(here, {"ROCM_FIXES": "off"})
    assert not any(d.open for d in found) and "ROCM_FIXES=off" in found[0].reason
    found = doors.look([str(tmp_path)], {})
    assert not any(d.open for d in found) and "isn't installed in this environment" in found[0].reason


def test_doors_of_an_old_installation_and_of_a_twin(tmp_path):
    site = tmp_path / "site"
    old = distribution(site, "vllm-rocm-fixes", "0.0.9", vllm__general_plugins=OURS["vllm__general_plugins"])
    platform, general = doors.look([str(site)], {})
    assert not platform.open and "0.0.9 as installed has no vllm_rocm_fixes:prepare" in platform.reason
    assert general.open and "metadata is of 0.0.9" in general.reason
    distribution(site, "vllm-rocm-fixes", __version__, **OURS)
    assert any("installed 2 times: " in d.reason for d in doors.look([str(site)], {}))
    shutil.rmtree(old)
    distribution(site, "somebody-else", "1.0", vllm__general_plugins="rocm_fixes = somebody:register")
    platform, general = doors.look([str(site)], {})
    assert "somebody-else has a plugin of the same name" in general.reason
    assert platform.reason == "rocm_fixes -> vllm_rocm_fixes:prepare"


def test_the_doors_told_are_those_of_the_image_that_was_named(status, root):
    distribution(root, "vllm", "0.23.0")
    _, said = status("--json", "--vllm", root)
    assert [d["open"] for d in said["doors"]] == [False, False]
    distribution(root, "vllm-rocm-fixes", __version__, **OURS)
    (root / "tilelang").mkdir()
    (root / "tilelang" / "__init__.py").touch()
    _, said = status("--json", "--vllm", root)
    assert [d["open"] for d in said["doors"]] == [True, True]
    assert next(g for g in said["guards"] if g["name"] == "hip")["verdict"] == "needed"


# What is baked


def test_what_is_baked_is_told(status, root):
    baking.bake(root, SERIES, "0.23.0")
    _, said = status("--json", "--strict", "--vllm", root)
    assert said["baked"]["overlay"] == __version__ and said["baked"]["finished"] is True
    assert {f["on_disk"] for f in said["baked"]["files"]} == {"baked"}
    sampler = said["patches"][0]
    assert (sampler["verdict"], sampler["outcome"]) == ("clear", "baked") and sampler["reason"].endswith("; baked")
    assert f"baked by {__version__}: these files\n  {SAMPLER} (baked)\n" in status("--vllm", root)[1]
    record = root / baking.STORE / "record.json"
    record.write_text(record.read_text().replace('"finished": true', '"finished": false'))
    assert "it was interrupted" in status("--vllm", root)[1]
    record.chmod(0o666)
    _, said = status("--json", "--vllm", root)
    assert said["baked"] is None and "another user" in said["baked_trouble"]
    assert next(p for p in said["patches"] if p["name"] == "sampler")["verdict"] == "clear"


# The command line


def test_errors_are_one_line(tmp_path, capsys):
    (tmp_path / "vllm").mkdir()
    inside = tree("0.23.0") / "vllm"
    for arguments, part in {
        ("status", "--vllm", str(tmp_path)): "no vllm/__init__.py",
        ("status", "--vllm", str(inside)): "name the folder above",
        ("status", "--vllm", "/nowhere"): "no vllm/__init__.py in /nowhere",
        ("status", "--jsn"): "unrecognized arguments: --jsn",
        ("stat",): "invalid choice",
        ("verify", "--limit", "-3"): "--limit: -3 isn't a number of seconds, above 0 and up to a million; see",
        ("verify", "--limit", "0"): "0 isn't a number of seconds",
        ("verify", "--limit", "nan"): "nan isn't a number of seconds",
        ("verify", "--limit", "1e9"): "1e9 isn't a number of seconds",
        ("verify", "--limit", "soon"): "soon isn't a number of seconds",
        ("doctor", "--pid", "-3"): "--pid: -3 isn't the id of a process; see",
        ("doctor", "--pid", "vllm"): "vllm isn't the id of a process",
        ("doctor", "--pid", "9" * 300): "isn't the id of a process",
        (): "a command is needed",
    }.items():
        try:
            code = main(arguments)
        except SystemExit as ended:
            code = ended.code
        said = capsys.readouterr()
        assert code == 2 and said.out == "", arguments
        assert said.err.startswith("vllm-rocm-fixes: ") and said.err.count("\n") == 1 and part in said.err, said.err


def test_no_vllm_and_one_in_an_archive_are_told(tmp_path):
    archive = tmp_path / "vllm.zip"
    with zipfile.ZipFile(archive, "w") as written:
        written.writestr("vllm/__init__.py", "")
    code = "import sys\nsys.path[:] = [p for p in sys.path if 'site-packages' not in p]\n"
    code += "from vllm_rocm_fixes.cli import main"
    for path, part in ((str(archive), "lies in an archive"), ("", "no vLLM in this Python environment")):
        lines = [code, "sys.path.insert(0, sys.argv[1]) if sys.argv[1] else None", "sys.exit(main(['status']))"]
        child = [sys.executable, "-c", "\n".join(lines), path]
        done = subprocess.run(child, env=CLEAN, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 2 and part in done.stderr and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_there_for_every_command(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert said.startswith(f"usage: vllm-rocm-fixes {name} ") and len(said.splitlines()) > 8
    with pytest.raises(SystemExit):
        main(["--help"])
    assert f"    {name} " in capsys.readouterr().out


def test_a_reader_that_has_enough_is_no_error():
    line = f"{sys.executable} -m vllm_rocm_fixes diff --vllm {tree('0.23.0')} | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], env=CLEAN, capture_output=True, text=True)
    assert done.stdout.startswith("Description: ") and "Traceback" not in done.stderr


FULL = 2, "vllm-rocm-fixes: stdout can't be written: No space left on device\n"
CLOSED = 2, "vllm-rocm-fixes: stdout can't be written: it is closed\n"


@pytest.mark.parametrize(
    ("stdout", "arguments", "wanted"),
    [
        *((">/dev/full", arguments, FULL) for arguments in ("ps", "diff sampler --vllm {}", "trace -- true", "--help")),
        *((">&-", arguments, CLOSED) for arguments in ("ps", "diff sampler --vllm {}", "--version")),
        *(("> >(exec true)", arguments, (141, "")) for arguments in ("ps", "diff sampler --vllm {}", "--help")),
    ],
)
def test_output_that_goes_nowhere(stdout, arguments, wanted):
    text = f'exec {stdout}; sleep 0.2; exec "$@"'  # the reader is gone before anything is written
    words = [sys.executable, "-m", "vllm_rocm_fixes", *arguments.format(tree("0.23.0")).split()]
    environ = {k: v for k, v in CLEAN.items() if k != "PYTHONUNBUFFERED"}  # argparse hides what its own write raises
    done = subprocess.run(["bash", "-c", text, "bash", *words], env=environ, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == wanted


@pytest.mark.parametrize("switches", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}])
def test_what_the_terminal_has_no_character_for(root, switches):
    """Such a character comes from a file, or from the name of one."""
    file = root / "vllm" / "_version.py"
    file.write_text(file.read_text(encoding="utf-8").replace("0.23.0", "0.23.0+ü"), encoding="utf-8")
    command = [sys.executable, "-m", "vllm_rocm_fixes", "status", "--vllm", str(root.rename(root.with_name("größe")))]
    done = subprocess.run(command, env=CLEAN | switches, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    name = r"gr\xf6\xdfe" if len(switches) == 1 else r"gr\udcc3\udcb6\udcc3\udc9fe"
    assert r"vLLM 0.23.0+\xfc in " in done.stdout and f"/{name} " in done.stdout


def complete(words):
    line = f"{sys.executable} -m vllm_rocm_fixes --completion bash"
    text = f"""eval "$({line})"; COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _vllm_rocm_fixes
        printf '%s\\n' "${{COMPREPLY[@]}}"; complete -p vllm-rocm-fixes"""
    done = subprocess.run(["bash", "-c", text], env=CLEAN, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout.splitlines()[:-1]


def test_bash_completes_commands_options_and_names_of_patches():
    assert complete("vllm-rocm-fixes st") == ["status"]
    assert set(COMMANDS) <= set(complete("vllm-rocm-fixes ''"))
    assert complete("vllm-rocm-fixes status --js") == ["--json"]
    assert complete("vllm-rocm-fixes diff sam") == ["sampler"]
    assert complete("vllm-rocm-fixes bake sam") == [""]


def test_scripts_for_zsh_and_fish(capsys):
    assert main(["--completion", "zsh"]) == 0
    assert capsys.readouterr().out.startswith("autoload -U +X bashcompinit && bashcompinit\n_vllm_rocm_fixes() {")
    assert main(["--completion", "fish"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(" -n __fish_use_subcommand -a status -d " in line for line in lines)
    assert any("__fish_seen_subcommand_from diff' -a sampler" in line for line in lines)
