"""What README.md shows is what the commands print."""

import os
import re
import subprocess
import sys
from pathlib import Path

from releases import tree

from vllm_rocm_fixes import settings
from vllm_rocm_fixes.guards import GUARDS
from vllm_rocm_fixes.patches import SERIES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
OPERATORS = (ROOT / "docs" / "operators.md").read_text()


def said(*command):
    environ = dict(os.environ)  # without what readline sets behind Python's back in a pytest: COLUMNS
    command = [sys.executable, "-m", "vllm_rocm_fixes", *command]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout


def shown(first, last):
    """The indented lines of the README from one to another, without their indentation."""
    block = README[README.index(f"    {first}") : README.index(f"    {last}")]
    return "".join(line[4:] for line in block.splitlines(keepends=True))


def test_the_diff_is_real():
    assert shown("--- a/vllm/utils/jit_monitor.py", "    try:") in said(
        "diff", "jit_monitor", "--vllm", str(tree("0.27.1"))
    )


def test_the_verdicts_are_real():
    root = str(tree("0.23.0"))
    for page in (README, OPERATORS):
        lines = said("status", "--vllm", root).replace(root, "DIR" if page is README else "/opt/image").splitlines()
        block = re.match(r"(?:(?:    .*)?\n)+", page[page.index("    vLLM 0.23.0 in") :])
        told = [line[4:] for line in block[0].rstrip().splitlines()]
        assert len(told) > 10
        at = -1
        for line, before in zip(told, ["", *told], strict=False):
            if line != "...":
                found = lines.index(line, at + 1)
                assert before == "..." or found == at + 1, line
                at = found


def test_every_patch_guard_and_switch_is_named():
    table = README[: README.index("## Install")]
    for name in [part.name for part in (*SERIES, *GUARDS)]:
        assert f"`{name}`" in table, name
    assert set(re.findall(r"\bROCM_FIXES\w*", README)) <= set(settings.SWITCHES)


def test_the_releases_of_a_patch_are_those_of_its_record():
    """A row that names one patch alone begins no earlier than `since`, and ends before `until`."""
    for first, last, name in re.findall(r"^\| (0\.\d+)\.\d to 0\.(\d+)\.\d \|.*\| `(\w+)` \|$", README, re.M):
        patch = next(p for p in SERIES if p.name == name)
        assert int(first.split(".")[1]) >= int(patch.since.split(".")[1]), name
        assert patch.until is None or int(last) < int(patch.until.split(".")[1]), name


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
