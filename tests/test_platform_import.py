"""A node where amdsmi gives no architecture: the platform is imported, through the door that is early enough."""

import ast
import json
import os
import subprocess
import sys

import pytest
from releases import tree

from vllm_rocm_fixes import node
from vllm_rocm_fixes.mend import mend
from vllm_rocm_fixes.patches import platform_import

CHILD = """
import json
import amdsmi

def broken(handle):
    raise amdsmi.AmdSmiException("no asic info in this container")

amdsmi.amdsmi_get_gpu_asic_info = broken
done = {}
try:
    from vllm.platforms import current_platform
    done["platform"] = type(current_platform).__name__
    import vllm.platforms.rocm as rocm
    done["arch"] = rocm._GCN_ARCH
except BaseException as error:
    done["raised"] = f"{type(error).__name__}: {error}"
print(json.dumps(done))
"""


@pytest.mark.parametrize("release", ["0.19.0", "0.26.0"])
def test_the_platform_is_imported(release, tmp_path):
    built = node.build(tmp_path, version=release, vllm=tree(release), packages=())
    env = {k: v for k, v in os.environ.items() if not k.startswith(("ROCM_FIXES", "VLLM_PLUGINS"))}

    def run(**side):
        command = [sys.executable, "-c", CHILD]
        done = subprocess.run(command, env=built.environment(env, **side), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr

    stock, _ = run(VLLM_PLUGINS="")
    ours, said = run()
    assert "cannot import name 'current_platform'" in stock["raised"]
    assert ours == {"platform": "RocmPlatform", "arch": "gfx942:sramecc+:xnack-"}
    assert "Failed to get GCN arch via amdsmi" in said, "stock's warning is said"


@pytest.mark.unit
def test_shapes():
    warn = "def _get_gcn_arch():\n    logger.warning_once('no')\n"
    verdicts = {
        warn + "ARCH = _get_gcn_arch()": "needed",
        warn + "def later(): _get_gcn_arch()": "clear",
        warn.replace("'no'", "'no', scope='process'") + "ARCH = _get_gcn_arch()": "clear",
        warn.replace("'no'", "'no', scope='local'") + "ARCH = _get_gcn_arch()": "needed",
        warn + "def bounded(): return pool.submit(_get_gcn_arch).result(5)\nARCH = bounded()": "needed",
        warn + "def bounded(): return pool.submit(_get_gcn_arch).result(5)": "clear",
        warn + "for ask in (_from_kfd, _get_gcn_arch): ARCH = ask()": "needed",
        warn + "cached = lru_cache(_get_gcn_arch)\nARCH = cached()": "needed",
        warn + "_report(lambda: _get_gcn_arch())": "needed",
        warn + "class Amdsmi:\n    def __exit__(self, *_): _get_gcn_arch()\nwith Amdsmi(): ...": "needed",
        warn + "class Meta(type):\n    def __new__(cls, *_): _get_gcn_arch()\nclass A(metaclass=Meta): ...": "needed",
        warn + "def outer(): return _get_gcn_arch()\nARCH = outer()": "needed",
        warn + "class RocmPlatform:\n    ARCH = _get_gcn_arch()": "needed",
        warn + "class RocmPlatform:\n    def arch(cls): return _get_gcn_arch()": "clear",
        warn + "class Arch:\n    def __init__(self): _get_gcn_arch()\nARCH = Arch()": "needed",
        "x = 1": "unknown",
    }
    assert {text: platform_import.examine(ast.parse(text)).kind for text in verdicts} == verdicts


WARNS = '        logger.warning_once(\n            "Failed to get GCN'
INIT = "        amdsmi_init()\n        try:\n            return fn("
FORKS = {
    "as an error": {WARNS: WARNS.replace("warning", "error")},
    "in the decorator": {INIT: f"        logger.info_once('asking amdsmi')\n{INIT}"},
    "in a static method": {
        WARNS: WARNS.replace("logger.warning_once", "_Say.once"),
        "def _get_gcn_arch()": "class _Say:\n    @staticmethod\n    def once(what):\n"
        "        logger.warning_once(what)\n\n\ndef _get_gcn_arch()",
    },
}


@pytest.mark.unit
@pytest.mark.parametrize("fork", FORKS)
def test_what_is_said_while_it_is_imported_is_found(fork):
    source = (tree("0.23.0") / "vllm" / "platforms" / "rocm.py").read_text()
    for old, new in FORKS[fork].items():
        assert old in source
        source = source.replace(old, new)
    mended = mend(source, "rocm.py", [platform_import.PATCH])
    assert mended.outcomes[0].applied, mended.outcomes[0]
    scopes = ast.unparse(mended.tree).count("scope='process'")
    assert scopes == source.count("scope='process'") + 1 + (fork == "in the decorator")


@pytest.mark.unit
def test_a_logger_that_is_handed_on_is_not_called_clear():
    source = (tree("0.23.0") / "vllm" / "platforms" / "rocm.py").read_text()
    changed = source.replace(WARNS, WARNS.replace("logger.warning_once", "say = logger.warning_once\n        say"))
    assert changed != source and platform_import.examine(ast.parse(changed)).kind == "unknown"
