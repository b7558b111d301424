"""Serve the chat model with an unchanged `vllm serve`, show what each process says of the overlay, ask a question.

`python tools/serve.py` leaves the server running until Ctrl-C; with --once it ends after the answer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import model

QUESTION = "What is the capital of France? Answer in one short sentence."
SAMPLING = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 7, "max_tokens": 40}
# --enforce-eager, a short context and a part of the memory: for a laptop's sake. None of it is for the overlay's.
OPTIONS = "--max-model-len 512 --enforce-eager --gpu-memory-utilization 0.3 --dtype bfloat16"
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
PROCESSES = ("APIServer", "EngineCore", "Worker")
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PATIENCE = 600  # seconds; it takes about 35 on two idle cores
# vLLM puts the process before each line, in the API server as soon as it has parsed its arguments.
OURS = re.compile(r"(?:\((?P<process>[^)]*)\) )?.*?(?P<said>vllm-rocm-fixes \d.*)")


class Failed(Exception):
    """The one line that says what went wrong, and which file holds the rest."""


@dataclass(frozen=True)
class Server:
    """A running `vllm serve`: where it answers, its process, and the file that holds what it says."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def overlay(self) -> dict[str, list[str]]:
        """What each process has said of the overlay so far: name of the process -> lines."""
        found: dict[str, list[str]] = {}
        for line in re.sub(r"\x1b\[[0-9;]*m", "", self.log.read_text(errors="replace")).splitlines():
            if match := OURS.match(line):
                process = next((name for name in PROCESSES if name in (match["process"] or "")), PROCESSES[0])
                found.setdefault(process, []).append(match["said"])
        return found

    def ask(self, question: str = QUESTION, **sampling: object) -> str:
        """One chat completion over the OpenAI API."""
        body = {"model": model.NAME, "messages": [{"role": "user", "content": question}], **SAMPLING, **sampling}
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return str(json.load(answer)["choices"][0]["message"]["content"])
        except OSError as error:
            raise Failed(f"the server doesn't answer: {error}; its log is {self.log}") from error


def command(port: int) -> list[str]:
    """The command line, as a user would type it."""
    vllm = Path(sys.executable).with_name("vllm")
    where = ["--served-model-name", model.NAME, "--host", "127.0.0.1", "--port", str(port)]
    return [str(vllm), "serve", str(model.folder()), *where, *OPTIONS.split()]


@contextlib.contextmanager
def serving(log: Path, environment: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Start the server, wait until it is ready; at the end, whatever happened, end it and all its children."""
    model.make()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = {**ENVIRONMENT, **(environment or {})}
    print("$", shlex.join([*(f"{name}={value}" for name, value in started.items()), *command(port)]))
    print(f"log: {log}", flush=True)
    with log.open("wb") as out:
        # A signal while it is being started would leave a server that nobody knows: it waits until it is known.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
        process = subprocess.Popen(
            command(port),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **started},
            start_new_session=True,  # a process group of its own: what is ended at the end
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING),
        )
    server = Server(f"http://127.0.0.1:{port}", process, log)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
        wait(server)
        yield server
    finally:
        end(process)


def wait(server: Server) -> None:
    """Return when the server is ready; say every five seconds that it isn't."""
    start = said = time.monotonic()
    while not ready(server.url):
        now = time.monotonic()
        if server.process.poll() is not None:
            tail = "\n".join(server.log.read_text(errors="replace").splitlines()[-15:])
            raise Failed(f"{tail}\nvllm serve ended with status {server.process.returncode}; its log is {server.log}")
        if now - start > PATIENCE:
            raise Failed(f"vllm serve isn't ready after {PATIENCE} s; its log is {server.log}")
        if now - said >= 5:
            print(f"starting: {now - start:.0f} s", flush=True)
            said = now
        time.sleep(0.25)
    print(f"ready after {time.monotonic() - start:.0f} s: {server.url}", flush=True)


def ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask the server to stop, give it ten seconds, then end what is left of its process group."""
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        process.terminate()
        process.wait(10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def silence() -> str:
    """Why the overlay says nothing in a vLLM of this environment, and what to do about it."""
    try:
        from vllm_rocm_fixes import doors
    except ImportError:
        return "it isn't installed here: `make serve` installs it"
    shut = [door.reason for door in doors.look(sys.path) if not door.open]
    return shut[0] if shut else "no variable keeps it out: see what the log says of rocm_fixes"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--once", action="store_true", help="end after the answer")
    parser.add_argument("--log", type=Path, help="the file for the server's log")
    options = parser.parse_args()
    for number in STOPPING[1:]:
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    log, good = options.log or Path(tempfile.mkdtemp(prefix="vllm-rocm-fixes-")) / "serve.log", False
    try:
        with serving(log) as server:
            said = server.overlay()
            for name in PROCESSES:
                for line in said.get(name, [f"says nothing of vllm-rocm-fixes ({silence()})"]):
                    print(f"{name}: {line}")
            print(f"question: {QUESTION} ({', '.join(f'{k} {v}' for k, v in SAMPLING.items())})")
            print(f"answer: {server.ask().strip()}", flush=True)
            if not options.once:
                print(f"The server runs until Ctrl-C. Its OpenAI API: {server.url}/v1", flush=True)
                server.process.wait()
                raise Failed(f"vllm serve ended with status {server.process.returncode}; its log is {log}")
            missing = [name for name in PROCESSES if name not in said]
            if missing:
                names = ", ".join(missing)
                raise Failed(f"nothing was said of vllm-rocm-fixes by: {names} ({silence()}); the log is {log}")
        good = True
    except Failed as failed:
        print(f"error: {failed}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        good = True
        print("\nstopped")
    except SystemExit:  # from a signal
        good = True
        raise
    finally:
        if good and not options.log:
            shutil.rmtree(log.parent, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
