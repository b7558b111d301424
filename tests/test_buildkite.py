"""The Buildkite steps: rendered, valid, and each runs here, where there is no AMD GPU."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent.parent
FOLDER = HERE / "ci" / "buildkite"
GPU = ["gpu-verify.sh", "gpu-serve.sh", "gpu-upstream.sh"]


def render(text=None, tmp_path=None, **environ):
    arguments = []
    if text is not None:
        (tmp_path / "steps.yaml").write_text(text)
        arguments = [str(tmp_path / "steps.yaml")]
    return subprocess.run(
        [sys.executable, str(FOLDER / "render.py"), *arguments],
        env={**os.environ, **environ}, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("source", ["webhook", "schedule"])
def test_the_pipeline_is_valid_for_buildkite(source, tmp_path):
    done = render(BUILDKITE_SOURCE=source)
    assert done.returncode == 0, done.stderr
    rendered = tmp_path / "pipeline.json"
    rendered.write_text(done.stdout)
    check = [str(Path(sys.executable).with_name("check-jsonschema")), "--builtin-schema", "vendor.buildkite"]
    valid = subprocess.run(
        [*check, str(rendered), str(FOLDER / "pipeline.yaml")], capture_output=True, text=True, check=False
    )
    assert valid.returncode == 0, valid.stdout
    steps = json.loads(done.stdout)["steps"]
    labels = {step.get("label") for step in steps}
    nightly = any("Nightly" in (label or "") for label in labels)
    assert nightly == (source == "schedule")
    assert {"verify --real (mi250_1)", "verify --real (mi300_1)", "verify --real (mi355_1)"} <= labels
    asked = [step for step in steps if "block" in step]
    assert len(asked) == (0 if source == "schedule" else 2)
    # Every script that is named is there, and can be executed.
    commands = [command for step in steps for command in step.get("commands", ())]
    for command in commands:
        assert os.access(HERE / command.split()[1], os.X_OK), command
    # A step that waits for another waits for one that is there.
    keys = {step.get("key") for step in steps}
    for step in steps:
        wanted = step.get("depends_on", [])
        assert set([wanted] if isinstance(wanted, str) else wanted) <= keys, step


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("steps:\n- label: A\n  agent_pool: x\n  timeout_in_minutes: 1\n", "A: a step needs commands"),
        ("steps:\n- label: A\n  comands: [x]\n", "A: no such word: comands"),
        ("steps:\n- label: A\n  mirror_hardwares: [amdmi999]\n  commands: [x]\n", "amdmi999"),
        ("steps: [", "while parsing"),
    ],
)
def test_a_step_that_cannot_be_rendered_is_one_plain_error(text, said, tmp_path):
    done = render(text, tmp_path)
    assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr


def run(script, **environ):
    return subprocess.run(
        ["bash", str(FOLDER / "scripts" / script)],
        env={**os.environ, **environ}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


@pytest.mark.skipif(Path("/dev/kfd").exists(), reason="this machine has an AMD GPU: the steps would run")
@pytest.mark.parametrize("script", GPU)
def test_what_needs_a_gpu_says_so_and_ends_well_without_one(script):
    done = run(script)
    assert done.returncode == 0 and done.stdout.startswith("no AMD GPU here"), done.stderr


def test_every_script_is_called_by_a_step_or_a_script():
    text = "".join(path.read_text() for path in [*FOLDER.rglob("*.sh"), *FOLDER.glob("*.yaml")])
    for script in (FOLDER / "scripts").iterdir():
        assert script.name == "upload.sh" or f"/{script.name}" in text, script


@pytest.mark.skipif(
    shutil.which("shellcheck") is None, reason=".ci/run installs shellcheck; elsewhere it may be missing"
)
def test_the_scripts_pass_shellcheck():
    scripts = [*FOLDER.rglob("*.sh"), *(HERE / "docker").glob("*.sh"), HERE / ".ci/run"]
    done = subprocess.run(
        ["shellcheck", "-x", "-P", str(FOLDER / "scripts"), *map(str, scripts)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
