"""What the overlay does to one process, and what it says of it.

The doors lead here. Nothing comes out of them but None: what isn't understood is left as stock has it, and said once.
Strict mode is the exception, and it ends the process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from . import __version__, records, settings, store
from .guards import Guard
from .importing import Finder, Loader, source_of
from .live import NotStock, transplant
from .patch import Mended, Outcome, Patch, Result, Site, State, by_module, unknown
from .series import remembered

# vLLM shows INFO only below its own logger.
logger = logging.getLogger("vllm.rocm_fixes")

_KEPT: tuple[State, ...] = ("failed", "unknown", "refused")  # stock is kept, and somebody should know


class Process:
    """The series and the guards in one process."""

    def __init__(self, series: Sequence[Patch], guards: Sequence[Guard]) -> None:
        self.series, self.guards = series, guards
        self.site = Site()
        self.results: dict[str, Result] = {}
        self._said: set[str] = set()
        self._choose()
        self._made: dict[str, tuple[Outcome, ...]] = {}  # of modules that are being imported
        self._prepared = self._registered = False
        self._needed_guards: set[str] = set()  # guards that were switched off too late
        self.milliseconds = 0.0  # spent in the two doors
        self._recorded = False
        self._finder: Finder | None = None
        self._unsaid = [True]
        self._renew_lock()
        os.register_at_fork(after_in_child=self._renew_lock)

    def _renew_lock(self) -> None:
        """A forked child has none of the threads that may hold the lock."""
        self._lock = threading.RLock()

    def prepare(self) -> None:
        """Install finder and guards, and mend what is loaded. The second call does nothing, but waits for the first."""
        with self._lock:
            if self._prepared:
                return
            begun = time.perf_counter()
            if self.settings.off:
                self._prepared = True
                logger.debug("vllm-rocm-fixes %s is switched off by ROCM_FIXES", __version__)
                return
            self.site = self._found()
            skipped = (patch for patch in self.series if patch.name in self.settings.skip)
            self.results |= {patch.name: Result(patch, "skipped", "named in ROCM_FIXES_SKIP") for patch in skipped}
            for guard in self.working():
                try:
                    guard.install()
                except Exception as error:
                    self._guard_failed(guard.name, error)
            self._look_out()
            self._prepared = True  # now: where it is interrupted before, the next call begins again
            self._mend_loaded()
            self.milliseconds += 1000 * (time.perf_counter() - begun)

    def register(self) -> None:
        """Prepare if that has not happened, mend what is loaded, examine what isn't, and say so in one line."""
        with self._lock:
            if not self._registered:
                self._read_again()
            self.prepare()
            if self.settings.off:
                self._registered = True
                self._hand_switches_to_ray()
                return
            begun = time.perf_counter()
            if self.site.root is None:  # the pytest door opens before vLLM is imported
                self.site = self._found()
            self._mend_loaded()
            if self._registered:
                return
            self._registered = True
            self._survey()
            self._hand_switches_to_ray()
            self._say_line()
            self.milliseconds += 1000 * (time.perf_counter() - begun)
            self._recorded = records.write(self) is not None

    def _read(self) -> settings.Settings:
        found = settings.read([p.name for p in self.series] + [g.name for g in self.guards])
        for complaint in found.complaints:
            self._warn(complaint)
        return found

    def _choose(self) -> None:
        self.settings = self._read()
        self.site = self.site._replace(skipped=self.settings.skip)
        self._wanted = by_module(p for p in self.series if p.name not in self.settings.skip)
        self._pending = set(self._wanted)  # modules not mended yet

    def working(self) -> list[Guard]:
        """The guards that are not switched off."""
        off = {g.name for g in self.guards} if self.settings.off else self.settings.skip
        return [g for g in self.guards if g.name not in off or g.name in self._needed_guards]

    def _look_out(self) -> None:
        """Put a finder for what is wanted in the place of the one before; switched off, one for nothing.

        In one step, and none is taken away: an import of another thread that walks the list would miss a finder.
        """
        guards = self.working()
        wanted = {} if self.settings.off else self._wanted
        packages = {
            package: [g.around for g in guards if package in g.packages] for g in guards for package in g.packages
        }
        before = self._finder
        self._finder = Finder({m: self._code for m in wanted}, packages, self._guard_failed, self._executed)
        if before in sys.meta_path:
            sys.meta_path[sys.meta_path.index(before)] = self._finder
        else:
            sys.meta_path.insert(0, self._finder)

    def _read_again(self) -> None:
        """Follow switches that came after the platform door.

        vLLM's executors over Ray hand the driver's variables to a worker when it has vLLM imported, shortly before
        they call the general door (v1/executor/ray_executor_v2.py, ray_executor.py). What is mended by then stays so.
        """
        before, guarded = self.settings, self.working()
        self.settings = self._read()
        if before == self.settings:
            return
        if before.off or not self._prepared:
            self._prepared = False
            self._choose()
            return
        for name in sorted(before.skip - self.settings.skip):
            self._warn(f"{name} stays off: its switch was taken back too late, set it where `ray start` runs")
        self.settings = self.settings._replace(skip=self.settings.skip | before.skip)
        self.site = self.site._replace(skipped=self.settings.skip)
        wanted = [p for patches in self._wanted.values() for p in patches]
        for patch in (p for p in wanted if self.settings.off or p.name in self.settings.skip):
            if patch.name in self._names("applied"):
                self._warn(f"{patch.name} is mended already: its switch came too late, set it where `ray start` runs")
            else:
                self.results[patch.name] = Result(patch, "skipped", "switched off after the platform door")
        self._wanted = by_module(p for p in self.series if p.name not in self._names("skipped"))
        self._pending &= self._wanted.keys()
        for guard in guarded:
            if guard not in self.working():
                self._keep_guard(guard.name)
        self._look_out()

    def _keep_guard(self, name: str) -> None:
        """Go on with a guard that is switched off now, where a patch that is applied would be refused without it."""
        site = self.site._replace(skipped=frozenset({name}))
        for patch in [r.patch for r in self.results.values() if r.state == "applied"]:
            try:
                why = patch.refuse(site) if patch.refuse else None
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
            if why:
                self._needed_guards.add(name)
                which = f"{name} stays, for {patch.name} is mended already"
                self._warn(f"{which}: its switch came too late, set it where `ray start` runs ({why})")

    def _say_line(self) -> None:
        """Log the line once INFO is shown, now or with a later import.

        `vllm serve` opens the doors while it reads its arguments; 0.32.0 sets its logging up after that.
        """
        if self._finder and not logger.isEnabledFor(logging.INFO):
            self._finder.reminder = self._say_line
            return
        if self._finder:
            self._finder.reminder = None
        with contextlib.suppress(Exception):  # IndexError: another thread was faster
            self._unsaid.pop()
            logger.info("%s", self.line())

    def line(self) -> str:
        """One line: the overlay's and vLLM's versions, what was done, and how many patches had nothing to do."""
        told: dict[State, str] = {"applied": "needed and applied", "waiting": "needed and applied when imported"}
        told |= {state: f"{state}, stock kept" for state in _KEPT} | {"skipped": "skipped"}
        parts = [f"{', '.join(names)} {what}" for state, what in told.items() if (names := self._names(state))]
        said = "; ".join([*parts, *(f"{len(n)} {s}" for s in ("clear", "absent") if (n := self._names(s)))])
        guards = ", ".join(g.name for g in self.working())
        release = self.site.version or "of unknown version"
        return f"vllm-rocm-fixes {__version__} on vLLM {release}: {said}; guards {guards or 'none'}"

    def _names(self, state: State) -> list[str]:
        return [p.name for p in self.series if p.name in self.results and self.results[p.name].state == state]

    def _found(self) -> Site:
        """The site, with the folder that holds the vllm being imported and what it says of its version.

        A plugin is called where there is one. vLLM has read vllm/_version.py by then; "dev" stands for no such file.
        """
        vllm = vars(sys.modules.get("vllm", object))
        folders, said = list(vllm.get("__path__", ())), vllm.get("__version__")
        root = Path(folders[0]).parent if folders else None
        if not isinstance(said, str) or said == "dev":
            from .installed import version

            said = version(root) if root else None
        return self.site._replace(root=root, version=said)

    def _mended(self, module: str, loader: Any, origin: str | None) -> tuple[bytes | str, str, Mended]:
        """A module's source, its file name and what becomes of it, and what its new code calls is imported."""
        source, filename = source_of(module, loader, origin)
        mended = store.mended(source, filename, self._wanted.get(module, ()), self.site)
        for needed in _called(mended.code) if mended.code else ():
            import_module(needed)  # now: by the time it is called the overlay may be uninstalled, or another one
        return source, filename, mended

    # The import way

    def _code(self, module: str, loader: Any, origin: str | None) -> CodeType | None:
        """The mended code of a module that is being imported, None where stock is kept."""
        with self._keeping_stock(module):
            _, _, mended = self._mended(module, loader, origin)
            self._record(mended.outcomes, "waiting", "when it is imported")
            self._made[module] = mended.outcomes
            return mended.code
        return None

    def _executed(self, module: str) -> None:
        """Say that the mended code of a module has run; code may be asked for and not be run, or not to its end."""
        self._pending.discard(module)
        self._record(self._made.pop(module, ()), "applied", "while it was imported")

    # The live way

    def _mend_loaded(self) -> None:
        for name in sorted(self._pending):
            module = sys.modules.get(name)
            spec = getattr(module, "__spec__", None)
            if module is None or spec is None or getattr(spec, "_initializing", False):
                continue
            self._pending.discard(name)
            if not isinstance(spec.loader, Loader):
                with self._keeping_stock(name):
                    self._mend_live(name, module, spec.loader, spec.origin)

    def _mend_live(self, name: str, module: ModuleType, loader: Any, origin: str | None) -> None:
        source, filename, mended = self._mended(name, loader, origin)
        outcomes, way, unreached = mended.outcomes, "", []
        if mended.code is not None:
            try:
                stock = loader.get_code(name) if type(loader) is SourceFileLoader else None  # of its source's .pyc
                stock = stock or compile(source, filename, "exec", dont_inherit=True)
                done = transplant(module, stock, mended)
                way, unreached = str(done), done.unreached
            except NotStock as doubt:
                late = f"loaded before us: {doubt}"
                outcomes = tuple(o._replace(failed=late) if o.applied else o for o in outcomes)
        self._record(outcomes, "applied", way)
        for holder in unreached:
            self._warn(f"{name} was loaded before us, and the old code stays in {holder}")

    # What isn't loaded: only looked at

    def _survey(self) -> None:
        """Say what is found in the modules that aren't loaded."""
        root, modules = self.site.root, sorted(self._pending)
        if root is not None and not root.is_dir():  # an archive: they speak for themselves when they are imported
            return
        with self._keeping_stock(*modules):
            if root is None:
                raise LookupError("vLLM has no folder")
            found = remembered([patch for module in modules for patch in self._wanted[module]], self.site)
            # By now another thread may have imported some.
            self._record((o for o in found if o.patch.module in self._pending), "waiting", "when it is imported")

    # What is written down and said

    @contextlib.contextmanager
    def _keeping_stock(self, *modules: str) -> Iterator[None]:
        """Whatever goes wrong inside leaves these modules as stock has them."""
        try:
            yield
        except Exception as error:
            verdict = unknown(f"{type(error).__name__}: {error}")
            self._record(Outcome(patch, verdict) for module in modules for patch in self._wanted.get(module, ()))

    def _record(self, outcomes: Iterable[Outcome], applied: State = "applied", way: str = "") -> None:
        for patch, verdict, refused, failed in outcomes:
            if failed or refused:
                self._put(Result(patch, "failed" if failed else "refused", failed or refused or ""))
            elif verdict.kind == "needed":
                self._put(Result(patch, applied, f"{verdict.reason}; {way}"))
            else:
                self._put(Result(patch, verdict.kind, verdict.reason))

    def _put(self, result: Result) -> None:
        before = self.results.get(result.patch.name)
        if before == result or (before and (before.state, result.state) == ("applied", "waiting")):
            return  # somebody may ask the loader of a mended module for its code again
        self.results[result.patch.name] = result
        said = f"{result.patch.name}: {result.state}, {result.reason} ({result.patch.module})"
        if result.state in _KEPT:
            self._warn(f"{said}; stock is kept")
            if self.settings.strict and result.state != "refused":
                raise SystemExit(f"vllm-rocm-fixes (ROCM_FIXES_STRICT): {said}")
        else:
            logger.debug("%s", said)
        if self._recorded:  # a patch that waited, in this process or in one that was forked from it
            records.write(self)

    def _guard_failed(self, package: str, error: Exception) -> None:
        self._warn(f"a guard of {package} failed and was left out: {type(error).__name__}: {error}")

    def _warn(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            logger.warning("%s", text)

    def _hand_switches_to_ray(self) -> None:
        """Ray workers get the variables that the platform names (v1/executor/ray_executor.py, 0.14.0 to 0.33.0)."""
        platform = vars(sys.modules.get("vllm.platforms", object)).get("_current_platform")
        if platform is not None:
            named = list(getattr(platform, "additional_env_vars", ()))
            type(platform).additional_env_vars = named + [name for name in settings.SWITCHES if name not in named]


def _called(code: CodeType) -> set[str]:
    """The overlay's modules that mended code imports from."""
    inner = (_called(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return {name for name in code.co_names if name.startswith(f"{__package__}.")}.union(*inner)
