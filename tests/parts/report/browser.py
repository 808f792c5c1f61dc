"""A real Chromium, driven over its DevTools protocol: one page at a time, everything it says and asks for written down.

The client is `websockets`, which vLLM needs anyway; a driver of its own (Selenium, Playwright) would be 35 to 190 MB in
everybody's environment for one file of tests.
"""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
_START_S = 240.0


def find_browser() -> str | None:
    """Path of a Chromium on this host."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


class Browser:
    """problems: what the console said as an error, and exceptions."""

    def __init__(self, program: str, *, profile: Path) -> None:
        self.problems: list[str] = []
        self._open_requests: dict[str, str] = {}
        self._number = 0
        self._loaded = 0
        self._session: str | None = None
        self._ends = contextlib.ExitStack()
        command = [program, *_OPTIONS, "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
        with (profile / "browser.log").open("w") as log:
            self._process = self._ends.enter_context(subprocess.Popen(command, stdout=log, stderr=log))
        self._ends.callback(self._process.terminate)
        address = self._address(profile / "DevToolsActivePort")
        self._socket = self._ends.enter_context(connect(address, max_size=None, proxy=None))
        (target,) = [each for each in self._call("Target.getTargets")["targetInfos"] if each["type"] == "page"]
        attached = self._call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")

    @property
    def requests(self) -> list[str]:
        """Addresses that were asked for, without those that the page's own policy kept back (those are problems)."""
        return list(self._open_requests.values())

    def open(self, page: Path, *, dark: bool = False, width: int = 1280) -> None:
        """Load a file and wait for it. What was written down before is forgotten."""
        self.problems, self._open_requests = [], {}
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        before = self._loaded
        self._call("Page.navigate", url=page.as_uri())
        self.wait(lambda: self._loaded > before)

    def value(self, expression: str) -> Any:
        """Of a JavaScript expression, as JSON."""
        result = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def point(self, x: float, y: float) -> None:
        """Move the mouse there, in CSS pixels of the window."""
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def wait(self, condition: Any, *, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "waited too long"
            self._call("Runtime.evaluate", expression="0")  # events come with the answers
            time.sleep(0.05)

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG."""
        shot = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.close()

    def _address(self, port_file: Path) -> str:
        deadline = time.monotonic() + _START_S
        while not port_file.is_file() or len(port_file.read_text().splitlines()) < 2:
            assert self._process.poll() is None and time.monotonic() < deadline, "the browser did not start"
            time.sleep(0.05)
        port, path = port_file.read_text().splitlines()[:2]
        return f"ws://127.0.0.1:{port}{path}"

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        self._socket.send(json.dumps(message if self._session is None else {**message, "sessionId": self._session}))
        while True:
            answer = json.loads(self._socket.recv(timeout=_START_S))
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self._note(answer.get("method", ""), answer.get("params", {}))

    def _note(self, event: str, params: dict[str, Any]) -> None:
        match event:
            case "Page.loadEventFired":
                self._loaded += 1
            case "Network.requestWillBeSent":
                self._open_requests[params["requestId"]] = params["request"]["url"]
            case "Network.loadingFailed" if params.get("blockedReason") == "csp":
                del self._open_requests[params["requestId"]]
            case "Runtime.exceptionThrown":
                self.problems.append(str(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.problems.append(str(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.problems.append(params["entry"]["text"])
