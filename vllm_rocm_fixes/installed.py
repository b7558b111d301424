"""What the files of a vLLM say of themselves, read without running any of them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from .patch import Patch, Verdict, absent, unknown

_VERSION = r"v?(\d+(?:\.\d+)*)[.-]?(?:(a|b|rc)\.?(\d+))?(?:\.?post(\d+))?(?:\.?dev(\d+))?"


def version(root: Path) -> str | None:
    """What vllm/_version.py below root says, read and not run; None where it says nothing."""
    try:
        tree = ast.parse((root / "vllm" / "_version.py").read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant):
            names = {target.id for target in statement.targets if isinstance(target, ast.Name)}
            if names & {"__version__", "version"} and isinstance(statement.value.value, str):
                return statement.value.value
    return None


def belongs(module: str, root: Path) -> bool:
    """Whether a module below root can be this vLLM's: in site-packages a `tests` folder is somebody else's."""
    return module.partition(".")[0] == "vllm" or (root / "setup.py").is_file()


def path_of(root: Path, module: str) -> Path | None:
    """The source file of a module below root, such as vllm.config.vllm or tests.utils; None where it has none."""
    if not belongs(module, root):
        return None
    stem = root.joinpath(*module.split("."))
    for path in (stem / "__init__.py", stem.with_name(f"{stem.name}.py")):
        if path.is_file():
            return path
    return None


def missing(patch: Patch, root: Path, release: str | None) -> Verdict:
    """The verdict on a module without a source file below root: absent where that is as it should be, else unknown."""
    top = patch.module.partition(".")[0]
    if not belongs(patch.module, root) or (top != "vllm" and not (root / top).is_dir()):
        return absent(f"this vLLM comes without its {top}/")
    place = f"{patch.module} isn't in {root}"
    if release is None:
        return unknown(f"{place}, and vLLM's release isn't known")
    if older(release, patch.since):
        return absent(f"{patch.module} came later than {release}")
    if patch.until is not None and not older(release, patch.until):
        return absent(f"{patch.module} is gone; the defect was mended in {patch.until}")
    return unknown(f"{place}: it moved, or has no source")


def older(one: str, other: str) -> bool:
    """Whether one version comes before the other, in the order of PEP 440; local parts such as +rocm don't count."""
    return _order(one) < _order(other)


def _order(text: str) -> tuple[tuple[int, ...], tuple[str, int], int, tuple[int, int]]:
    match = re.match(_VERSION, text, re.IGNORECASE)
    if match is None:
        return (), ("", 0), 0, (0, 0)
    release, kind, number, post, dev = match.groups()
    parts = tuple(map(int, re.sub(r"(\.0+)+$", "", release).split(".")))
    # A bare .dev comes before alpha, alpha before the release; a post release after it.
    pre = (kind.lower(), int(number)) if kind else ("", 0) if dev and not post else ("z", 0)
    return parts, pre, int(post) if post else -1, (0, int(dev)) if dev else (1, 0)
