"""Clients that do not read their responses."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from inflight.server.http.limits import MIN_PROGRESS, WriteTimer
from inflight.server.http.protocol import BoundedProtocol
from tests.server.live import Backend, Live, live_server


class _Pipe:
    """As much of a transport as the timer looks at."""

    size = 0
    aborted = False

    def get_write_buffer_size(self) -> int:
        return self.size

    def abort(self) -> None:
        self.aborted = True


async def test_client_that_makes_progress_is_not_disconnected() -> None:
    pipe = _Pipe()
    timer = WriteTimer(asyncio.get_running_loop(), cast(Any, pipe), 1000.0)
    pipe.size = 10 * MIN_PROGRESS
    timer.start()
    for _ in range(10):
        pipe.size -= MIN_PROGRESS
        timer.check()
        assert not pipe.aborted
    pipe.size = 100
    timer.start()
    pipe.size = 99
    timer.check()
    assert pipe.aborted
    timer.stop()


@pytest.fixture(scope="module")
def impatient(backend: Backend) -> Iterator[Live]:
    with live_server(backend, write_timeout=0.2) as live:
        yield live


def connect(live: Live, num_others: int = 0) -> socket.socket:
    """Connect with buffers as small as possible, beside other connections."""
    host, _, port = live.url.removeprefix("http://").partition(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((host, int(port)))
    connections = live.server.server_state.connections
    live.wait_until("a connection", lambda: len(connections) == 1 + num_others)
    for protocol in connections:
        assert isinstance(protocol, BoundedProtocol)
        protocol.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return connection


GET = "GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n{}\r\n"


@pytest.mark.parametrize(
    "requests",
    [
        GET.format("connection: close\r\n"),
        GET.format(""),
        GET.format("") * 20,
        GET.format("") + "nonsense\r\n\r\n",
        GET.format("") + "GET /he",
    ],
)
def test_client_that_does_not_read_its_response_is_disconnected(requests: str, impatient: Live) -> None:
    with connect(impatient) as connection:
        connection.sendall(requests.encode())
        impatient.wait_until("its end", lambda: not impatient.server.server_state.connections)
        impatient.wait_until("that of its requests", lambda: not impatient.server.server_state.tasks)


def test_client_that_does_not_read_its_stream_is_disconnected(impatient: Live) -> None:
    body = (
        '{"prompt": [5, 6], "max_tokens": 2000, "ignore_eos": true, "n": 16, "stream": true, "logprobs": 20}'
    )
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with connect(impatient) as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
        impatient.wait_until("a start", lambda: len(impatient.state.request_log) == 1)
        impatient.wait_until("its end", lambda: not impatient.server.server_state.connections)
    impatient.wait_until_idle()


def test_slow_answer_is_not_cut_off(impatient: Live, backend: Backend) -> None:
    """Nothing is unread while nothing is sent."""
    with ThreadPoolExecutor(1) as threads, backend.held_steps(5) as held:
        answer = threads.submit(impatient.complete, [5, 6], max_tokens=40, ignore_eos=True)
        impatient.wait_until("a start", lambda: len(impatient.state.request_log) == 1)
        with connect(impatient, 1) as connection:  # one that came later reaches the limit
            connection.sendall(GET.format("").encode())
            impatient.wait_until("its end", lambda: len(impatient.server.server_state.connections) == 1)
        held.release()
        assert answer.result()["usage"]["completion_tokens"] == 40
