"""docker/: the files are valid; tests/image.py builds and tries the images, which `.ci/run` calls by `make image`."""

import subprocess
import sys
from pathlib import Path

import pytest

DOCKER = Path(__file__).parent.parent / "docker"


def program(name, *arguments):
    command = [str(Path(sys.executable).with_name(name)), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_hadolint_is_clean():
    done = program("hadolint", DOCKER / "Dockerfile")
    assert (done.returncode, done.stdout) == (0, ""), done.stdout


def test_compose_and_kubernetes_files_are_valid():
    done = program("check-jsonschema", "--builtin-schema", "vendor.compose-spec", DOCKER / "compose.yaml")
    assert done.returncode == 0, done.stdout
    done = program("kubernetes-validate", "--strict", DOCKER / "kubernetes.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["compose.yaml", "kubernetes.yaml"])
def test_a_file_that_is_wrong_is_found(name, tmp_path):
    text = (DOCKER / name).read_text().replace("image:", "imagge:")
    (tmp_path / name).write_text(text)
    checker = ("check-jsonschema", "--builtin-schema", "vendor.compose-spec")
    done = program(*(checker if name == "compose.yaml" else ("kubernetes-validate", "--strict")), tmp_path / name)
    assert done.returncode != 0


def test_what_amd_needs_is_there():
    for name, words in {
        "compose.yaml": ("/dev/kfd", "/dev/dri", "group_add", "shm_size", "healthcheck"),
        "kubernetes.yaml": ("amd.com/gpu", "supplementalGroups", "/dev/shm", "startupProbe", "readinessProbe"),
    }.items():
        text = (DOCKER / name).read_text()
        assert [word for word in words if word not in text] == []
