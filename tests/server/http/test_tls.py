"""TLS connections have the same limits as others, even before their handshake."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.live import Backend, Live, live_server
from tests.support.waiting import SECONDS

TLS = Path(__file__).parents[1] / "tls"
TRUSTED = ssl.create_default_context(cafile=str(TLS / "cert.pem"))
FILES: Any = {"ssl_keyfile": str(TLS / "key.pem"), "ssl_certfile": str(TLS / "cert.pem")}
MAX_CONNECTIONS = 8  # one of them for probes


@pytest.fixture(scope="module")
def small(backend: Backend) -> Iterator[Live]:
    with live_server(backend, **FILES, max_connections=MAX_CONNECTIONS, read_timeout=1.0) as live:
        yield live


@pytest.fixture
def silent(small: Live) -> Iterator[list[socket.socket]]:
    """More connections than there may be, over which nothing was sent."""
    small.wait_until("none", lambda: not small.server.server_state.connections)
    with ExitStack() as held:
        yield [held.enter_context(connect(small)) for _ in range(3 * MAX_CONNECTIONS)]


def connect(live: Live) -> socket.socket:
    url = httpx.URL(live.url)
    return socket.create_connection((url.host, url.port), SECONDS)


def get(live: Live, path: str) -> httpx.Response:
    return httpx.get(f"{live.url}{path}", verify=TRUSTED, timeout=SECONDS)


def test_plain_http_on_a_tls_port_is_refused(small: Live) -> None:
    with connect(small) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        assert b"HTTP" not in connection.recv(1024)
    assert get(small, "/v1/models").status_code == 200


def test_two_host_headers_are_refused(small: Live) -> None:
    with TRUSTED.wrap_socket(connect(small), server_hostname="localhost") as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nhost: localhost\r\n\r\n")
        assert connection.recv(1024).startswith(b"HTTP/1.1 400 ")


def test_connections_without_a_handshake_count_and_end(small: Live, silent: list[socket.socket]) -> None:
    open_ = small.server.server_state.connections
    small.wait_until("all of them", lambda: len(open_) == MAX_CONNECTIONS)
    refused = get(small, "/v1/models")  # in place of the last of them
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_connections")
    assert get(small, "/health").status_code == 200
    assert [connection.recv(1) for connection in silent[MAX_CONNECTIONS - 1 :]] == [b""] * 17
    assert silent[0].recv(1) == b""  # the time for it is over
    small.wait_until("room", lambda: not open_)
    assert get(small, "/v1/models").status_code == 200


def test_shutdown_does_not_wait_for_handshakes(backend: Backend) -> None:
    with live_server(backend, **FILES) as live, connect(live) as connection:
        live.wait_until("the connection", lambda: live.server.server_state.connections)
        live.stop()
        assert connection.recv(1) == b""
