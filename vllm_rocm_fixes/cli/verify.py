"""`vllm-rocm-fixes verify`: vLLM's start on this installation, without and with the overlay, side by side."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import doors, node, traces
from ..start import GPU, STEPS, start
from ..trial import NOT_FROM_HERE
from . import Stop, add_command, add_vllm_option, all_patches, installation, number

if TYPE_CHECKING:
    from ..installation import Installation
    from . import Subparsers

_TEXT = """\
Child processes go through vLLM's import path step by step: configurations, the worker, the sampler, a forked and a
spawned child. Each step tells what it imported too early and whether it asked for a GPU, with the overlay off and on.
Without --real that happens on a stand-in MI300X with stand-in packages, on any machine: no GPU is used. With --real it
is this machine's own platform and packages.

Then, in another child, each patch that claims to be applied is looked at: the functions in memory are compared with
what the mended tree compiles to, and the patch's own check is asked, which does what a user would do with that module.
A check that has no answer on this machine says why.

No AMD node was available while this was made: --real was tried on vLLM's CPU platform only, and nothing was proven
with a real /dev/kfd. The report says so too, where this machine has none.

Exit status: 0 everything that is claimed is so; 1 something isn't, and the last lines say what; 2 nothing was checked,
such as under ROCM_FIXES=off, where nothing is claimed, or bad input."""
_UNPROVEN = "Nothing here is proven on an AMD node or with a real /dev/kfd: that takes --real on a node that has one"
_UNPROVEN_REAL = "This command was never tried on an AMD node, or with a real /dev/kfd, before this one"
SETS = {"image": node.IMAGE, "pip": node.PIP, "all": node.EVERYTHING}
# Steps that don't need a GPU; the others of STEPS are for a node that has one, stand-in or real.
_CHILDREN = ("children", "forked child", "spawned child")

_MEASURE = """
import json, os, sys, time
import torch
def kilobytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024
before, begun = kilobytes(), time.perf_counter()
__import__(sys.argv[1])
print(json.dumps({"seconds": round(time.perf_counter() - begun, 3), "megabytes": (kilobytes() - before) // 1024}))
"""
_ASK = """
import json, os
import torch
from vllm.platforms import current_platform
told = {"torch": torch.__version__, "hip": torch.version.hip, "platform": type(current_platform).__name__}
told |= {"kfd": os.path.exists("/dev/kfd"), "devices": torch.cuda.device_count(), "name": None, "works": None}
if torch.version.hip and told["devices"]:
    from vllm.plugins import load_general_plugins
    load_general_plugins()
    def multiply():
        ones = torch.ones(64, 64, device="cuda")
        return float((ones @ ones)[0, 0]) == 64.0
    told |= {"name": torch.cuda.get_device_name(0), "works": multiply()}
    import importlib.util
    if importlib.util.find_spec("tilelang"):
        import tilelang
        told |= {"works_after_tilelang": multiply()}
print(json.dumps(told))
"""


@dataclass(frozen=True)
class Seen:
    """A package that a step imported, or GPU; by is the frame that asked. Cost only where the package is real."""

    what: str
    by: str
    chain: tuple[str, ...]
    seconds: float | None = None
    megabytes: int | None = None


@dataclass
class Side:
    """One side: the outcome of each step, and what it imported or asked for."""

    outcomes: dict[str, str] = field(default_factory=dict)
    seen: dict[str, list[Seen]] = field(default_factory=dict)

    def cell(self, step: str) -> str:
        """The step's line in the table."""
        if step not in self.outcomes:
            return "didn't end"
        names = ", ".join(dict.fromkeys(seen.what for seen in self.seen.get(step, ())))
        failed = "" if self.outcomes[step] == "ok" else self.outcomes[step].partition(":")[0]
        return "; ".join(filter(None, (names, failed))) or "nothing"


def add_parser(subparsers: Subparsers) -> None:
    """Add this command's parser."""
    parser = add_command(subparsers, "verify", run, "start vLLM's import path, without and with the overlay", _TEXT)
    add_vllm_option(parser)
    parser.add_argument("--real", action="store_true", help="on this machine's own platform, packages and GPU")
    parser.add_argument(
        "--packages",
        choices=sorted(SETS),
        default="image",
        help="what the stand-in node holds: image (aiter, tilelang, mori; the default), pip (aiter, tilelang) or all",
    )
    parser.add_argument(
        "--step", action="append", metavar="STEP", choices=STEPS, help=f"only this step: {', '.join(STEPS)}"
    )
    limit = number(float, "a number of seconds, above 0 and up to a million", 1e6)
    parser.add_argument("--limit", type=limit, default=600, metavar="S", help="seconds for each child (600)")
    parser.add_argument("--json", action="store_true", help="print JSON, with every chain")


def run(args: argparse.Namespace) -> int:
    """Run both sides, and print what they did. Returns the exit status."""
    vllm = installation(args)
    shut = _shut(vllm.root)
    if shut:
        raise Stop(f"nothing was checked, because nothing is claimed here: {shut}")
    root = args.vllm.absolute() if args.vllm is not None else None
    with tempfile.TemporaryDirectory(prefix="vllm-rocm-fixes-verify-") as name:
        folder = Path(name)
        report = _on_this_machine(args, folder, root) if args.real else _on_the_stand_in(args, folder, vllm, root)
    report = {"vllm": {"version": vllm.version, "root": str(vllm.root)}, **report}
    report["wrong"] = list(wrong(report))
    print(json.dumps(report, indent=2, default=_plain) if args.json else "\n".join(_lines(report)))
    return 1 if report["wrong"] else 0


def _shut(root: Path) -> str | None:
    """Why the overlay claims nothing in a child of this command; None: it is let in."""
    reason = doors.shut(os.environ, [patch.name for patch in all_patches()])
    folders = dict.fromkeys((str(root), *sys.path))
    closed = [door.reason for door in doors.look(list(folders)) if not door.open and door.group == doors.GENERAL]
    return ": ".join(reason) if reason else next(iter(closed), None)


def _on_the_stand_in(args: argparse.Namespace, folder: Path, vllm: Installation, root: Path | None) -> dict[str, Any]:
    if vllm.version is None:
        raise Stop(f"{vllm.root}/vllm/_version.py names no version, and the stand-in node needs one")
    packages = SETS[args.packages]

    def build(name: str) -> node.Node:
        return node.build(folder / name, version=vllm.version.partition("+")[0], vllm=root, packages=packages)  # type: ignore[union-attr]

    def side(name: str) -> Side:
        done = start(build(name), overlay=name == "with", steps=args.step or (), timeout=args.limit)
        seen: dict[str, list[Seen]] = {}
        for found in done.found:
            seen.setdefault(found.step, []).append(Seen(found.what, found.by, found.chain))
        return Side(done.outcomes, seen)

    with ThreadPoolExecutor(2) as pool:
        try:
            without, mended = pool.map(side, ("without", "with"))
        except (subprocess.TimeoutExpired, RuntimeError) as error:
            raise Stop(f"the start on the stand-in node: {error}") from error
        patches = pool.submit(_patches, build("patches").environment(), folder, args.limit)
        saved = {s.what for seen in without.seen.values() for s in seen} - {GPU}
        cost = {name: _measure(name) for name in sorted(saved)}
    return {
        "node": f"a stand-in MI300X with {', '.join(packages)}; no GPU is used",
        "unproven": _UNPROVEN,
        "real": False,
        "without": without,
        "with": mended,
        "cost": cost,
        **patches.result(),
    }


def _on_this_machine(args: argparse.Namespace, folder: Path, root: Path | None) -> dict[str, Any]:
    # The steps alone: neither the stand-in packages nor its watch on torch.
    shutil.copytree(node.TEMPLATES / "node" / "rocm_standin", folder / "steps" / "rocm_standin")
    environ = dict(os.environ)
    path = [*([str(root)] if root else []), environ.get("PYTHONPATH", ""), str(folder / "steps")]
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    gpu = _json_of(_ASK, environ, args.limit)
    works = bool(gpu.get("devices"))
    steps = args.step or [step for step in STEPS[1:] if step not in _CHILDREN] + (["children"] if works else [])
    sides = {}
    for name in ("without", "with"):
        place = folder / name
        place.mkdir()
        sides[name] = _traced(place, environ | {"ROCM_FIXES": "off" if name == "without" else "on"}, steps, args.limit)
    cost: dict[str, Any] = {}
    for seen in (s for cells in sides["without"].seen.values() for s in cells if s.what != GPU):
        cost.setdefault(seen.what, {"seconds": seen.seconds, "megabytes": seen.megabytes})
    machine = gpu.get("name") or f"this machine, vLLM's {gpu.get('platform', 'platform unknown')}; there is no AMD GPU"
    told = {"node": machine, "unproven": _UNPROVEN_REAL if gpu.get("kfd") and gpu.get("hip") else _UNPROVEN}
    return {**told, "real": True, "gpu": gpu, **sides, "cost": cost, **_patches(environ, folder, args.limit)}


def _traced(folder: Path, environ: Mapping[str, str], steps: Sequence[str], limit: float) -> Side:
    """The steps on the real platform: what they imported is told by the tracer."""
    log, trace = folder / "events", folder / "trace"
    trace.mkdir()
    traces.prepare(trace)
    child = subprocess.Popen(
        [sys.executable, "-m", "rocm_standin.start", *steps],
        env=traces.environment(trace, {**environ, "ROCM_STANDIN_LOG": str(log)}),
        cwd=folder,
        stdout=(folder / "output").open("wb"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        child.wait(limit)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    side = Side()
    owners: dict[int, str] = {}
    for event in map(json.loads, log.read_text(encoding="utf-8").splitlines() if log.exists() else ()):
        if event["kind"] == "step":
            side.outcomes[event["name"]] = event["detail"]
            owners.setdefault(event["pid"], event["name"])
    if not side.outcomes:
        last = (folder / "output").read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
        raise Stop(f"the steps didn't start within {limit:.0f} s: {last}")
    processes = traces.read(trace)
    for process in processes:
        owner: traces.Process | None = process
        while owner is not None and owner.pid not in owners:
            owner = None if owner.parent is None else processes[owner.parent]
        cells = side.seen.setdefault(owners[owner.pid], []) if owner else []
        for event in process.events:
            took = round((event.end - event.time) / 1e9, 3) if event.end else None
            by, chain = (event.chain[-1] if event.chain else event.outcome), tuple(event.chain)
            if event.kind == "hazard" and not event.failed:
                cells.append(Seen(event.name, by, chain, took, event.kilobytes // 1024))
            elif event.kind == "device" or (event.kind == "gpu" and event.outcome == "initialised"):
                cells.append(Seen(GPU, by, chain))
    return side


def _patches(environ: Mapping[str, str], folder: Path, limit: float) -> dict[str, Any]:
    """What each patch claims in a process with vLLM's plugins, and whether that is so.

    A module that ends the process, such as one that loads a native library twice, is left out the next time.
    """
    file = folder / "patches.json"
    ends: dict[str, str] = {}
    try:
        while True:
            done = subprocess.run(
                [sys.executable, "-m", "vllm_rocm_fixes.behaviour", str(file), json.dumps(ends)],
                env=environ,
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=limit,
                check=False,
                stdin=subprocess.DEVNULL,
            )
            said = file.read_text(encoding="utf-8")
            if done.returncode >= 0 or said in ends or said.startswith("{"):
                break
            ends[said] = signal.Signals(-done.returncode).name
        told: dict[str, Any] = json.loads(said)
    except subprocess.TimeoutExpired:
        raise Stop(f"loading the modules of the patches took more than {limit:.0f} s") from None
    except (OSError, ValueError):
        raise Stop(f"the modules of the patches can't be loaded: {_last(done.stderr)}") from None
    return told


def _measure(package: str) -> dict[str, Any] | None:
    """What importing a package costs after torch, in a process of its own; None where it isn't installed here."""
    if importlib.util.find_spec(package) is None:
        return None
    told = _json_of(_MEASURE, os.environ | {"ROCM_FIXES": "off"}, 120, package)
    return told if "error" not in told else None


def _json_of(code: str, environ: Mapping[str, str], limit: float, *arguments: str) -> dict[str, Any]:
    """What a child prints as JSON in its last line; {"error": ...} where it doesn't."""
    command = [sys.executable, "-c", NOT_FROM_HERE + code, *arguments]
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=limit, check=False, stdin=subprocess.DEVNULL
        )
        told: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {limit:.0f} s"}
    except ValueError:
        return {"error": _last(done.stderr)}
    return told


def _last(text: str) -> str:
    return text.strip().rpartition("\n")[2] or "it said nothing"


# What is wrong, and what is printed

_PRODUCTS = {"works": "", "works_after_tilelang": " after TileLang was imported"}


def wrong(report: Mapping[str, Any]) -> Iterator[str]:
    """What is claimed and isn't so, one line each."""
    without, mended = report["without"], report["with"]
    for step, seen in mended.seen.items():
        for one in {s.what: s for s in reversed(seen)}.values():
            what = "asks for the GPU" if one.what == GPU else f"imports {one.what}"
            yield f"with the overlay, {step} still {what}, in {one.by or 'a file that is not known'}"
    for step, outcome in without.outcomes.items():
        if outcome == "ok" and mended.outcomes.get(step, "it didn't end") != "ok":
            yield f"with the overlay, {step} fails: {mended.outcomes.get(step, 'it did not end')}"
    for name, patch in report["patches"].items():
        if patch["wrong"]:
            yield f"{name} is {patch['state']}, and {patch['wrong']}"
        elif patch["state"] in ("failed", "unknown"):
            yield f"{name} is {patch['state']}: {patch['reason']}"
    if "registered" not in report["doors"]:
        yield "vLLM didn't load the overlay's plugin, and `vllm-rocm-fixes status` calls its door open: report it"
    gpu = report.get("gpu") or {}
    if gpu.get("error"):
        yield f"this machine's platform can't be asked: {gpu['error']}"
    for key, when in _PRODUCTS.items():
        if gpu.get(key) is False:
            yield f"the GPU multiplies wrongly{when}"


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    without, mended = report["without"], report["with"]
    yield f"vLLM {report['vllm']['version']} in {report['vllm']['root']}"
    yield f"On {report['node']}"
    yield report["unproven"]
    yield ""
    steps = [step for step in STEPS if step in without.outcomes or step in mended.outcomes]
    cells = [("STEP", "WITHOUT", "WITH"), *((step, without.cell(step), mended.cell(step)) for step in steps)]
    wide = [max(len(row[column]) for row in cells) for column in (0, 1)]
    yield from (f"{one:<{wide[0]}}  {two:<{wide[1]}}  {three}".rstrip() for one, two, three in cells)
    measured = {name: cost for name, cost in report["cost"].items() if cost and cost["seconds"] is not None}
    if report["cost"]:
        yield ""
        shown = [f"{name} {cost['seconds']:.2f} s and {cost['megabytes']} MB" for name, cost in measured.items()]
        yield f"What it costs each process, after torch: {'; '.join(shown) or 'not measured'}"
    if len(measured) < len(report["cost"]):
        missing = ", ".join(name for name in report["cost"] if name not in measured)
        yield f"Not installed here, so not measured: {missing}"
    yield ""
    wide_name = max((len(name) for name in report["patches"]), default=0)
    for name, patch in report["patches"].items():
        yield f"{name:<{wide_name}}  {patch['state']}{_checked(patch)}"
    gpu = report.get("gpu")
    if gpu:
        yield ""
        yield f"torch {gpu.get('torch')}, HIP {gpu.get('hip')}, {gpu.get('devices')} devices, {gpu.get('platform')}"
        for key, when in _PRODUCTS.items():
            if gpu.get(key) is not None:
                yield f"A matrix product on the GPU{when} is {'right' if gpu[key] else 'wrong'}"
    yield ""
    if report["wrong"]:
        yield from (f"NOT SO: {line}" for line in report["wrong"])
    else:
        yield "Everything that is claimed is so."


def _checked(patch: Mapping[str, Any]) -> str:
    if patch["note"]:
        return f", not looked at: {patch['note']}"
    if patch["state"] != "applied" or patch["wrong"]:
        return ""
    asked = {None: "it has no check of its own", "yes": "its own check passes"}
    said = asked.get(patch["asked"], f"its own check can't be asked here: {patch['asked']}")
    return f", the code in memory is the mended one; {said}"


def _plain(value: object) -> Any:
    if isinstance(value, Side):
        return {"outcomes": value.outcomes, "seen": {k: [asdict(s) for s in v] for k, v in value.seen.items()}}
    raise TypeError(type(value))
