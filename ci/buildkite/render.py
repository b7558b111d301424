"""render.py [FILE]: turn steps in the words of vLLM's test-amd.yaml into a Buildkite pipeline (JSON, which is YAML).

Needs PyYAML, because the steps are for people to read and write. Ends with one line where a step can't be rendered.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

# Where a mirror's agents wait; the names are those of vLLM's own AMD queues.
POOLS = {"amdmi250": "mi250_1", "amdmi300": "mi300_1", "amdmi355": "mi355_1"}
KNOWN = {
    *("label", "key", "agent_pool", "timeout_in_minutes", "commands", "source_file_dependencies", "mirror_hardwares"),
    *("nightly", "optional", "depends_on", "artifact_paths"),
}
LOST = [{"exit_status": -1, "limit": 1}, {"exit_status": -10, "limit": 1}]  # the agent was lost


def render(text: str, scheduled: bool = False) -> dict[str, Any]:
    """The Buildkite pipeline of these steps; scheduled tells whether the build is a nightly one.

    Raises ValueError, in one line, for a step that says too little or something that isn't known.
    """
    steps = [part for step in yaml.safe_load(text)["steps"] for part in _rendered(step, scheduled)]
    return {"steps": steps}


def _rendered(step: dict[str, Any], scheduled: bool) -> Iterator[dict[str, Any]]:
    label = step.get("label", "a step without a label")
    if unknown := sorted(set(step) - KNOWN):
        raise ValueError(f"{label}: no such word: {', '.join(unknown)}")
    pools = [POOLS[mirror] for mirror in step.get("mirror_hardwares", ())] or [step.get("agent_pool")]
    if not step.get("commands") or not all(pools) or "timeout_in_minutes" not in step:
        raise ValueError(f"{label}: a step needs commands, timeout_in_minutes, and agent_pool or mirror_hardwares")
    if step.get("nightly") and not scheduled:
        return
    for pool in pools:
        made = {
            "label": f"{label} ({pool})" if len(pools) > 1 else label,
            "agents": {"queue": pool},
            "timeout_in_minutes": step["timeout_in_minutes"],
            "commands": step["commands"],
            "retry": {"automatic": LOST},
        }
        made |= {word: step[word] for word in ("key", "depends_on", "artifact_paths") if word in step}
        if not scheduled and "source_file_dependencies" in step:
            made["if_changed"] = [
                f"{prefix}**" if prefix.endswith("/") else prefix for prefix in step["source_file_dependencies"]
            ]
        if step.get("optional") and not scheduled:
            block = f"ask-{pool}-{step['commands'][0].rpartition('/')[2].partition('.')[0]}"
            yield {"block": f"Run {made['label']}?", "key": block, "depends_on": []}
            made["depends_on"] = [block, *([step["depends_on"]] if "depends_on" in step else [])]
        yield made


if __name__ == "__main__":
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("test-amd.yaml")
    try:
        json.dump(render(file.read_text(), os.environ.get("BUILDKITE_SOURCE") == "schedule"), sys.stdout, indent=2)
    except (OSError, ValueError, KeyError, yaml.YAMLError) as error:
        sys.exit(f"render.py: {file}: {error}")
