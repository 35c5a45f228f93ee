"""How fast the timeline page draws: 256 slots, 1,000 steps/s arriving, in a headless Chromium without a GPU.

    python -m benchmarks.timeline_page                 # frames per second, and milliseconds of script per frame

A small server sends synthetic steps in the format of `GET /v1/steps`, 30 times a second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from benchmarks.report import show
from inflight.web import application
from tests.support.browser import Page, browser

MESSAGES_PER_SECOND = 30
FRAMES = """new Promise((done) => {
  const before = performance.now(), times = [];
  let last = before;
  const frame = (now) => {
    times.push(now - last);
    last = now;
    if (now - before < SECONDS * 1000) requestAnimationFrame(frame);
    else done([times.length / ((now - before) / 1000), times.sort((a, b) => a - b)[Math.floor(times.length * 0.99)]]);
  };
  requestAnimationFrame(frame);
})"""


class SyntheticSteps:
    """Requests of random length in all slots; every step takes the same time."""

    def __init__(self, num_slots: int, steps_per_second: int) -> None:
        self._random = random.Random(0)
        self._num_slots, self._rate = num_slots, steps_per_second
        self._step = self._request = 0
        self._ends = [0] * num_slots
        self._requests = [0] * num_slots

    def chunk(self, num_steps: int, now: float) -> dict[str, Any]:
        first = self._step
        columns: dict[str, list[float]] = {}
        seconds = 1 / self._rate
        steps = range(first, first + num_steps)
        columns["step"] = list(steps)
        columns["at"] = [now + (step - first - num_steps) * seconds for step in steps]
        device = int(seconds * 0.8e6)
        parts = {"schedule": 60, "launch": 20, "device": device, "update": 40, "tokens": self._num_slots}
        parts |= {
            "output": self._num_slots,
            "running": self._num_slots,
            "waiting": 5,
            "used": 3000,
            "cached": 100,
        }
        columns |= {name: [value] * num_steps for name, value in parts.items()}
        runs: list[list[int]] = []
        requests = []
        for slot in range(self._num_slots):
            at = first
            while at < first + num_steps:
                if self._ends[slot] <= at:
                    self._request += 1
                    self._requests[slot] = self._request
                    self._ends[slot] = at + self._random.randint(50, 800)
                    requests.append({"number": self._request, "arrived": now})
                    runs.append([slot, self._request, 1, at, 1, 100, 0])
                    at += 1
                    continue
                end = min(self._ends[slot], first + num_steps)
                runs.append([slot, self._requests[slot], 0, at, end - at, 1, 100])
                at = end
        self._step += num_steps
        return {
            "replica": "0",
            "slots": self._num_slots,
            "budget": 8192,
            "kv": {"blocks": 4096, "block_size": 16},
            "steps": columns,
            "runs": runs,
            "requests": requests,
            "events": [],
        }


def serve(num_slots: int, rate: int, past: float) -> tuple[uvicorn.Server, int]:
    async def page(_: Request) -> Response:
        return HTMLResponse(application()[0])

    async def models(_: Request) -> Response:
        return JSONResponse({"data": [{"id": "synthetic", "max_model_len": 4096}]})

    async def steps(_: Request) -> Response:
        async def events() -> AsyncIterator[str]:
            source = SyntheticSteps(num_slots, rate)
            size = rate // MESSAGES_PER_SECOND
            begin = time.time()
            for index in range(int(past * MESSAGES_PER_SECOND)):
                moment = begin - past + index / MESSAGES_PER_SECOND
                yield f"event: steps\ndata: {json.dumps(source.chunk(size, moment))}\n\n"
            while True:
                yield f"event: steps\ndata: {json.dumps(source.chunk(size, time.time()))}\n\n"
                await asyncio.sleep(1 / MESSAGES_PER_SECOND)

        return StreamingResponse(events(), media_type="text/event-stream")

    routes = [Route("/timeline", page), Route("/v1/models", models), Route("/v1/steps", steps)]
    server = uvicorn.Server(
        uvicorn.Config(Starlette(routes=routes), host="127.0.0.1", port=0, log_level="error")
    )
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    return server, server.servers[0].sockets[0].getsockname()[1]


def measure(page: Page, seconds: float) -> tuple[float, float, float]:
    page.call("Performance.enable")
    before = _metrics(page)
    rate, slow = page.run(FRAMES.replace("SECONDS", str(seconds)))
    after = _metrics(page)
    script = after["ScriptDuration"] - before["ScriptDuration"]
    return rate, slow, 1000 * script / max(1, rate * seconds)


def _metrics(page: Page) -> dict[str, float]:
    return {item["name"]: item["value"] for item in page.call("Performance.getMetrics")["metrics"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--rate", type=int, default=1000, help="steps per second")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--past", type=float, default=20.0, help="seconds of steps that the page opens with")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    server, port = serve(options.slots, options.rate, options.past)
    with browser() as page:
        page.show_as("light")
        page.open(f"http://127.0.0.1:{port}/timeline")
        page.wait_for("!document.querySelector('#lanes-scroll').hidden")
        rows: list[list[Any]] = []
        for width, clicks in (("10 s", 0), ("1 s", 4), ("20 s and more", -5)):
            for _ in range(abs(clicks)):
                page.click("#zoom-in" if clicks > 0 else "#zoom-out")
            time.sleep(1)
            rate, slow, script = measure(page, options.seconds)
            rows.append([width, round(rate, 1), round(slow, 1), round(script, 2)])
        columns = ["width", "frames/s", "p99 frame ms", "script ms per frame"]
        data = {row[0]: dict(zip(columns[1:], row[1:], strict=True)) for row in rows}
        show("Timeline page", columns, rows, options.json, data)
    server.should_exit = True


if __name__ == "__main__":
    main()
