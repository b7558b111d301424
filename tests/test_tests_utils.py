"""vLLM's own test helpers: what the processes they start find in PYTHONPATH, and who gets no such help."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from on_release import report
from releases import tree

from vllm_rocm_fixes.mend import mend
from vllm_rocm_fixes.patches import tests_utils
from vllm_rocm_fixes.patches.tests_utils import clean_environment, cleaned, without_tvm
from vllm_rocm_fixes.pytest_plugin import is_checkout

ROOT = Path(__file__).parent.parent
# What upstream cleans by itself from 0.24.0 on.
UPSTREAM = {"server", "server with its own", "server process", "download that fails"}


@pytest.mark.parametrize("release", ["0.14.1", "0.23.0", "0.24.0", "0.33.0"])
def test_no_process_that_is_started_gets_tilelangs_folder(release):
    stock, ours = report(release, "tests_utils")
    assert ours["state"] == "waiting"
    assert set(stock["processes"]) == set(ours["processes"])
    for name, found in ours["processes"].items():
        assert found["tvm"] == [], f"{name} in {release}"
        assert found["others"] == [], f"{name} in {release}: an entry that is the user's own was dropped"
        assert found["as before"], f"{name} in {release} changed its caller's environment"
        assert found["raised"] is None or "fails" in name or "Ray" in name, f"{name}: {found['raised']}"
    upstream = UPSTREAM if release >= "0.24.0" else set()
    for name, found in stock["processes"].items():
        assert bool(found["tvm"]) == (name not in upstream), f"{name} in stock {release}"
    if upstream:  # and upstream drops what only has the folder's name in it
        assert stock["processes"]["server"]["others"] != []


# The door


@pytest.fixture
def session(tmp_path):
    """Runs a real pytest, with or without our plugin, in a folder with a tests/utils.py; returns what the test saw."""
    door = tmp_path / "door" / "door-1.dist-info"
    door.mkdir(parents=True)
    declared = re.search(r"entry-points.pytest11\]\n(\w+) = \"(.+)\"\n", (ROOT / "pyproject.toml").read_text())
    assert declared is not None
    (door / "entry_points.txt").write_text(f"[pytest11]\n{declared[1]} = {declared[2]}\n")
    (door / "METADATA").write_text("Metadata-Version: 2.1\nName: door\nVersion: 1\n")

    def run(utils: str, test: str, *options: str) -> str:
        checkout = tmp_path / "checkout"
        (checkout / "tests").mkdir(parents=True, exist_ok=True)
        (checkout / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
        (checkout / "tests" / "__init__.py").touch()
        (checkout / "tests" / "utils.py").write_text(utils)
        (checkout / "tests" / "conftest.py").write_text("import tests.utils\n")
        (checkout / "tests" / "test_it.py").write_text(test)
        path = os.pathsep.join(
            [str(door.parent), str(ROOT), str(tmp_path / "tilelang" / "3rdparty" / "tvm" / "python")]
        )
        env = {k: v for k, v in os.environ.items() if not k.startswith(("ROCM_FIXES", "PYTEST"))} | {"PYTHONPATH": path}
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-s", "tests", *options]
        done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True)
        return done.stdout + done.stderr

    return run


# The helper alone, out of the real file: the whole of it would import vLLM.
def helper(release: str) -> str:
    import ast

    source = ast.parse((tree(release) / "tests" / "utils.py").read_text())
    names = ("RemoteOpenAIServer", "RemoteOpenAIServerCustom", "RemoteVLLMServer", "multi_process_parallel")
    kept = [
        node
        for node in source.body
        if (isinstance(node, ast.FunctionDef) and (node.name.endswith("_process_for_each_test") or node.name in names))
        or (isinstance(node, ast.ClassDef) and node.name in names)
        or (isinstance(node, ast.Assign) and ast.unparse(node).startswith("_P ="))
    ]
    head = "from __future__ import annotations\nimport contextlib, functools, os, signal, subprocess, sys, tempfile\n"
    head += "import cloudpickle, threading\nfrom contextlib import ExitStack\nfrom typing import ParamSpec\n"
    head += "if False:\n    from vllm import version\n"
    text = head + "\n".join(ast.unparse(node) for node in kept)
    return text.replace("class RemoteLaunchRenderServer", "class Other")


FORKED = """
import os
from tests.utils import fork_new_process_for_each_test

@fork_new_process_for_each_test
def test_path():
    print("child has", [e for e in os.environ["PYTHONPATH"].split(":") if e.endswith("tvm/python")])
"""


def test_vllms_own_session_is_mended(session):
    utils = helper("0.23.0")
    assert "child has []" in session(utils, FORKED)
    assert "tvm/python']" in session(utils, FORKED, "-p", "no:rocm_fixes")


def test_another_projects_session_is_left_alone(session):
    utils = "import sys\nclass RemoteOpenAIServer:\n    pass\n"
    test = (
        "import sys, tests.utils\ndef test(): print('loaded', sorted(m for m in sys.modules if m.startswith('vllm')), "
    )
    test += "type(tests.utils.__spec__.loader).__name__)\n"
    said = session(utils, test)
    assert "loaded ['vllm_rocm_fixes', 'vllm_rocm_fixes.pytest_plugin'] SourceFile" in said
    assert "warning" not in said.lower()


# The pieces


@pytest.mark.unit
def test_another_projects_file_is_absent_and_no_warning():
    for text in ("def helper(): ...", "class RemoteOpenAIServer: ...", "import vllm"):
        outcome = mend(text, "utils.py", [tests_utils.PATCH]).outcomes[0]
        assert outcome.verdict.kind == "absent"
    half = "import vllm\nclass RemoteOpenAIServer:\n    def _start_server(self): subprocess.Popen([], env=env)\n"
    assert mend(half, "utils.py", [tests_utils.PATCH]).outcomes[0].verdict.kind == "unknown"


@pytest.mark.unit
def test_nothing_but_that_folder_is_removed():
    folder = "/venv/lib/python3.12/site-packages/tilelang/3rdparty/tvm/python"
    kept = ["", f"{folder}x", f"{folder}/x", "/my-tilelang/3rdparty/tvm/python", "tvm/python", "/opt/tvm/python"]
    assert without_tvm(":".join([folder, *kept, folder + "/", folder + "/../python"])) == ":".join(kept)
    assert without_tvm(None) == without_tvm("") == without_tvm(folder) == ""
    assert without_tvm("a::b") == "a::b"
    assert cleaned({"PYTHONPATH": folder, "A": "1"}) == {"A": "1"}
    assert cleaned({"PYTHONPATH": ""}) == {"PYTHONPATH": ""}


@pytest.mark.unit
@pytest.mark.parametrize("before", [None, "", "/a", "/t/tilelang/3rdparty/tvm/python:/a"])
def test_the_environment_is_put_back(monkeypatch, before):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if before is not None:
        monkeypatch.setenv("PYTHONPATH", before)
    with pytest.raises(KeyError), clean_environment():
        assert "tilelang" not in os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = "/changed/by/a/download"
        raise KeyError
    assert os.environ.get("PYTHONPATH") == before


@pytest.mark.unit
def test_a_checkout_is_known_by_its_content(tmp_path):
    assert is_checkout(tree("0.23.0"))
    assert is_checkout(tree("0.33.0") / "tests" / "kernels")
    assert not is_checkout(tmp_path)
    assert not is_checkout(ROOT)
