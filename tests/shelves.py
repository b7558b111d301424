"""A shelf: real stock files of vLLM in a folder, with nothing around them that takes time to import.

`vllm.plugins` is stock's, so the doors are called as vLLM calls them; `vllm.utils.import_utils` is stock's, and a patch
of the series mends it. What these two import of vLLM is a stand-in of a line.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

from releases import tree

from vllm_rocm_fixes import __version__

ROOT = Path(__file__).parent.parent
RELEASE = "0.23.0"
STOCK = ("vllm/plugins/__init__.py", "vllm/utils/import_utils.py")
STAND_INS = {
    "vllm/__init__.py": "",
    "vllm/_version.py": f"__version__ = version = {RELEASE!r}\n",
    "vllm/utils/__init__.py": "",
    "vllm/envs.py": (
        "import os\nVLLM_PLUGINS = os.environ['VLLM_PLUGINS'].split(',') if 'VLLM_PLUGINS' in os.environ else None\n"
    ),
    "vllm/logger.py": "import logging\ninit_logger = logging.getLogger\n",
    # As TileLang's env.py does.
    "tilelang/__init__.py": (
        "import os\nfolder = os.path.join(os.path.dirname(__file__), '3rdparty', 'tvm', 'python')\n"
        "os.environ['PYTHONPATH'] = folder + os.pathsep + os.environ.get('PYTHONPATH', '')\n"
    ),
    "tilelang/3rdparty/tvm/python/tvm/__init__.py": "",
    "whole_package/__init__.py": "",
    "broken_package/__init__.py": "raise RuntimeError('no such GPU')\n",
}
ENTRY_POINTS = """\
[vllm.general_plugins]
rocm_fixes = vllm_rocm_fixes:register

[vllm.platform_plugins]
rocm_fixes = vllm_rocm_fixes:prepare
"""
# What a child runs first. `start()` is what vLLM does in each of its processes; `facts()` what came of it.
CHILD = textwrap.dedent("""\
    import json, logging, os, sys

    said = []
    class Log(logging.Handler):
        def emit(self, record):
            said.append([record.levelname, record.getMessage()])
    logging.getLogger("vllm").setLevel(logging.INFO)
    logging.getLogger("vllm").addHandler(Log())

    def start():
        from vllm.plugins import load_general_plugins, load_plugins_by_group
        for plugin in load_plugins_by_group("vllm.platform_plugins").values():
            assert plugin() is None
        load_general_plugins()

    def mended():
        import vllm.utils.import_utils as target
        return "vllm_rocm_fixes.patches.import_utils" in target._has_module.__wrapped__.__code__.co_names

    def facts():
        import vllm.utils.import_utils as target
        answers = [target._has_module(name) for name in ("whole_package", "nothing_of_that_name", "broken_package")]
        warnings = [text for level, text in said if level == "WARNING" and text.startswith(OURS)]
        lines = [text for _, text in said if text.startswith("vllm-rocm-fixes ")]
        return {"mended": mended(), "answers": answers, "warnings": warnings, "said": lines}

    OURS = ("prepare failed", "register failed", "import_utils:", "a guard")
    """)


def shelf(folder: Path) -> Path:
    """Fill a folder, and return it."""
    for name in STOCK:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tree(RELEASE) / name, folder / name)
    for name, text in STAND_INS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    if importlib.util.find_spec("regex") is None:  # what vLLM takes for re
        (folder / "regex.py").write_text("from re import *\n")
    return folder


def plugin(folder: Path, name: str, code: str, group: str = "vllm.general_plugins") -> Path:
    """Write a distribution with one plugin, whose function is `door` in code."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(textwrap.dedent(code))
    information = folder / f"{name}-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[{group}]\n{name} = {name}:door\n")
    return folder


def overlay(folder: Path, version: str) -> Path:
    """Write a copy of the overlay as a wheel of that version would leave it in site-packages; one before it is gone."""
    for old in [folder / "vllm_rocm_fixes", *folder.glob("vllm_rocm_fixes-*.dist-info")]:
        shutil.rmtree(old, ignore_errors=True)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "vllm_rocm_fixes", folder / "vllm_rocm_fixes", ignore=ignore)
    shutil.copytree(ROOT / "patches", folder / "vllm_rocm_fixes" / "patches", ignore=ignore)
    start = folder / "vllm_rocm_fixes" / "__init__.py"
    start.write_text(start.read_text().replace(f'__version__ = "{__version__}"', f'__version__ = "{version}"'))
    information = folder / f"vllm_rocm_fixes-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm-rocm-fixes\nVersion: {version}\n")
    (information / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


def environment(*places: Path, **environ: str) -> dict[str, str]:
    """The environment of a child that finds these places first, without any switch of ours but those given."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ROCM_FIXES", "VLLM_", "PYTHON"))}
    return {**kept, "PYTHONPATH": os.pathsep.join(map(str, places)), **environ}


def run(code: str, environ: dict[str, str], options: tuple[str, ...] = (), before: tuple[str, ...] = ()) -> dict:
    """What the code prints last, as JSON, in a fresh interpreter; before: a command that ends by running it."""
    command = [*before, sys.executable, *options, "-c", CHILD + textwrap.dedent(code)]
    done = subprocess.run(command, env=environ, cwd="/", capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
