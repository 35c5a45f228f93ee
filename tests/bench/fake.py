"""A minimal HTTP server whose answers are written by the test."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from inflight.bench.client import Target
from inflight.bench.workload import PlannedRequest

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(data: Any) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


def token(text: str, finish_reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]})


def usage(num_prompt: int, num_output: int, num_cached: int = 0) -> bytes:
    details = {"cached_tokens": num_cached}
    counts = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "prompt_tokens_details": details,
    }
    return event({"choices": [], "usage": counts})


def error_response(status: int, message: str) -> bytes:
    body = json.dumps({"error": {"message": message, "type": "x", "param": None, "code": None}}).encode()
    head = f"HTTP/1.1 {status} No\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@dataclass
class Exchange:
    """One request, and how to answer it."""

    number: int  # in the order of arrival
    body: dict[str, Any]
    headers: dict[str, str]
    path: str
    writer: asyncio.StreamWriter

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def stream(self, *events: bytes) -> None:
        """Send a complete answer with one chunk per event."""
        await self.write(HEAD)
        for data in (*events, DONE):
            await self.write(chunk(data))
        await self.write(END)

    def hang_up(self) -> None:
        self.writer.close()


Handler = Callable[[Exchange], Awaitable[None]]


@dataclass
class FakeServer:
    handler: Handler
    target: Target = field(init=False)
    exchanges: list[Exchange] = field(default_factory=list)
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)
    num_connections: int = 0
    num_concurrent: int = 0
    max_concurrent: int = 0

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        task = asyncio.current_task()
        assert task is not None
        self.tasks.append(task)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while not writer.is_closing():
                await self._one(reader, writer)
        writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        exchange = Exchange(len(self.exchanges), body, headers, head[0].split()[1], writer)
        self.exchanges.append(exchange)
        self.num_concurrent += 1
        self.max_concurrent = max(self.max_concurrent, self.num_concurrent)
        try:
            await self.handler(exchange)
        finally:
            self.num_concurrent -= 1


@contextlib.asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[FakeServer]:
    fake = FakeServer(handler)
    server = await asyncio.start_server(fake.talk, "127.0.0.1", 0)
    fake.target = Target("127.0.0.1", server.sockets[0].getsockname()[1], "/v1/completions")
    try:
        yield fake
    finally:
        server.close()
        for task in fake.tasks:
            task.cancel()
        await asyncio.gather(*fake.tasks)
        await server.wait_closed()


def jobs(count: int, at: float = 0.0) -> list[PlannedRequest]:
    return [
        PlannedRequest(index, at * index, json.dumps({"prompt": [index]}).encode()) for index in range(count)
    ]
