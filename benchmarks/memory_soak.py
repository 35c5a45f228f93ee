"""Whether a server's memory stays flat while every request brings a schema that nobody has sent before.

    python -m benchmarks.memory_soak --minutes 60 --rate 4 -- --num-blocks 512

Starts `inflight serve` with the built-in model and everything behind `--` as its options, sends requests with fresh
JSON schemas and tools at a fixed rate, and prints the resident memory of the engine and of the API server once a
minute. Anonymous memory is shown beside it, since pages of files count as resident too.

On a CPU the pages of the KV cache become resident when their blocks are first used, so an engine grows until its
prefix cache has filled all blocks. The number of blocks that hold something is shown, and a small `--num-blocks` gets
that over with in the first minute.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

MIB = 1 << 20
START_SECONDS = 120
MAX_OPEN = 32  # requests: beyond that the rate is lowered rather than memory filled here
ENGINE = "inflight.engine.remote.worker"


# ---- requests ----


def schema_of(number: int, random_source: random.Random) -> dict[str, Any]:
    """A schema with names and values that no other number has."""
    properties: dict[str, Any] = {
        f"name_{number}": {"type": "string", "maxLength": random_source.randint(5, 40)},
        f"count_{number}": {"type": "integer", "minimum": 0, "maximum": number + 10},
        "tags": {"type": "array", "items": {"enum": [f"red {number}", f"blue {number}"]}, "maxItems": 3},
        "place": {
            "type": "object",
            "properties": {f"x_{number}": {"type": "number"}, "unit": {"enum": ["m", f"u{number}"]}},
            "required": [f"x_{number}", "unit"],
            "additionalProperties": False,
        },
    }
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def body_of(number: int, max_tokens: int) -> dict[str, Any]:
    """A chat request: mostly with its own schema, one in three with its own tools, all streamed."""
    random_source = random.Random(number)
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": f"Tell me about fox number {number}."}],
        "max_tokens": max_tokens,
        "temperature": 0.9,
        "seed": number,
        "stream": True,
    }
    schema = schema_of(number, random_source)
    if number % 16 == 0:  # a lexer must tell many states apart to follow this one
        schema["properties"][f"name_{number}"]["pattern"] = "^[a-c]*a[a-c]{16}x$"
        del schema["properties"][f"name_{number}"]["maxLength"]
    if number % 3 == 2:
        function = {"name": f"look_up_{number}", "description": "Look it up.", "parameters": schema}
        body["tools"] = [{"type": "function", "function": {**function, "strict": True}}]
        body["tool_choice"] = "required"
    else:
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": f"fox_{number}", "schema": schema, "strict": True},
        }
    return body


async def send(client: httpx.AsyncClient, number: int, max_tokens: int, outcomes: Counter[str]) -> None:
    try:
        body = body_of(number, max_tokens)
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            async for _ in response.aiter_lines():
                pass
            outcomes[str(response.status_code)] += 1
    except httpx.HTTPError as error:
        outcomes[type(error).__name__] += 1


async def send_at_rate(url: str, rate: float, max_tokens: int, until: float, outcomes: Counter[str]) -> None:
    """Send `rate` requests a second until the given moment."""
    number, open_requests = 0, set[asyncio.Task[None]]()
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        while time.monotonic() < until:
            if len(open_requests) < MAX_OPEN:
                task = asyncio.create_task(send(client, number, max_tokens, outcomes))
                open_requests.add(task)
                task.add_done_callback(open_requests.discard)
                number += 1
            await asyncio.sleep(1 / rate)
        await asyncio.gather(*open_requests)


# ---- memory ----


def memory(process_id: int) -> str:
    """Resident and anonymous memory of a process in MiB, and its number of threads."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{process_id}/status").read_text().splitlines())
    resident, anonymous, threads = (int(status[name].split()[0]) for name in ("VmRSS", "RssAnon", "Threads"))
    return f"{resident / 1024:12.1f}{anonymous / 1024:11.1f}{threads:9d}"


def engine_of(process_id: int) -> int:
    """The engine process that the API server with this id has started."""
    for children in Path(f"/proc/{process_id}/task").glob("*/children"):
        for child in children.read_text().split():
            if ENGINE in Path(f"/proc/{child}/cmdline").read_text():
                return int(child)
    raise RuntimeError("the server has no engine process")


async def num_filled_blocks(client: httpx.AsyncClient) -> int:
    """KV blocks that are used or cached."""
    text = (await client.get("/metrics")).text
    samples = re.findall(r'^inflight:kv_blocks\{.*state="(?:used|cached)".*\} (\S+)$', text, re.MULTILINE)
    return int(sum(map(float, samples)))


async def report(server: int, url: str, every: float, until: float, outcomes: Counter[str]) -> None:
    engine, started_at = engine_of(server), time.monotonic()
    print(" minute  engine MiB  anonymous  threads  server MiB  anonymous  threads  KV blocks  requests")
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        while True:
            minute = (time.monotonic() - started_at) / 60
            num_blocks = await num_filled_blocks(client)
            print(
                f"{minute:7.1f}{memory(engine)}{memory(server)}{num_blocks:11d}  {dict(outcomes)}", flush=True
            )
            if time.monotonic() >= until:
                return
            await asyncio.sleep(min(every, max(0.0, until - time.monotonic())))


async def soak(server: int, url: str, arguments: argparse.Namespace) -> None:
    outcomes: Counter[str] = Counter()
    until = time.monotonic() + 60 * arguments.minutes
    await asyncio.gather(
        send_at_rate(url, arguments.rate, arguments.max_tokens, until, outcomes),
        report(server, url, arguments.every, until, outcomes),
    )


# ---- the server ----


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/ready", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise RuntimeError("the server did not start")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--rate", type=float, default=4, help="requests per second")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--every", type=float, default=60, help="seconds between two lines")
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("options", nargs="*", help="options of inflight serve, behind --")
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "inflight", "serve", "--port", str(arguments.port), "--no-log-requests"]
    process = subprocess.Popen([*command, *arguments.options])
    url = f"http://127.0.0.1:{arguments.port}"
    try:
        wait_until_ready(url, process)
        asyncio.run(soak(process.pid, url, arguments))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


if __name__ == "__main__":
    main()
