"""What a start may still import, or ask, with the overlay on: each with its reason, and where upstream knows it.

The goal is an empty list. `make contract` fails for an entry that nothing matches any more.
"""

from __future__ import annotations

from dataclasses import dataclass

from packaging.version import Version

from vllm_rocm_fixes.start import Found


@dataclass(frozen=True)
class Known:
    """what, asked for by a frame whose file ends with `file` and whose function is `function`, in these releases."""

    what: tuple[str, ...]
    file: str
    function: str
    reason: str
    upstream: str
    since: str = "0.14.0"
    until: str = "99"
    steps: tuple[str, ...] = ()  # empty: in any

    def covers(self, found: Found, release: str) -> bool:
        """Whether that is what was found."""
        place, _, function = found.by.rpartition(" ")
        return (
            found.what in self.what
            and place.rpartition(":")[0].endswith(self.file)
            and function == self.function
            and Version(self.since) <= Version(release) <= Version(self.until)
            and (not self.steps or found.step in self.steps)
        )


KNOWN: tuple[Known, ...] = ()
