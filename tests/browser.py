"""A page in a real headless Chromium, driven through its debugging protocol."""

from __future__ import annotations

import base64
import itertools
import json
import re
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path

from websockets.sync.client import connect

FLAGS = """
--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync --remote-debugging-port=0
"""


def program():
    """The browser's program; None where there is none."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Page:
    """One open page."""

    def __init__(self, socket):
        self._socket, self._numbers = socket, itertools.count(1)
        self.errors, self.requests = [], []
        for domain in ("Page", "Runtime", "Network"):
            self._call(f"{domain}.enable")

    def _call(self, method, **parameters):
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self._socket.recv(60))
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            if answer.get("method") == "Runtime.exceptionThrown":
                self.errors.append(answer["params"]["exceptionDetails"])
            elif answer.get("method") == "Network.requestWillBeSent":
                self.requests.append(answer["params"]["request"]["url"])

    def open(self, path):
        self._call("Emulation.setDeviceMetricsOverride", width=1400, height=900, deviceScaleFactor=1, mobile=False)
        self._call("Page.navigate", url=Path(path).as_uri())
        self.wait("document.readyState === 'complete' && !!window.drawn")

    def evaluate(self, expression):
        done = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def wait(self, expression):
        self.evaluate(
            f"new Promise(done => {{ const look = () => ({expression}) ? done() : setTimeout(look, 20); look() }})"
        )

    def click(self, x, y):
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, path):
        Path(path).write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def page():
    """A page in a browser of its own."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [program(), *FLAGS.split(), f"--user-data-dir={profile}", "about:blank"]
        browser = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        try:
            for line in browser.stderr:
                if match := re.search(r"listening on ws://([^/]+)/", line):
                    break
            import urllib.request

            with urllib.request.urlopen(f"http://{match[1]}/json") as answer:
                target = next(t for t in json.load(answer) if t["type"] == "page")
            with connect(target["webSocketDebuggerUrl"], max_size=None) as socket:
                yield Page(socket)
        finally:
            browser.terminate()
            browser.stderr.close()
            browser.wait(20)
