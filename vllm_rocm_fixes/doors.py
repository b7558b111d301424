"""Whether vLLM's plugin loading would reach us, read from the environment's metadata and variables; nothing is loaded.

vLLM loads the entry points of a group, and of those only the names in VLLM_PLUGINS where that is set
(vllm/plugins/__init__.py, 0.14.0 to 0.33.0: split at commas, spaces stay part of a name, set but empty means none).
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from . import __version__, settings

NAME = "rocm_fixes"
PROJECT = "vllm-rocm-fixes"
PLATFORM, GENERAL = "vllm.platform_plugins", "vllm.general_plugins"
GROUPS = {PLATFORM: "vllm_rocm_fixes:prepare", GENERAL: "vllm_rocm_fixes:register"}


@dataclass(frozen=True)
class Door:
    """One entry point of ours: whether vLLM would call it, and why not, or what is odd about it."""

    group: str
    open: bool
    reason: str


def look(folders: Sequence[str], environ: Mapping[str, str] = os.environ) -> list[Door]:
    """The two doors, for an environment with these folders on its path and these variables."""
    ours = list(metadata.distributions(name=PROJECT, path=list(folders)))
    twins = []
    if ours:
        everybody = metadata.distributions(path=list(folders))
        twins = [(d, point) for d in everybody for point in d.entry_points if point.name == NAME]
        twins = [(d, point) for d, point in twins if _normal(d) != PROJECT]
    return [_door(group, ours, [d for d, p in twins if p.group == group], environ) for group in GROUPS]


def shut(environ: Mapping[str, str], patches: Collection[str] = ()) -> tuple[str, str] | None:
    """The variable that leaves a process with these variables as stock, in words, and what to do about it; None: none.

    patches are the names of all patches, where ROCM_FIXES_SKIP is to count too.
    """
    read = settings.read(patches, environ)
    if read.off:
        return f"ROCM_FIXES={environ['ROCM_FIXES']} switches vllm-rocm-fixes off", "unset it"
    chosen = environ.get("VLLM_PLUGINS", NAME).split(",")
    if NAME not in chosen:
        near = difflib.get_close_matches(NAME, [name.strip() for name in chosen], 1, 0.5)
        meant = f"it is called {NAME}, not {near[0]}" if near else f"add {NAME} to it, or unset it"
        return f"VLLM_PLUGINS={environ['VLLM_PLUGINS']} keeps vllm-rocm-fixes out", meant
    if patches and read.skip >= set(patches):
        return "ROCM_FIXES_SKIP names every patch, so nothing is mended", "name fewer, or unset it"
    return None


def folders_of(root: Path) -> list[str] | None:
    """The folder of an environment that holds vllm/ itself, as an unpacked image does; None for a checkout."""
    return [str(root)] if any(root.glob("*.dist-info")) else None


def _door(
    group: str, ours: list[metadata.Distribution], twins: list[metadata.Distribution], environ: Mapping[str, str]
) -> Door:
    if not ours:
        return Door(group, False, f"{PROJECT} isn't installed in this environment: pip install it there")
    first, value = ours[0], GROUPS[group]
    points = [point for point in first.entry_points if point.group == group and point.value == value]
    if not points:
        return Door(group, False, f"{PROJECT} {first.version} as installed has no {value} in {group}: install it anew")
    reason = shut(environ)
    if reason:
        return Door(group, False, ": ".join(reason))
    oddities = []
    if len({d.version for d in ours}) > 1:
        places = ", ".join(f"{d.version} in {d.locate_file('')}" for d in ours)
        oddities.append(f"installed {len(ours)} times: {places}")
    if first.version != __version__:
        oddities.append(f"the metadata is of {first.version}, and the code here of {__version__}: install it anew")
    oddities += [f"{_normal(d)} has a plugin of the same name, and vLLM calls the last it finds" for d in twins]
    return Door(group, True, "; ".join(oddities) or f"{points[0].name} -> {value}")


def _normal(distribution: metadata.Distribution) -> str:
    return str(distribution.metadata["Name"] or "").replace("_", "-").lower()
