"""Real `vllm serve`s of stock vLLM on a real model: with the overlay switched off, and with it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import serve

ROOT = Path(__file__).parent.parent


def group(leader):
    """The processes of a process group that are alive."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if pgrp == str(leader) and state != "Z":
            found.append(int(stat.parent.name))
    return found


def left(leader):
    """Those that are still there ten seconds later: a killed process needs a moment to give its memory back."""
    deadline = time.monotonic() + 10
    while (found := group(leader)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """What ROCM_FIXES=off and nothing at all lead to: lines of each process, answers, processes before and after."""
    found = {}
    for state, environment in {"off": {"ROCM_FIXES": "off"}, "on": {}}.items():
        with serve.serving(tmp_path_factory.mktemp(state) / "serve.log", environment) as server:
            answers = [server.ask(), server.ask(), server.ask(seed=8, temperature=1.5, top_p=1.0, top_k=-1)]
            found[state] = server.overlay(), answers, len(group(server.process.pid))
        found[state] += (left(server.process.pid),)
    return found


def test_each_process_says_what_the_overlay_did_once(served):
    off, on = served["off"][0], served["on"][0]
    assert off == {}
    assert set(on) == set(serve.PROCESSES)
    for process, lines in on.items():
        assert len(lines) == 1, process
        assert " on vLLM 0.32.0" in lines[0]
        assert "sampler" in lines[0]


def test_answers_are_those_of_stock(served):
    (_, stock, *_), (_, ours, *_) = served["off"], served["on"]
    assert "Paris" in ours[0]
    assert ours[0] == ours[1] != ours[2]
    assert ours == stock


def test_no_process_is_left(served):
    for state, (_, _, before, after) in served.items():
        assert before >= 3, state
        assert after == [], state


def test_terminated_while_it_starts_no_process_is_left(tmp_path):
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    tool = subprocess.Popen(
        [sys.executable, ROOT / "tools" / "serve.py"], stdout=subprocess.PIPE, text=True, env=environ
    )
    assert tool.stdout.readline().startswith("$ ")
    children = Path(f"/proc/{tool.pid}/task/{tool.pid}/children")
    deadline = time.monotonic() + 20
    # A child that was just forked is in no group of its own yet.
    while not ((leaders := children.read_text().split()) and group(leaders[0])) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert group(leaders[0])
    os.kill(tool.pid, signal.SIGTERM)
    assert tool.wait(30) == 128 + signal.SIGTERM
    assert left(leaders[0]) == []
    assert not list(tmp_path.glob("vllm-rocm-fixes-*"))  # the log is of no use to anybody


def test_a_bad_run_keeps_its_log_and_names_it(tmp_path):
    (tmp_path / "vllm.py").write_text("raise SystemExit('this vLLM is broken')")
    environ = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, ROOT / "tools" / "serve.py", "--once"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    [log] = tmp_path.glob("vllm-rocm-fixes-*/serve.log")
    assert done.returncode == 1 and done.stderr.endswith(f"ended with status 1; its log is {log}\n")
    assert log.read_text() == "this vLLM is broken\n"


def test_why_the_overlay_is_silent_is_told():
    command = [sys.executable, "-c", "import serve; print(serve.silence())"]
    for variables, said in {
        ("ROCM_FIXES", "off"): "ROCM_FIXES=off switches vllm-rocm-fixes off: unset it\n",
        ("VLLM_PLUGINS", ""): "VLLM_PLUGINS= keeps vllm-rocm-fixes out: add rocm_fixes to it, or unset it\n",
        ("PYTHONPATH", str(ROOT / "tools")): "no variable keeps it out: see what the log says of rocm_fixes\n",
    }.items():
        environ = {**os.environ, "PYTHONPATH": str(ROOT / "tools"), **dict([variables])}
        assert subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout == said
