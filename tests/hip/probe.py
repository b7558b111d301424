"""What a child sees, and what it does to itself when it merely asks whether TVM is there, as torch._dynamo does."""

from __future__ import annotations

import json
import os
import sys


def look() -> dict[str, object]:
    """The environment and path of this process, and the answer of `import tvm` with what it mapped."""
    seen: dict[str, object] = {
        "PYTHONPATH": os.environ.get("PYTHONPATH"),
        "path": [entry for entry in sys.path if "tilelang/" in entry],
        "loaded": "tvm" in sys.modules,
    }
    try:
        import tvm  # noqa: F401

        seen["tvm"] = True
    except ImportError as error:
        seen["tvm"] = f"{type(error).__name__}: {error}"
    with open("/proc/self/maps") as maps:
        seen["stub"] = any("hip_stub" in line or "stub_hip" in line for line in maps)
    return seen


def send(connection) -> None:
    connection.send(look())


if __name__ == "__main__":
    print(json.dumps(look()))
