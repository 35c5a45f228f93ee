"""How long chats take to start while another key sends grammars that are slow to compile.

    python -m benchmarks.hostile_grammars [--connections 16] [--chats 20] [--attack tools|valid]

Starts a server with the built-in model and two keys. The first key times its chats (one token each), alone and then
while the second key sends hostile requests over many connections, each with schemas that the server has not seen:
`tools` has 40 slow tools and one whose pattern is wrong, `valid` has one slow schema that can be used.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

KEYS = {"victim": secrets.token_hex(16), "attacker": secrets.token_hex(16)}
SLOW_MULTIPLE = 150_001  # takes most of a second to compile
START_SECONDS = 120
KINDS = ("plain", "known tools", "new schema")
numbers = itertools.count()


@contextmanager
def running_server(options: list[str]) -> Iterator[str]:
    """Start `inflight serve` and yield its address."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.yaml"
        lines = [f"  - name: {name}\n    key: {key}\n" for name, key in KEYS.items()]
        keys.write_text("keys:\n" + "".join(lines))
        port = 18000 + os.getpid() % 2000
        command = [sys.executable, "-m", "inflight", "serve", "--port", str(port), "--keys", str(keys)]
        with (Path(folder) / "log").open("w") as log:
            process = subprocess.Popen([*command, *options], stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_for_health(url)
            yield url
        finally:
            process.terminate()
            process.wait(60)


def _wait_for_health(url: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise RuntimeError("the server did not start in time")


def client(url: str, name: str) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {KEYS[name]}"}
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=300)


def tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def schema_of(value: dict[str, Any]) -> dict[str, Any]:
    """Return an object schema that no request has had before."""
    name = f"a{next(numbers)}"
    return {"type": "object", "properties": {name: value}, "required": [name]}


def attack_body(kind: str) -> dict[str, Any]:
    slow = {"type": "integer", "multipleOf": SLOW_MULTIPLE}
    body = chat_body("plain")
    if kind == "valid":
        format_ = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema_of(slow)}}
        return {**body, "response_format": format_}
    tools = [tool(f"f{i}", schema_of(slow)) for i in range(40)]
    tools.append(tool("wrong", schema_of({"type": "string", "pattern": "("})))
    return {**body, "tools": tools, "tool_choice": "required"}


def chat_body(kind: str) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 1}
    if kind == "known tools":
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        return {**body, "tools": [tool("add", schema)], "tool_choice": "required"}
    if kind == "new schema":
        schema = schema_of({"type": "string"})
        return {
            **body,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
        }
    return body


async def time_chats(http: httpx.AsyncClient, num_chats: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(num_chats):
        for kind in KINDS:
            started_at = time.perf_counter()
            response = await http.post("/v1/chat/completions", json=chat_body(kind))
            response.raise_for_status()
            seconds[kind].append(time.perf_counter() - started_at)
            await asyncio.sleep(0.02)
    return seconds


async def attack(http: httpx.AsyncClient, kind: str, outcomes: Counter[str], seconds: list[float]) -> None:
    while True:
        started_at = time.perf_counter()
        response = await http.post("/v1/chat/completions", json=attack_body(kind))
        outcome = str(response.status_code)
        if response.status_code != 200:
            outcome += " " + response.json()["error"]["message"][:160]
        outcomes[outcome] += 1
        seconds.append(time.perf_counter() - started_at)


async def measure(url: str, kind: str, num_connections: int, num_chats: int) -> None:
    async with client(url, "victim") as http, client(url, "attacker") as hostile:
        await time_chats(http, 3)
        show("undisturbed", await time_chats(http, num_chats))
        outcomes: Counter[str] = Counter()
        seconds: list[float] = []
        attackers = [
            asyncio.create_task(attack(hostile, kind, outcomes, seconds)) for _ in range(num_connections)
        ]
        await asyncio.sleep(3)
        show(f"{num_connections} connections attack", await time_chats(http, num_chats))
        for task in attackers:
            task.cancel()
        await asyncio.gather(*attackers, return_exceptions=True)
        print(f"hostile requests answered: {len(seconds)}, longest {max(seconds, default=0):.1f} s")
        for outcome, count in outcomes.most_common(4):
            print(f"  {count} x {outcome}")


def show(title: str, seconds: dict[str, list[float]]) -> None:
    for kind, values in seconds.items():
        median, longest = statistics.median(values) * 1e3, max(values) * 1e3
        print(f"{title}, {kind}: median {median:.1f} ms, longest {longest:.1f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--chats", type=int, default=20)
    parser.add_argument("--attack", choices=("tools", "valid"), default="tools")
    arguments, options = parser.parse_known_args()
    with running_server(options) as url:
        asyncio.run(measure(url, arguments.attack, arguments.connections, arguments.chats))


if __name__ == "__main__":
    main()
