"""`vllm-rocm-fixes doctor`: what is wrong on this node, and what to do about it."""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import doors, locks, records
from ..installation import Installation
from ..installed import older
from . import Stop, add_command, add_vllm_option, all_patches, installation, number

if TYPE_CHECKING:
    from . import Subparsers

KFD = "/dev/kfd"

_TEXT = """\
Versions are read from metadata: nothing is imported. Each finding comes with what to do. A note is worth knowing, and
no reason to act. No AMD node was available while this was made: what is said of /dev/kfd and of mapped HIP runtimes
was never checked on one.

Exit status: 0 nothing found, or notes only; 1 something was found."""

# What is shown: its distributions, and the module that tells whether it is there without one.
PACKAGES = {
    "vLLM": (("vllm",), "vllm"),
    "torch": (("torch",), "torch"),
    "AITER": (("amd-aiter", "aiter"), "aiter"),
    "TileLang": (("tilelang",), "tilelang"),
    "tvm-ffi": (("apache-tvm-ffi",), "tvm_ffi"),
    "Mori": (("amd_mori", "mori"), "mori"),
    "FlashInfer": (("flashinfer-python",), "flashinfer"),
    "amdsmi": (("amdsmi",), "amdsmi"),
}
# The AITER in vLLM's own ROCm image (docker/Dockerfile.rocm_base), from that release on.
_IMAGE_AITER = (
    ("0.33.0", "0.1.26"),
    ("0.32.0", "0.1.24"),
    ("0.31.0", "0.1.23"),
    ("0.30.0", "0.1.21"),
    ("0.27.0", "0.1.19"),
    ("0.25.0", "0.1.16"),
    ("0.21.0", "0.1.13"),
    ("0.17.0", "0.1.10"),
)
# Names of AITER's, HIP's and ROCm's that matter here, to tell a misspelt one by.
_KNOWN = re.findall(
    r"\w+",
    """
AITER_JIT_DIR AITER_ROOT_DIR AITER_META_DIR AITER_REBUILD AITER_LOG_MORE AITER_LOG_LEVEL AITER_LOG_TUNED_CONFIG
AITER_ASM_DIR AITER_DISABLE_DEEPBIND AITER_DISABLE_KERNARG_PRELOAD AITER_ENABLE_EXPERIMENTAL AITER_SYMBOL_VISIBLE
AITER_MAX_CACHE_SIZE AITER_DEBUG AITER_USE_HSACO AITER_ONLINE_TUNE GPU_ARCHS PYTORCH_ROCM_ARCH
HIP_VISIBLE_DEVICES HIP_LAUNCH_BLOCKING HIP_FORCE_DEV_KERNARG HIP_PATH HIP_PLATFORM HIP_DEVICE_LIB_PATH HIP_CLANG_PATH
ROCR_VISIBLE_DEVICES ROCM_HOME ROCM_PATH ROCM_VERSION ROCPROFILER_QUEUE_INTERPOSITION
HSA_OVERRIDE_GFX_VERSION HSA_NO_SCRATCH_RECLAIM HSA_ENABLE_SDMA HSA_ENABLE_IPC_MODE_LEGACY HSA_TOOLS_LIB HSA_XNACK
HSA_FORCE_FINE_GRAIN_PCIE TORCH_USE_RTLD_GLOBAL TORCH_BLAS_PREFER_HIPBLASLT PYTORCH_TUNABLEOP_ENABLED
PYTORCH_TUNABLEOP_TUNING PYTORCH_TUNABLEOP_FILENAME PYTORCH_NVML_BASED_CUDA_CHECK TVM_LIBRARY_PATH
""",
)
_PREFIXES = ("AITER_", "HIP_", "ROCR_", "ROCM_", "HSA_", "GPU_A", "PYTORCH_", "ROCPROFILER_")


@dataclass(frozen=True)
class Finding:
    """Something that was found, and what to do about it; each one line. note: no reason to act."""

    what: str
    do: str
    note: bool = False


@dataclass(frozen=True)
class Node:
    """What the checks look at. versions has an entry for each package that is there; None: it has no metadata."""

    vllm: Installation | None
    environ: Mapping[str, str]
    versions: Mapping[str, str | None]
    aiter: Path | None
    site: Path | None  # the folder named with --vllm; None: this Python's own path

    def version(self, name: str) -> str:
        """The version of a package, an empty string where there is none."""
        return self.versions.get(name) or ""

    @property
    def rocm(self) -> bool:
        """Whether torch is a ROCm build, by its version."""
        return "+rocm" in self.version("torch") or "rocm" in self.version("torch").partition("+")[2]


def add_parser(subparsers: Subparsers) -> None:
    """Add this command's parser."""
    parser = add_command(subparsers, "doctor", run, "tell what is wrong on this node, and what to do about it", _TEXT)
    add_vllm_option(parser)
    parser.add_argument(
        "--pid",
        type=number(int, "the id of a process", 1 << 22),
        metavar="PID",
        help="look into this running process too: its HIP runtime, who answers for it, and its environment",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print versions and findings. Returns the exit status."""
    environ: Mapping[str, str] = os.environ if args.pid is None else _environ(args.pid)
    node = look(args, environ)
    process = _Process(args.pid) if args.pid is not None else None
    findings = [*check(node), *(process.findings() if process else ())]
    findings.sort(key=lambda finding: finding.note)
    if args.json:
        shown = {"versions": node.versions, "findings": [asdict(finding) for finding in findings]}
        print(json.dumps(shown | ({"process": process.facts} if process else {}), indent=2))
    else:
        print("\n".join(_lines(node, process, findings)))
    return 1 if any(not finding.note for finding in findings) else 0


def look(args: argparse.Namespace, environ: Mapping[str, str]) -> Node:
    """What is installed, read and not run. Raises Stop for a --vllm that holds no vLLM."""
    try:
        vllm = installation(args)
    except Stop:
        if args.vllm is not None:
            raise
        vllm = None
    site = args.vllm.absolute() if args.vllm is not None else None
    versions: dict[str, str | None] = {}
    for label, (names, module) in PACKAGES.items():
        place = _place(module, site)
        found = [_version(name, site) for name in names]
        if label == "vLLM" and vllm is not None:
            versions[label] = vllm.version or next(filter(None, found), None)
        elif any(found) or place is not None:
            versions[label] = next(filter(None, found), None)
    aiter = _place("aiter", site)
    return Node(vllm, environ, versions, aiter, site)


def check(node: Node) -> Iterator[Finding]:
    """Everything that is found without looking into a process."""
    yield from _pairs(node)
    yield from _device(node)
    yield from _pythonpath(node)
    yield from _aiter(node)
    yield from _variables(node)


# Pairs of versions


def _pairs(node: Node) -> Iterator[Finding]:
    from ..guards.pair import aborts

    vllm, aiter, tilelang, tvm_ffi = (node.version(name) for name in ("vLLM", "AITER", "TileLang", "tvm-ffi"))
    if node.vllm is not None and node.vllm.doubt:
        yield Finding(f"vLLM's version can't be believed: {node.vllm.doubt}", "install vLLM anew, in one piece")
    if tilelang and tvm_ffi:
        wanted = _requirement("tilelang", "apache-tvm-ffi", node.site)
        if aborts(tilelang, tvm_ffi):
            fits = "0.1.11" if tilelang.startswith("0.1.12") else "0.1.10"
            yield Finding(
                f"TileLang {tilelang} beside tvm-ffi {tvm_ffi} aborts the process that imports it (vLLM #45169)",
                f"pip install apache-tvm-ffi=={fits}; until then guard tilelang_pair takes TileLang for absent",
            )
        elif wanted and not satisfies(tvm_ffi, wanted):
            yield Finding(
                f"TileLang {tilelang} wants tvm-ffi {wanted}, and {tvm_ffi} is installed",
                f"pip install 'apache-tvm-ffi{wanted}'",
            )
    if (
        tilelang
        and vllm
        and node.rocm
        and _between(tilelang, "0.1.10", "0.1.14")
        and _between(vllm, "0.20.0", "0.28.0")
    ):
        hidden = _hidden(node.environ)
        if hidden:
            yield Finding(
                f"TileLang {tilelang} puts its HIP stub before the real runtime ('invalid configuration argument', "
                f"vLLM #51151), vLLM {vllm} doesn't prevent that, and guard hip is off: {hidden}",
                "let guard hip run, or install TileLang 0.1.14 or later",
            )
    if aiter and vllm and not older(vllm, "0.27.0") and older(aiter, "0.1.16"):
        yield Finding(
            f"AITER {aiter} lacks the fused qk-rmsnorm kernel that vLLM {vllm} calls for MLA models without asking",
            "install AITER 0.1.16 or later",
        )
    elif aiter and vllm:
        image = next((of for since, of in _IMAGE_AITER if not older(vllm, since)), None)
        if image and older(aiter, image):
            yield Finding(
                f"AITER {aiter} is older than the {image} in vLLM {vllm}'s own image",
                f"install AITER {image}: calls whose arguments changed in between fail (vLLM #43873)",
                note=True,
            )


def _device(node: Node) -> Iterator[Finding]:
    if not os.path.exists(KFD):
        return
    if not os.access(KFD, os.R_OK | os.W_OK):
        yield Finding(f"this user may not open {KFD}", "add the user to the groups render and video")
    torch = node.version("torch")
    if torch and not node.rocm:
        yield Finding(
            f"this node has {KFD}, and torch {torch} isn't a ROCm build (vLLM #44660: pip takes the CUDA wheel "
            "where no ROCm wheel fits this Python)",
            "install vLLM and torch from the ROCm wheel index, for CPython 3.12",
        )
    if node.rocm and "amdsmi" not in node.versions:
        yield Finding("amdsmi isn't installed: vLLM finds no AMD platform without it", "install ROCm's own amdsmi")
    if node.rocm and torch.startswith("2.12") and "ROCPROFILER_QUEUE_INTERPOSITION" not in node.environ:
        yield Finding(
            f"torch {torch} attaches rocprofiler, and may hang when a process ends",
            "export ROCPROFILER_QUEUE_INTERPOSITION=0, as vLLM's image of 0.33.0 does",
        )


# PYTHONPATH


def _pythonpath(node: Node) -> Iterator[Finding]:
    if "PYTHONHOME" in node.environ:
        yield Finding(
            f"PYTHONHOME={node.environ['PYTHONHOME']}: a Python of another home ends with 'No module named encodings'",
            "unset PYTHONHOME",
        )
    value = node.environ.get("PYTHONPATH")
    for entry in value.split(os.pathsep) if value else ():
        folder = Path(entry or ".")
        if "tilelang" in folder.parts and (folder / "tvm").is_dir():
            yield Finding(
                f"PYTHONPATH holds TileLang's own TVM, {entry}: every child that asks for tvm loads its HIP stub",
                "unset it: it was inherited from a process that had imported TileLang (guard pythonpath prevents it)",
            )
        elif not entry:
            yield Finding(
                "PYTHONPATH has an empty entry, which means the current folder, wherever a child starts",
                "take the stray ':' away",
            )
        elif not folder.exists():
            yield Finding(f"PYTHONPATH names {entry}, which isn't there", "take it away", note=True)
        elif (folder / "vllm" / "__init__.py").is_file() and node.vllm and folder.resolve() != node.vllm.root.resolve():
            yield Finding(f"PYTHONPATH holds a vllm/ in {entry}, beside {node.vllm.root}", "take one of them away")
        elif (folder / "encodings").is_dir() and folder.resolve() != Path(os.__file__).parent.resolve():
            yield Finding(f"PYTHONPATH holds another Python's standard library, {entry}", "take it away")
        elif _others_write(folder):
            yield Finding(f"PYTHONPATH names {entry}, where any user can put code", f"chmod o-w {entry}")


def _others_write(folder: Path) -> bool:
    try:
        return bool(folder.stat().st_mode & 0o002)
    except OSError:
        return False


# AITER's folders


def _aiter(node: Node) -> Iterator[Finding]:
    places = locks.folders(node.aiter, node.environ)
    if node.aiter is not None:
        for place in places:
            reason = locks.unwritable(place)
            if reason:
                variable = "AITER_JIT_DIR" if place == places[0] else "AITER_ROOT_DIR"
                yield Finding(
                    f"AITER builds its kernels in {place}, and {reason}", f"set {variable} to a folder of yours"
                )
    for lock in locks.find(locks.everywhere(node.aiter, node.environ)):
        age = _age(lock.seconds)
        if lock.stale:
            yield Finding(
                f"{lock.path} is {age} old and nobody here holds it: importing AITER may wait for it without end",
                f"rm {lock.path} (if no other host shares that folder)",
            )
        elif lock.pid is not None:
            yield Finding(
                f"{lock.path} is held by process {lock.pid} ({_name(lock.pid)}), for {age}",
                "wait for its build"
                if lock.seconds < 1800
                else f"see what process {lock.pid} does: a build takes minutes",
                note=lock.seconds < 1800,
            )
        elif lock.where:
            yield Finding(f"{lock.path} is {age} old: {lock.where}", "ask there whether it still builds", note=True)


# Environment variables


def _variables(node: Node) -> Iterator[Finding]:
    from .. import settings
    from ..guards import GUARDS

    environ = node.environ
    names = [patch.name for patch in all_patches()] + [guard.name for guard in GUARDS]
    for complaint in settings.read(names, environ).complaints:
        yield Finding(complaint, "mend the name or the value")
    shut = doors.shut(environ, [patch.name for patch in all_patches()])
    if shut:
        yield Finding(*shut)
    known = vllm_variables(node.vllm.root) if node.vllm else frozenset()
    for name in sorted(environ):
        if name == "VLLM_ROCM_USE_AITER_SAMPLER" and name not in known:
            yield Finding(
                "VLLM_ROCM_USE_AITER_SAMPLER was promised (vLLM #26084) and is in no release: it does nothing",
                f"set ROCM_FIXES_AITER_SAMPLER={environ[name]}",
            )
        elif known and name.startswith("VLLM_") and name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.85)
            release = node.version("vLLM")
            what = f"{name} isn't a variable of vLLM {release}"
            yield Finding(what, f"did you mean {near[0]}?" if near else "it does nothing here: unset it", note=not near)
        elif name.startswith(_PREFIXES) and name not in _KNOWN and not name.startswith("AITER_CONFIG_"):
            near = difflib.get_close_matches(name, _KNOWN, 1, 0.88)
            if near:
                yield Finding(f"{name} isn't a variable that is known", f"did you mean {near[0]}?")
    finer = [name for name in environ if name.startswith("VLLM_ROCM_USE_AITER_") and name in known]
    if finer and environ.get("VLLM_ROCM_USE_AITER", "0").strip().lower() not in ("1", "true"):
        yield Finding(
            f"{', '.join(sorted(finer))} without VLLM_ROCM_USE_AITER=1: vLLM asks that one first, and uses no AITER",
            "export VLLM_ROCM_USE_AITER=1, or unset them",
        )
    if environ.get("AITER_REBUILD", "0").strip() not in ("", "0"):
        yield Finding(
            f"AITER_REBUILD={environ['AITER_REBUILD']}: each process that imports AITER empties its build folder first",
            "unset it after the one start that needed it",
        )


def vllm_variables(root: Path) -> frozenset[str]:
    """The variables that vLLM knows, read from the tables in vllm/envs.py; empty where there are none."""
    try:
        tree = ast.parse((root / "vllm" / "envs.py").read_bytes())
    except (OSError, SyntaxError, ValueError):
        return frozenset()
    keys = {
        key.value
        for table in ast.walk(tree)
        if isinstance(table, ast.Dict)
        for key in table.keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    }
    declared = {
        node.target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    return frozenset(name for name in keys | declared if name.startswith("VLLM_"))


def _hidden(environ: Mapping[str, str]) -> str | None:
    """Why guard hip isn't at work in a process with this environment; None: it is."""
    from .. import settings

    shut = doors.shut(environ)
    return shut[0] if shut else "ROCM_FIXES_SKIP names it" if "hip" in settings.read(["hip"], environ).skip else None


# One process


class _Process:
    """What is mapped in a running process, and who answers there for HIP's functions."""

    def __init__(self, pid: int) -> None:
        from ..guards import hip
        from ..scope import global_scope

        self.pid = pid
        self.runtimes = [library.path for library in hip.mapped(hip.RUNTIME, f"/proc/{pid}/maps")]
        self.stubs = [library.path for library in hip.mapped(hip.STUB, f"/proc/{pid}/maps")]
        self.first: str | None = None
        self.doubt: str | None = None
        self._stub = hip.STUB
        if self.runtimes or self.stubs:
            try:
                scope = global_scope(pid)
                wanted = (path for path in scope if hip.RUNTIME.search(path) or hip.STUB.search(path))
                self.first = next(wanted, None)
            except (OSError, LookupError) as error:
                self.doubt = getattr(error, "strerror", None) or str(error)
        self.record = next((record for record in records.read()[0] if record.pid == pid), None)

    @property
    def facts(self) -> dict[str, Any]:
        """For --json."""
        return {
            "pid": self.pid,
            "runtimes": self.runtimes,
            "stubs": self.stubs,
            "first": self.first,
            "guards": self.record.guards if self.record else None,
        }

    def lines(self) -> Iterator[str]:
        """What is mapped, for a person."""
        yield f"Process {self.pid} ({_name(self.pid)})"
        if not self.runtimes and not self.stubs:
            yield "  no HIP runtime is mapped"
            return
        yield f"  {len(self.runtimes)} HIP runtime{'s'[: len(self.runtimes) != 1]} mapped"
        yield from (f"    {path}" for path in self.runtimes)
        yield from (f"    {path} (a stub)" for path in self.stubs)
        if self.doubt:
            yield f"  which comes first can't be read: {self.doubt}"
        else:
            yield f"  first in the global scope: {self.first or 'neither'}"

    def findings(self) -> Iterator[Finding]:
        """What is wrong in this process."""
        if len(self.runtimes) > 1:
            yield Finding(
                f"process {self.pid} has {len(self.runtimes)} HIP runtimes: handles of one are invalid in the other",
                "keep one: torch's own, or ROCm's with LD_LIBRARY_PATH and LD_PRELOAD unset",
            )
        if self.doubt and self.stubs:
            yield Finding(
                f"process {self.pid} has mapped {self.stubs[0]}, and who comes first can't be read: {self.doubt}",
                "ask again as root, or look at guard hip in `vllm-rocm-fixes ps --json`",
            )
        elif self.first and self._stub.search(self.first):
            yield Finding(
                f"in process {self.pid} the stub {self.first} answers before the HIP runtime: kernels that are loaded "
                "now fail with 'invalid configuration argument'",
                "start it again with guard hip, or with ROCM_FIXES_HEAL=1 where TileLang must come before vLLM",
            )
        elif self.stubs and self.runtimes and not self.first:
            yield Finding(
                f"process {self.pid} has mapped {self.stubs[0]} and a HIP runtime, and neither is in the global scope",
                "nothing, unless TVM is loaded later",
                note=True,
            )


def _environ(pid: int) -> dict[str, str]:
    """The environment that a process was started with. Raises Stop where there is no such process of this user's."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except FileNotFoundError:
        raise Stop(f"no process {pid} runs here") from None
    except PermissionError:
        raise Stop(f"process {pid} belongs to another user: ask as that user, or as root") from None
    return {key: value for key, _, value in (os.fsdecode(entry).partition("=") for entry in entries if entry)}


def _name(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return "ended"
    shown = [os.path.basename(os.fsdecode(word)) if not word.startswith(b"-") else os.fsdecode(word) for word in words]
    return " ".join(" ".join(shown[:2]).split())[:40]


# Metadata, without importing anything


def _version(name: str, site: Path | None) -> str | None:
    try:
        return next((d.version for d in _distributions(name, site) if d.version), None)
    except Exception:  # a half-written dist-info raises whatever its parser does
        return None


def _distributions(name: str, site: Path | None) -> list[metadata.Distribution]:
    return list(metadata.distributions(name=name, path=[str(site)] if site else sys.path))


def _requirement(of: str, wanted: str, site: Path | None) -> str | None:
    """What a distribution's metadata asks of another, such as ">=0.1.11,<0.1.13"; None: nothing, or it isn't there."""
    try:
        lines = [line for d in _distributions(of, site)[:1] for line in d.requires or ()]
    except Exception:
        return None
    for line in lines:
        match = re.match(r"([A-Za-z0-9._-]+)\s*\(?([^;)]*)\)?(;.*)?$", line.strip())
        if match and re.sub(r"[-_.]+", "-", match[1]).lower() == wanted and not match[3]:
            return match[2].replace(" ", "") or None
    return None


def satisfies(version: str, specifier: str) -> bool:
    """Whether a version meets all clauses of a specifier; one that isn't understood is taken for met."""
    return all(_meets(version, clause) for clause in specifier.split(","))


def _meets(version: str, clause: str) -> bool:
    match = re.match(r"(~=|==|!=|<=|>=|<|>)([0-9][^*]*)(\.\*)?$", clause)
    if match is None or match[3]:
        return True
    operator, limit = match[1], match[2]
    below, above = older(version, limit), older(limit, version)
    if operator == "~=":
        series = limit.split(".")[:-1]
        return not below and version.split(".")[: len(series)] == series
    return {
        "==": not below and not above,
        "!=": below or above,
        "<=": not above,
        ">=": not below,
        "<": below,
        ">": above,
    }[operator]


def _between(version: str, low: str, high: str) -> bool:
    return not older(version, low) and older(version, high)


def _place(module: str, site: Path | None) -> Path | None:
    """The folder of a package, found without executing it."""
    if site is not None:
        return site / module if (site / module).is_dir() else None
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    found = spec and spec.submodule_search_locations
    return Path(next(iter(found))) if found else Path(spec.origin) if spec and spec.origin else None


# What is printed


def _lines(node: Node, process: _Process | None, findings: list[Finding]) -> Iterator[str]:
    for label, version in node.versions.items():
        place = f"  {node.vllm.root}" if label == "vLLM" and node.vllm else ""
        yield f"{label:<11} {version or 'there, without metadata'}{place}"
    if not node.versions:
        yield "None of these is installed: " + ", ".join(PACKAGES)
    if process:
        yield ""
        yield from process.lines()
    yield ""
    yield "doctor was made without an AMD node: nothing it says was checked with a real /dev/kfd."
    for finding in findings:
        yield ""
        yield f"{'Note' if finding.note else 'FOUND'}: {finding.what}"
        yield f"  -> {finding.do}"
    if not findings:
        yield ""
        yield "Nothing found."


def _age(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} seconds"
