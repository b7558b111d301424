"""What README.md shows is what the commands print."""

import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections import Counter
from pathlib import Path

from releases import releases, tree

from vllm_rocm_fixes import settings
from vllm_rocm_fixes.guards import GUARDS
from vllm_rocm_fixes.patches import SERIES
from vllm_rocm_fixes.survey import survey

ROOT = Path(__file__).parent.parent
SITE = Path(sysconfig.get_path("purelib"))
README = (ROOT / "README.md").read_text()
OPERATORS = (ROOT / "docs" / "operators.md").read_text()


def said(*command):
    environ = dict(os.environ)  # without what readline sets behind Python's back, after tests/conftest.py: COLUMNS
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


def test_how_to_find_the_folder_of_a_vllm(tmp_path):
    """The README's question, asked of this environment's Python, which imports nothing for it; and a wheel's folder."""
    ask = re.search(r"\$ ASK='(.+)'\n", README)[1]
    command = [sys.executable, "-c", f"{ask}; import sys; assert 'vllm' not in sys.modules"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()
    assert said("status", "--vllm", found).startswith(f"vLLM 0.32.0 in {found} ")
    with zipfile.ZipFile(tmp_path / "vllm-0.23.0-any.whl", "w") as wheel:
        for name in ("vllm/__init__.py", "vllm/_version.py", "vllm/v1/sample/ops/topk_topp_sampler.py"):
            wheel.write(tree("0.23.0") / name, name)
    assert "$ python3 -m zipfile -e vllm-0.23.0-*.whl DIR" in README
    subprocess.run([sys.executable, "-m", "zipfile", "-e", "vllm-0.23.0-any.whl", "DIR"], cwd=tmp_path, check=True)
    assert "\nsampler                needed " in said("status", "--vllm", str(tmp_path / "DIR"))


def test_the_counts_are_those_of_the_series():
    """What a process says of itself, and the rows of ps, of the vLLM that is installed here."""
    verdicts = Counter(outcome.verdict.kind for outcome in survey(SITE, SERIES))
    usual = f"{verdicts['clear']} clear; {verdicts['absent']} absent"
    [line] = re.findall(r"    Worker: vllm-rocm-fixes .* on vLLM 0.32.0: (.*\n(?:    .*\n)+)", README)
    named, found, _ = " ".join(line.split()).partition(usual)
    assert found and len(re.findall(r"\w+(?=,| needed)", named)) == verdicts["needed"]
    rows = re.findall(r"(\d+) applied; (\d+) when imported; (.*)", OPERATORS)
    assert len(rows) == 3
    for applied, waiting, rest in rows:
        assert (int(applied) + int(waiting), rest) == (verdicts["needed"], usual)


def test_the_lines_about_the_sampler_are_real():
    flat = " ".join(README.split())
    stock = {v: (tree(v) / "vllm/v1/sample/ops/topk_topp_sampler.py").read_text() for v in releases()}
    assert "`Using aiter sampler on ROCm (lazy import, sampling-only).`" in flat
    assert all('"Using aiter sampler on ROCm (lazy import, sampling-only)."' in text for text in stock.values())
    ours = "AITER's sampler is switched off (ROCM_FIXES_AITER_SAMPLER): PyTorch's native sampler answers"
    assert f"`{ours}`" in flat and ours in (ROOT / "patches" / "sampler.py").read_text()
    never = [v for v, text in stock.items() if "if DISABLE_AITER_SAMPLER:" in text]
    assert never == releases()[: len(never)] and f"Up to {never[-1]} neither line" in flat


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
