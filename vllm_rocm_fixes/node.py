"""A stand-in AMD node: stock vLLM of any release picks its ROCm platform, on a machine without GPU or driver.

`build` writes a folder of real files that goes first on PYTHONPATH: an `amdsmi` that answers for one MI300X, the
metadata of a ROCm build of vLLM, and the packages an AMD image holds. They are ordinary source folders, so `find_spec`
answers, and a reader of their source finds what the real one has. Running one does to the process what the real one
does, and writes down who asked for it. Each Python process of the node also watches torch.cuda. It works through
subprocess, fork, spawn and forkserver, because everything travels in the environment.

What the packages do was read from AITER 0.1.7 to 0.1.26, TileLang 0.1.9 to 0.1.15, FlashInfer 0.6.18 and Mori 1.1.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

TEMPLATES = Path(__file__).parent / "standin"
IMAGE = ("aiter", "tilelang", "mori")  # what a ROCm image of vLLM holds
PIP = ("aiter", "tilelang")  # what a ROCm wheel takes along
EVERYTHING = (*IMAGE, "deep_ep", "nixl_ep", "moonep", "flashinfer", "flash_attn")

_MODULE = '"""Stand-in for {name}."""\n\nfrom rocm_standin import arrive\n\narrive(__name__)\n'
_METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
# The release of each package that the folder claims to hold, in its metadata.
_VERSIONS = {
    "aiter": ("amd-aiter", "0.1.13"),
    "tilelang": ("tilelang", "0.1.10"),
    "mori": ("mori", "1.1.0"),
    "deep_ep": ("deep_ep", "1.2.1"),
    "nixl_ep": ("nixl-ep", "0.9.0"),
    "moonep": ("moonep", "0.1.0"),
    "flashinfer": ("flashinfer-python", "0.6.18.post1"),
    "flash_attn": ("flash-attn", "2.8.3"),
}


@dataclasses.dataclass(frozen=True)
class Event:
    """Something a process of the node did.

    kind is "import" (a stand-in module ran), "gpu" (torch was asked for what initialises HIP), "call" (a stand-in
    kernel ran) or "step" (a step of a start ended; detail is its outcome); name is the module, function or step; step
    is the label that the process carried in ROCM_STANDIN_STEP; time is in seconds since the epoch; chain holds the
    frames that led to it, outermost first, each as `file:line function`, without those of the import system.
    """

    kind: str
    name: str
    detail: str
    step: str
    pid: int
    ppid: int
    time: float
    argv: list[str]
    chain: list[str]

    @property
    def package(self) -> str:
        """The top-level package of the module."""
        return self.name.split(".")[0]


@dataclasses.dataclass(frozen=True)
class Node:
    """A folder that was built, and the tree of vLLM that goes with it."""

    folder: Path
    vllm: Path | None
    options: dict[str, str]

    @property
    def log(self) -> Path:
        """Where the processes of the node append their events, one JSON object a line."""
        return self.folder / "events.jsonl"

    def environment(self, base: Mapping[str, str] | None = None, **extra: str) -> dict[str, str]:
        """The environment of a process on the node: base (that of this process by default), the node's, then extra."""
        env = dict(os.environ if base is None else base)
        path = [str(self.folder), *([str(self.vllm)] if self.vllm else []), env.get("PYTHONPATH", "")]
        env |= {
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "PATH": os.pathsep.join((str(self.folder / "bin"), env.get("PATH", os.defpath))),
            "ROCM_STANDIN_LOG": str(self.log),
            "VLLM_CACHE_ROOT": str(self.folder / "cache"),
            "VLLM_ROCM_USE_AITER": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        return {**env, **self.options, **extra}

    def events(self) -> list[Event]:
        """What the processes of the node wrote down so far, in the order it happened."""
        if not self.log.exists():
            return []
        lines = self.log.read_text(encoding="utf-8").splitlines()
        return sorted((Event(**json.loads(line)) for line in lines), key=lambda event: event.time)

    def clear(self) -> None:
        """Forget the events."""
        self.log.unlink(missing_ok=True)


def build(
    folder: str | os.PathLike[str],
    *,
    version: str,
    vllm: str | os.PathLike[str] | None = None,
    packages: Sequence[str] = IMAGE,
    aiter: str = "0.1.13",
    aiter_fails: str = "",
    aiter_fails_at: str = "",
    hip: str = "",
) -> Node:
    """Write a node into folder and return it.

    version is the release that vLLM's metadata claims, without a local part; vllm the folder that holds `vllm/`, or
    None where the process finds vLLM by itself. packages are names from EVERYTHING. aiter is the release of AITER: the
    kernel of the fused qk-rmsnorm is missing before 0.1.13, has a public name up to 0.1.15 and a private one from
    0.1.16 on; so with the MHC kernels, see _aiter_kernels.

    aiter_fails names the exception that AITER raises (ImportError, RuntimeError, KeyError, OSError, CalledProcessError,
    SystemExit, ...), aiter_fails_at where: "sampling" (when aiter.ops.sampling is imported, as a failed kernel build
    does), "package" (when aiter is) or "call" (at the first kernel call). hip makes torch look like a build for that
    version of HIP: torch.version.hip says it, and torch.cuda.is_available is true; empty leaves torch as it is. The
    same choices can be made for one process by the variables ROCM_STANDIN_AITER_FAILS, ROCM_STANDIN_AITER_FAILS_AT and
    ROCM_STANDIN_HIP.

    Raises ValueError for a package that isn't known.
    """
    unknown = sorted(set(packages) - set(EVERYTHING))
    if unknown:
        raise ValueError(f"the stand-in node has no {', '.join(unknown)}; it has {', '.join(EVERYTHING)}")
    target = Path(folder).absolute()
    shutil.copytree(TEMPLATES / "node", target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    root = Path(vllm).absolute() if vllm is not None else None
    _distribution(target, "vllm", f"{version}+rocm", _vllm_plugins(root))
    for name in packages:
        _package(target, name)
        project, release = _VERSIONS[name]
        _distribution(target, project, aiter if name == "aiter" else release)
    if "aiter" in packages:
        _aiter_kernels(target / "aiter" / "ops", aiter)
    options = {
        "ROCM_STANDIN_AITER_FAILS": aiter_fails,
        "ROCM_STANDIN_AITER_FAILS_AT": aiter_fails_at,
        "ROCM_STANDIN_HIP": hip,
    }
    return Node(target, root, {name: value for name, value in options.items() if value})


def _package(target: Path, name: str) -> None:
    """The template of one package, and a recording module for each name of its modules.txt that has no file."""
    template = TEMPLATES / "packages" / name
    skip = shutil.ignore_patterns("__pycache__", "modules.txt")
    shutil.copytree(template, target / name, dirs_exist_ok=True, ignore=skip)
    listed = template / "modules.txt"
    names = listed.read_text(encoding="utf-8").split() if listed.exists() else []
    for module in names:
        file = target.joinpath(*module.split("."))
        is_package = any(other.startswith(module + ".") for other in names) or file.is_dir()
        file = file / "__init__.py" if is_package else file.with_suffix(".py")
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(_MODULE.format(name=module), encoding="utf-8")


def _aiter_kernels(ops: Path, aiter: str) -> None:
    """The two modules of AITER that vLLM looks into before it uses them, as they are in that release.

    The fused qk-rmsnorm came in 0.1.13 and was renamed in 0.1.16. The MHC kernels came and got their norm and a fused
    one somewhere in that time; the stand-in has none before 0.1.13, and all of them from 0.1.19 on.
    """
    release = tuple(int(part) for part in aiter.removeprefix("v").split(".")[:3])
    if release < (0, 1, 13):
        (ops / "mhc.py").unlink()
    elif release < (0, 1, 19):
        shutil.copy(TEMPLATES / "variants" / "mhc_before_fused.py", ops / "mhc.py")
    text = '"""Stand-in for AITER\'s fused kernels around qk-norm."""\n\nfrom rocm_standin import write\n\n'
    text += 'write("import", __name__)\n'
    if release >= (0, 1, 13):
        name = "fused_qk_rmsnorm" if release < (0, 1, 16) else "_fused_qk_rmsnorm"
        text += f"\n\ndef {name}(q, q_weight, q_eps, k, k_weight, k_eps):\n    return q, k\n"
    (ops / "fused_qk_norm_rope_cache_quant.py").write_text(text, encoding="utf-8")


def _distribution(target: Path, name: str, version: str, entry_points: str = "") -> None:
    """The metadata of an installed distribution; transformers wants a RECORD with three columns."""
    folder = target / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(_METADATA.format(name=name, version=version), encoding="utf-8")
    (folder / "RECORD").write_text(f"{folder.name}/METADATA,,\n{folder.name}/RECORD,,\n", encoding="utf-8")
    (folder / "entry_points.txt").write_text(entry_points, encoding="utf-8")


def _vllm_plugins(root: Path | None) -> str:
    """The entry points of an unpacked sdist, so that vLLM's own plugins are loaded as in an installed one."""
    file = root / "vllm.egg-info" / "entry_points.txt" if root else None
    return file.read_text(encoding="utf-8") if file and file.exists() else ""
