"""What a patch is, a verdict, and what became of a module or of a patch in a process.

Every process imports this, so: named tuples, which are made in an eighth of a dataclass's time, and annotations that
aren't strings, which typing would compile one by one.
"""

import ast
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import CodeType, MappingProxyType, ModuleType
from typing import Literal, NamedTuple, get_args

Kind = Literal["needed", "clear", "absent", "unknown"]
State = Literal["applied", "waiting", "clear", "absent", "unknown", "refused", "failed", "skipped"]


class Verdict(NamedTuple):
    """What was read off a module's source, and why.

    needed: the defect's shape is there, and the edit knows that shape.
    clear: the place is there, and the defect isn't.
    absent: the module isn't part of this vLLM.
    unknown: the place isn't found, or looks like nothing that is known.
    """

    kind: Kind
    reason: str


class Passing(Verdict):
    """An unknown that lies in the look and not in the source: the file wasn't read, or memory or stack had an end."""

    __slots__ = ()


needed, clear, absent, unknown = (partial(Verdict, kind) for kind in get_args(Kind))  # each takes the reason


class Site(NamedTuple):
    """The vLLM that is being mended, and what the user switched off.

    root is the folder, or the archive, that holds `vllm/` (None before vLLM is imported), version is what the
    files say of themselves, skipped holds the names in ROCM_FIXES_SKIP.
    """

    root: Path | None = None
    version: str | None = None
    skipped: frozenset[str] = frozenset()


class Patch(NamedTuple):
    """An edit of the syntax tree of one stock module.

    examine reads a tree and changes nothing. mend changes the tree in place; it is called only where examine said
    "needed", and examine must say "clear" afterwards. refuse, where given, says why a needed patch must not be applied
    to this site (None: go ahead). since and until name the first release with the defect and the first without it;
    they serve the report and the matrix, and decide nothing but whether a missing module came later than this release.
    """

    name: str
    module: str
    summary: str
    origin: tuple[str, ...]
    since: str
    until: str | None
    examine: Callable[[ast.Module], Verdict]
    mend: Callable[[ast.Module], None]
    refuse: Callable[[Site], str | None] | None = None

    @property
    def file(self) -> ModuleType:
        """The module that holds its functions: several patches may share one, by functools.partial."""
        return sys.modules[getattr(self.examine, "func", self.examine).__module__]


def by_module(patches: Iterable[Patch]) -> dict[str, list[Patch]]:
    """The patches of each module, in the order given."""
    modules: dict[str, list[Patch]] = {}
    for patch in patches:
        modules.setdefault(patch.module, []).append(patch)
    return modules


class Outcome(NamedTuple):
    """What became of one patch on one module: the verdict on stock, and why a needed patch was not applied."""

    patch: Patch
    verdict: Verdict
    refused: str | None = None
    failed: str | None = None

    @property
    def lasts(self) -> bool:
        """The same source gives the same outcome at the next start; what was refused or failed may be mended then."""
        return not (self.refused or self.failed or isinstance(self.verdict, Passing))

    @property
    def applied(self) -> bool:
        """The mended tree holds this patch, and its second examination was clear."""
        return self.verdict.kind == "needed" and not self.refused and not self.failed


class Mended(NamedTuple):
    """A module after its patches: tree and code are None where stock is kept.

    What a module that is loaded already needs beside the code: decorated holds the qualified names that have
    decorators, added the code of the functions that the patches put at module scope.
    """

    outcomes: tuple[Outcome, ...]
    tree: ast.Module | None = None
    code: CodeType | None = None
    decorated: frozenset[str] = frozenset()
    added: Mapping[str, CodeType] = MappingProxyType({})


class Result(NamedTuple):
    """What became of a patch in a process; "waiting": needed, and applied when the module is imported."""

    patch: Patch
    state: State
    reason: str
