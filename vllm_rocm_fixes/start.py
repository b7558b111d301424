"""Starts stock vLLM on a stand-in node, step by step: what each step imported, and whether it asked for a GPU.

The steps themselves are in standin/node/rocm_standin/start.py, which runs on the node.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .node import Event, Node

GPU = "GPU"
HAZARDS = ("aiter", "tilelang", "tvm", "mori", "deep_ep", "nixl_ep", "moonep", "flashinfer", "flash_attn")
STEPS = (
    "vllm.config",
    "config dense",
    "config moe",
    "config mla",
    "config fp8",
    "config quark",
    "worker",
    "all2all_utils",
    "kernel_warmup",
    "fa_utils",
    "sampler",
    "jit_monitor",
    "children",
    "forked child",
    "spawned child",
)


@dataclasses.dataclass(frozen=True)
class Found:
    """A package that a step imported, or a request that initialises HIP (what is GPU).

    by is the frame that asked, `file:line function` with the file relative to its package's parent folder; what a
    stand-in does is put to the account of the frame that imported it. chain leads to it, from the first frame of vLLM
    on. child says that it happened in a subprocess of the step, such as the one in which vLLM looks at a model class.
    """

    step: str
    what: str
    by: str
    chain: tuple[str, ...]
    child: bool


@dataclasses.dataclass(frozen=True)
class Start:
    """What one start did: the outcome of each step ("ok" or the error), and what was found, in order."""

    outcomes: dict[str, str]
    found: tuple[Found, ...]

    def cell(self, step: str) -> list[str]:
        """What was found in one step, each thing once."""
        return list(dict.fromkeys(found.what for found in self.found if found.step == step))


def start(
    node: Node,
    *,
    overlay: bool,
    steps: Sequence[str] = (),
    together: bool = False,
    timeout: float = 900,
) -> Start:
    """Run the steps (all by default) on the node and read its event log; the log is cleared first.

    overlay False switches the overlay off in every process of the start. together runs the steps in one process:
    faster, but a package that one step imported isn't found again in the next. timeout is in seconds.

    Raises subprocess.TimeoutExpired, and RuntimeError where the start itself didn't come to its end.
    """
    node.clear()
    command = [sys.executable, "-m", "rocm_standin.start", *(["--together"] if together else []), *steps]
    environment = node.environment(ROCM_FIXES="on" if overlay else "off")
    done = subprocess.run(
        command, cwd=node.folder, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    output = done.stdout + done.stderr
    if done.returncode:
        raise RuntimeError(f"the start ended with {done.returncode}:\n{output[-4000:]}")
    return _read(node)


def _read(node: Node) -> Start:
    events = node.events()
    outcomes = {event.name: event.detail for event in events if event.kind == "step"}
    owners = {event.name: event.pid for event in events if event.kind == "step"}
    found = [_found(node, event, event.pid != owners.get(event.step)) for event in events if _counts(event)]
    return Start(outcomes, tuple(found))


def _counts(event: Event) -> bool:
    return bool(event.step) and (event.kind == "gpu" or (event.kind == "import" and event.name in HAZARDS))


def _inside(node: Node, frame: str) -> bool:
    """A frame of the stand-ins, or of the overlay's loader, which is part of the import system."""
    return frame.startswith((f"{node.folder}/", f"{Path(__file__).with_name('importing.py')}:"))


def _found(node: Node, event: Event, child: bool) -> Found:
    chain = [frame for frame in event.chain if not _inside(node, frame)]
    chain = [_short(node, frame) for frame in chain]
    first = next((index for index, frame in enumerate(chain) if frame.startswith("vllm/")), 0)
    chain = chain[first:]
    what = event.name if event.kind == "import" else GPU
    return Found(event.step, what, chain[-1] if chain else "", tuple(chain), child)


def _short(node: Node, frame: str) -> str:
    """The frame with its file relative to the folder of vLLM, or to a site-packages folder."""
    if node.vllm and frame.startswith(f"{node.vllm}/"):
        return frame[len(str(node.vllm)) + 1 :]
    for folder in ("/site-packages/", "/dist-packages/"):
        if folder in frame:
            return frame.split(folder, 1)[1]
    file, colon, rest = frame.partition(":")
    return Path(file).name + colon + rest
