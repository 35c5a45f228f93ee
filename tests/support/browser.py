"""A headless Chromium, driven over its debugging socket."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import connect
from websockets.sync.connection import Connection

from tests.support.missing import missing
from tests.support.waiting import SECONDS, wait_until

WIDE, NARROW = 1280, 390  # pixels: a desk, a phone
LOOKS = [(scheme, width) for scheme in ("light", "dark") for width in (WIDE, NARROW)]
KEYS: dict[str, dict[str, Any]] = {
    "Enter": {"windowsVirtualKeyCode": 13, "text": "\r"},
    "Escape": {"windowsVirtualKeyCode": 27},
    "Tab": {"windowsVirtualKeyCode": 9},
    "ArrowRight": {"windowsVirtualKeyCode": 39},
}
CUT = """(() => {
  const overflow = (node) => getComputedStyle(node).overflowX;
  const scrolls = (node) => node && (/auto|scroll/.test(overflow(node)) || scrolls(node.parentElement));
  const wide = (box) => box.width && (box.left < -0.5 || box.right > document.documentElement.clientWidth + 0.5);
  const hidden = (node) => overflow(node) === "hidden" && node.scrollWidth > node.clientWidth;
  return [...document.body.querySelectorAll("*")]
    .filter((node) => hidden(node) || (wide(node.getBoundingClientRect()) && !scrolls(node.parentElement)))
    .map((node) => node.outerHTML.slice(0, 100));
})()"""
LEFT = "navigated or closed|context was destroyed|Cannot find (default execution )?context"
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


class LeftError(AssertionError):
    """The page was left while it was asked."""


class Page:
    """One tab."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._number = 0
        self.problems: list[str] = []  # what the page has complained of
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        self._number += 1
        self._connection.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            message = json.loads(self._connection.recv(SECONDS))
            if message.get("id") == self._number:
                if "error" in message and re.search(LEFT, message["error"]["message"]):
                    raise LeftError(message)
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    def _note(self, message: Any) -> None:
        if message.get("method") == "Runtime.exceptionThrown":
            self.problems.append(str(message["params"]["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
            self.problems.append(message["params"]["entry"]["text"])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def leave(self) -> None:
        """Leave the page before its server ends: it would try to reach the server, and log errors."""
        self.open("about:blank")

    def run(self, script: str) -> Any:
        """The value of an expression."""
        reply = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    def wait_for(self, condition: str) -> None:
        wait_until(lambda: self._holds(condition), condition)

    def _holds(self, condition: str) -> bool:
        try:
            return bool(self.run(f"Boolean({condition})"))
        except LeftError:  # a click opened another page: ask that one the next time
            return False

    def text(self, selector: str) -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def click(self, selector: str) -> None:
        """Click with the mouse at the centre of the element. Anything above it would get the click."""
        box = self.run(
            f"(() => {{ const box = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            where = {"x": box[0], "y": box[1], "button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, **where)

    def write(self, text: str) -> None:
        """Into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, name: str) -> None:
        """A key of `KEYS`."""
        key = {"key": name, "code": name, **KEYS[name]}
        self.call("Input.dispatchKeyEvent", type="keyDown", **key)
        self.call("Input.dispatchKeyEvent", type="keyUp", **key)

    def excuse(self, words: str) -> None:
        """Complaints with these words are what the test is about."""
        self.problems[:] = [text for text in self.problems if words not in text]

    def cut(self) -> list[str]:
        """Return the texts that are cut off at the left or right of the screen and cannot be scrolled into view."""
        texts: list[str] = self.run(CUT)
        return texts

    def show_as(self, scheme: str, width: int = WIDE, height: int = 720) -> None:
        """Light or dark, on a screen of that size."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def picture(self, name: str) -> None:
        """Save a screenshot to the folder INFLIGHT_PICTURES, if that is set."""
        folder = os.environ.get("INFLIGHT_PICTURES")
        if folder:
            data = self.call("Page.captureScreenshot", format="png")["data"]
            Path(folder, f"{name}.png").write_bytes(base64.b64decode(data))


def find_browser() -> str:
    """Its command."""
    return next(filter(None, map(shutil.which, NAMES)), None) or missing(
        "no Chromium: apt-get install chromium"
    )


@contextmanager
def browser() -> Iterator[Page]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [
            find_browser(),
            "--headless=new",
            "--no-sandbox",  # it only opens our own page, and tests may run as root
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-extensions",
            "--disable-background-networking",
            "--no-first-run",
            "--remote-debugging-port=0",
            f"--user-data-dir={profile}",
            "about:blank",
        ]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(command, env=os.environ | {"HOME": profile, "TMPDIR": profile}, **quiet)  # type: ignore[call-overload]
        try:
            port = _port(Path(profile, "DevToolsActivePort"), process)
            # No pings: while no test reads what pages tell, the answer to one is not read either.
            options: Any = {"max_size": None, "open_timeout": SECONDS, "ping_interval": None, "proxy": None}
            with connect(_first_tab(port), **options) as connection:
                yield Page(connection)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)


def _port(file: Path, process: subprocess.Popen[bytes]) -> int:
    def text() -> str:
        assert process.poll() is None, "the browser has ended"
        return file.read_text() if file.exists() else ""

    return int(wait_until(text, "the browser's start").splitlines()[0])


def _first_tab(port: int) -> str:
    """Its debugging socket, once it is there."""

    def tabs() -> list[str]:
        targets = httpx.get(f"http://127.0.0.1:{port}/json/list", timeout=SECONDS).json()
        return [str(target["webSocketDebuggerUrl"]) for target in targets if target["type"] == "page"]

    tab: str = wait_until(tabs, "the browser's tab")[0]
    return tab
