"""The switches, read from the environment once in each process.

Their names don't start with VLLM_: vLLM warns about names of its own that it doesn't know, and refuses them in strict
mode (0.17.0 on).
"""

import os
from collections.abc import Iterable, Mapping
from typing import NamedTuple

SWITCHES = {
    "ROCM_FIXES": "off: nothing is mended or guarded",
    "ROCM_FIXES_SKIP": "names of patches and guards to leave out, with commas between them",
    "ROCM_FIXES_STRICT": "1: what is unknown or failed ends the process (for CI and image builds)",
    "ROCM_FIXES_AITER_SAMPLER": "0: AITER's top-k and top-p sampler isn't used",
    "ROCM_FIXES_HEAL": "1: where TileLang got in before the HIP runtime, its stub's table is repaired",
    "ROCM_FIXES_CACHE": "a folder for downloads and caches",
}
_WORDS = {"1": True, "on": True, "true": True, "yes": True, "0": False, "off": False, "false": False, "no": False}


class Settings(NamedTuple):
    """What the user switched; complaints holds a line for each thing that isn't understood."""

    off: bool = False
    skip: frozenset[str] = frozenset()
    strict: bool = False
    complaints: tuple[str, ...] = ()


def flag(name: str, default: bool, environ: Mapping[str, str] = os.environ) -> bool:
    """A switch's value; the default where it isn't set or isn't one of 1, on, true, yes, 0, off, false, no."""
    return _WORDS.get(environ.get(name, "").strip().lower(), default)


def read(names: Iterable[str], environ: Mapping[str, str] = os.environ) -> Settings:
    """The switches in environ; names are those of the patches and guards that ROCM_FIXES_SKIP may hold."""
    complaints = []
    for variable in environ:
        if variable.startswith("ROCM_FIXES") and variable not in SWITCHES:
            complaints.append(f"{variable} isn't a switch{nearest(variable, SWITCHES)}")
        elif variable in SWITCHES and variable not in ("ROCM_FIXES_SKIP", "ROCM_FIXES_CACHE"):
            value = environ[variable].strip().lower()
            if value and value not in _WORDS:
                complaints.append(f"{variable}={environ[variable]} is left aside: it takes {', '.join(_WORDS)}")
    names = set(names)
    wanted = {name.strip() for name in environ.get("ROCM_FIXES_SKIP", "").split(",")} - {""}
    for name in sorted(wanted - names):
        said = "skips nothing: no patch or guard is called that"
        complaints.append(f"ROCM_FIXES_SKIP={name} {said}{nearest(name, names)}")
    off, strict = not flag("ROCM_FIXES", True, environ), flag("ROCM_FIXES_STRICT", False, environ)
    return Settings(off, frozenset(wanted & names), strict, tuple(complaints))


def nearest(name: str, known: Iterable[str]) -> str:
    """How a complaint about a name that isn't known ends: with the nearest that is, or with all of them."""
    import difflib  # only where somebody misspelt a name

    near = difflib.get_close_matches(name, sorted(known), 1, 0.5)
    return f"; did you mean {near[0]}?" if near else f" (there are: {', '.join(sorted(known))})"
