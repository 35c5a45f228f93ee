"""`inflight top` and `inflight trace`: what the engines of a running server do, live or as a file."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlencode

import typer

from inflight.cli.replicas import open_server
from inflight.errors import EngineError

if TYPE_CHECKING:
    from inflight.timeline.terminal import TimelineWindow

FRAMES_PER_SECOND = 8
RETRY = 1.0  # seconds before a lost connection is tried again

_URL = Annotated[str, typer.Option(help="Base URL of the server.")]
_KEY = Annotated[
    str | None,
    typer.Option(help="An API key, or the admin key to see all requests; better set INFLIGHT_API_KEY."),
]
_REPLICA = Annotated[str | None, typer.Option(help="Only this replica.")]
_ADDRESS = "http://127.0.0.1:8000"


def trace(
    seconds: Annotated[float, typer.Option(help="How many seconds the trace covers; at most 600.")] = 10.0,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="The trace to write; .gz compresses it. A page goes beside it."),
    ] = Path("run.json.gz"),
    wait: Annotated[
        bool, typer.Option("--wait", help="Record the next seconds instead of the last ones.")
    ] = False,
    url: _URL = _ADDRESS,
    api_key: _KEY = None,
    replica: _REPLICA = None,
) -> None:
    """Write what the engines of a server did in the last seconds as a trace for https://ui.perfetto.dev, and as a page
    that shows the timeline without a server."""
    from inflight.timeline.trace import write_recording

    if wait:
        time.sleep(seconds)
    query = {"seconds": seconds, "format": "recording"} | ({} if replica is None else {"replica": replica})
    with open_server("GET", url, f"/v1/trace?{urlencode(query)}", _key(api_key)) as response:
        recording = _decompressed(response)
    page = output.with_name(f"{output.name.removesuffix('.gz').removesuffix('.json')}.html")
    for path in dict.fromkeys((output, page)):
        write_recording(recording, path)
    num_steps = sum(len(chunk["steps"]["step"]) for chunk in recording["chunks"])
    print(
        f"wrote {num_steps} steps to {output} (open it at https://ui.perfetto.dev) and {page}",
        file=sys.stderr,
    )


def _decompressed(response: Any) -> dict[str, Any]:
    import gzip

    data = response.read()
    if response.headers.get("content-encoding") == "gzip":
        data = gzip.decompress(data)
    recording: dict[str, Any] = json.loads(data)
    return recording


def top(
    seconds: Annotated[float, typer.Option(help="How many seconds the screen shows.")] = 10.0,
    frames: Annotated[
        int | None, typer.Option(help="End after this many pictures, which are printed one below the other.")
    ] = None,
    url: _URL = _ADDRESS,
    api_key: _KEY = None,
    replica: _REPLICA = None,
) -> None:
    """Show the timeline of a running server in the terminal: which request has which slot of the batch."""
    from rich.console import Console
    from rich.live import Live

    from inflight.timeline.terminal import TimelineWindow

    window = TimelineWindow(seconds)
    reader = TimelineReader(window, url, _key(api_key), replica)
    reader.start()
    console = Console()

    def picture() -> Any:
        with reader.lock:
            size = shutil.get_terminal_size()
            return window.draw(time.time(), size.columns, size.lines - 1)

    if frames is not None:
        for _ in range(frames):
            time.sleep(1 / FRAMES_PER_SECOND)
            reader.check()
            console.print(picture())
        return
    try:
        with Live(picture(), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(1 / FRAMES_PER_SECOND)
                reader.check()
                live.update(picture(), refresh=True)
    except KeyboardInterrupt:
        pass


class TimelineReader(threading.Thread):
    """Reads `GET /v1/steps` into a window, and connects again when the connection is lost."""

    def __init__(self, window: TimelineWindow, url: str, key: str | None, replica: str | None) -> None:
        super().__init__(daemon=True)
        self.lock = threading.Lock()
        self._window = window
        self._url, self._key, self._replica = url, key, replica
        self._error: EngineError | None = None

    def check(self) -> None:
        """Raise the error of the first connection, if it failed."""
        if self._error is not None:
            raise self._error

    def run(self) -> None:
        was_connected = False
        while True:
            try:
                for chunk in self._chunks():
                    was_connected = True
                    with self.lock:
                        self._window.add(chunk)
            except EngineError as error:
                if not was_connected:
                    self._error = error
                    return
            except OSError:
                pass
            time.sleep(RETRY)

    def _chunks(self) -> Iterator[dict[str, Any]]:
        query: dict[str, Any] = {"since": -self._window.seconds}
        if self._replica is not None:
            query["replica"] = self._replica
        with open_server("GET", self._url, f"/v1/steps?{urlencode(query)}", self._key) as response:
            for line in response:
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])


def _key(key: str | None) -> str | None:
    return key or os.environ.get("INFLIGHT_API_KEY")
