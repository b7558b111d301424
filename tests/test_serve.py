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
    log = tmp_path / "serve.log"
    tool = subprocess.Popen(
        [sys.executable, ROOT / "tools" / "serve.py", "--log", log], stdout=subprocess.PIPE, text=True
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
