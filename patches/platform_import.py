"""platform_import: a warning while the ROCm platform is imported doesn't import vLLM's distributed package.

Stock: where amdsmi gives no GPU architecture, `vllm.platforms.rocm` says so with `logger.warning_once` while it is
being imported. From 0.19.0 that call asks vllm.distributed for the rank, which asks for the platform, which isn't there
yet. (In 0.16.0 to 0.18.1 the same call has another default and imports nothing.)
Seen in containers and WSL without amdsmi: "cannot import name 'current_platform' from 'vllm.platforms'" instead of the
warning and torch's answer. Only the platform door is early enough.
Origin: vLLM #40081, #41596; 0.27.0 dropped the warning. Delete this file when 0.27.0 is the oldest supported release.
"""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys

from vllm_rocm_fixes.patch import Patch, Verdict, clear, needed, unknown
from vllm_rocm_fixes.syntax import evaluated, find, function, place, string

_ONCE = ("debug_once", "info_once", "warning_once", "error_once")


def examine(tree: ast.Module) -> Verdict:
    """Whether what runs at import says something once, and for which processes."""
    if function(tree, "_get_gcn_arch") is None and not find(tree, ast.ClassDef, lambda c: c.name == "RocmPlatform"):
        return unknown("looked for _get_gcn_arch and for the class RocmPlatform, and found neither")
    said = _said(tree)
    if not all(isinstance(call, ast.Call) and ast.unparse(call.func).startswith("logger.") for call in said):
        return unknown("while it is imported it logs once, and not by the logger that is known")
    if any(keyword.arg is None for call in said for keyword in getattr(call, "keywords", ())):
        return unknown("while it is imported it logs once, and not by keywords that are known")
    if said:
        lines = ", ".join(str(call.lineno) for call in said)
        return needed(f"while it is imported it logs once, and not for this process alone (line {lines})")
    return clear("nothing that runs at import logs through the distributed package")


def mend(tree: ast.Module) -> None:
    """Name the scope that needs no rank."""
    for call in _said(tree):
        assert isinstance(call, ast.Call), "examine() knows no other"
        call.keywords = [keyword for keyword in call.keywords if keyword.arg != "scope"]
        call.keywords.append(place(ast.keyword("scope", ast.Constant("process")), call))


def _said(tree: ast.Module) -> list[ast.expr]:
    """A logger's *_once in what may run at import: called, and not for this process alone, or handed on."""
    now = evaluated(tree, handed_on=True)
    calls = {id(node.func): node for node in now if isinstance(node, ast.Call)}
    asked = [n for n in now if isinstance(n, ast.expr) and (getattr(n, "attr", None) or string(n)) in _ONCE]
    said = {id(node): calls.get(id(node), node) for node in asked}
    return sorted((s for s in said.values() if not _alone(s)), key=lambda s: s.lineno)


def _alone(call: ast.expr) -> bool:
    return any(k.arg == "scope" and string(k.value) == "process" for k in getattr(call, "keywords", ()))


_CHILD = """
import amdsmi, torch, types
def no_answer(*_):
    raise amdsmi.AmdSmiException("no answer")
amdsmi.amdsmi_get_gpu_asic_info = no_answer
torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(gcnArchName="gfx942")  # the GPU isn't asked
from vllm.platforms import current_platform
assert current_platform.is_rocm()
"""


def behaves() -> str | None:
    """What is wrong where amdsmi gives no architecture, which another child tries; None: nothing.

    `vllm-rocm-fixes verify` asks, in a child.
    """
    from vllm_rocm_fixes.checks import CannotAsk
    from vllm_rocm_fixes.trial import NOT_FROM_HERE

    if importlib.util.find_spec("amdsmi") is None:
        raise CannotAsk("amdsmi isn't installed here")
    command = [sys.executable, "-c", NOT_FROM_HERE + _CHILD]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    last = done.stderr.strip().rpartition("\n")[2]
    return f"where amdsmi gives no architecture: {last}" if done.returncode else None


PATCH = Patch(
    name="platform_import",
    module="vllm.platforms.rocm",
    summary="a node without amdsmi gets its platform and not a circular import",
    origin=("vLLM #40081", "vLLM #41596"),
    since="0.16.0",
    until="0.27.0",
    examine=examine,
    mend=mend,
)
