"""The `Host` header: allowed hosts are answered, and rebound names are not."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from inflight.errors import ConfigError
from inflight.server.access.middleware import Hosts
from inflight.server.errors import ApiError
from tests.server.live import Backend, Live, live_server


def allowed(hosts: Hosts, *headers: bytes) -> bool:
    scope: Any = {"headers": [(b"accept", b"*/*"), *((b"host", header) for header in headers)]}
    try:
        hosts.check(scope)
    except ApiError:
        return False
    return True


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (b"localhost", True),
        (b"localhost:8000", True),
        (b"LocalHost:1", True),
        (b"localhost.", True),
        (b"localhost.:8000", True),
        (b"127.0.0.1:65535", True),
        (b"[::1]", True),
        (b"[::1]:8000", True),
        (b"[0:0:0:0:0:0:0:1]:8000", True),
        (b"LOCAL.example:80", True),
        (b"", False),
        (b":8000", False),
        (b"evil.example", False),
        (b"localhost.evil.example", False),
        (b"evil.localhost", False),
        (b"localhost..", False),
        (b"localhost:", False),
        (b"localhost:80:80", False),
        (b"localhost:evil.example", False),
        (b"localhost:\xb2", False),  # a digit, for some
        (b"localhost, evil.example", False),
        (b"localhost evil.example", False),
        (b"evil.example@localhost", False),
        (b"localhost@evil.example", False),
        (b"http://localhost", False),
        (b"::1", False),
        (b"[::1", False),
        (b"[::1]x", False),
        (b"[localhost]", False),
        (b"[::2]:8000", False),
        (b"127.0.0.2", False),
        (b"0.0.0.0", False),
        (b"*", False),
        (b"\xff\xfe", False),
        (b"x" * 5000, False),
    ],
)
def test_host_header_is_matched_in_any_spelling(header: bytes, expected: bool) -> None:
    hosts = Hosts.for_server((), "Local.Example", "127.0.0.1", has_keys=False)
    assert allowed(hosts, header) is expected
    assert allowed(Hosts(), header)


def test_request_must_have_exactly_one_host() -> None:
    hosts = Hosts.for_server((), "127.0.0.1", "127.0.0.1", has_keys=False)
    assert not allowed(hosts)
    assert not allowed(hosts, b"localhost", b"localhost")
    assert not allowed(hosts, b"localhost", b"evil.example")
    assert allowed(Hosts())  # no host is no other host


@pytest.mark.parametrize(
    ("names", "bound", "has_keys", "answered"),
    [
        ((), "127.0.0.1", False, False),
        ((), "127.0.1.1", False, False),
        ((), "::1", False, False),
        ((), "127.0.0.1", True, True),
        ((), "0.0.0.0", False, True),
        ((), "::", False, True),
        ((), "192.0.2.7", False, True),
        ((), "fe80::1%2", False, True),
        (("*",), "127.0.0.1", False, True),
        (("other.example", "*"), "127.0.0.1", False, True),
        (("other.example",), "0.0.0.0", True, False),
        (("Some.Example.",), "127.0.0.1", False, True),
    ],
)
def test_default_hosts_depend_on_address_and_keys(
    names: tuple[str, ...], bound: str, has_keys: bool, answered: bool
) -> None:
    hosts = Hosts.for_server(names, "name-of-this-machine", bound, has_keys)
    assert allowed(hosts, b"some.example") is answered
    if not names:
        shown = f"[{bound}]" if ":" in bound and "%" not in bound else bound
        for name in ("localhost", "127.0.0.1", "[::1]", "name-of-this-machine", shown):
            assert allowed(hosts, name.encode())


@pytest.mark.parametrize("name", ["localhost:80", "[::1]:80", "", "*.example", "http://x", "a b"])
def test_invalid_host_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="without a port"):
        Hosts((name,))


@pytest.mark.parametrize("name", ["::1", "[::1]", "[0::1]"])
def test_addresses_in_brackets_are_accepted(name: str) -> None:
    assert allowed(Hosts((name,)), b"[::1]:8000")


# ---- the server ----


def ask(live: Live, head: str) -> tuple[int, Any]:
    """Raw: clients do not send such headers."""
    host, _, port = live.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"{head}\r\nconnection: close\r\n\r\n".encode())
        with connection.makefile("rb") as file:
            answer = file.read()
    start, _, body = answer.partition(b"\r\n\r\n")
    return int(start.split()[1]), json.loads(body) if b"application/json" in start else body


@pytest.fixture(scope="module")
def named(backend: Backend) -> Iterator[Live]:
    with live_server(backend, allowed_hosts=("llm.example",), api_key=("k",)) as live:
        yield live


@pytest.fixture(scope="module")
def any_host(backend: Backend) -> Iterator[Live]:
    with live_server(backend, allowed_hosts=("*",)) as live:
        yield live


def test_every_route_refuses_other_hosts(live: Live) -> None:
    for path in ("/", "/health", "/ready", "/metrics", "/v1/models", "/openapi.json", "/nothing"):
        status, answer = ask(live, f"GET {path} HTTP/1.1\r\nhost: evil.example")
        assert (status, answer["error"]["code"]) == (403, "host_not_allowed"), path
        assert answer["error"]["type"] == "permission_error"
        assert "--allowed-hosts" in answer["error"]["message"]
        assert ask(live, f"GET {path} HTTP/1.1\r\nHOST: LOCALHOST:1")[0] != 403, path
    assert ask(live, "POST /v1/completions HTTP/1.1\r\nhost: evil.example\r\ncontent-length: 0")[0] == 403


def test_malformed_host_headers_are_refused(live: Live) -> None:
    for head in (
        "GET /health HTTP/1.1",
        "GET /health HTTP/1.0",
        "GET /health HTTP/1.1\r\nhost:",
        "GET /health HTTP/1.1\r\nhost: localhost\r\nhost: evil.example",
        "GET /health HTTP/1.1\r\nhost: localhost\r\nHost: localhost",
        "GET /health HTTP/1.1\r\nhost: evil.example\r\nx-forwarded-host: localhost",
    ):
        assert ask(live, head)[0] in (400, 403), head
    assert ask(live, "GET /health HTTP/1.1\r\nhost:   localhost.:9  ")[0] == 200


@pytest.mark.parametrize("second", ["localhost", "evil.example", ""])
def test_two_host_headers_are_refused_whatever_hosts_are_allowed(any_host: Live, second: str) -> None:
    status, answer = ask(any_host, f"GET /health HTTP/1.1\r\nhost: localhost\r\nHost: {second}")
    assert (status, answer["error"]["code"]) == (400, "invalid_http")
    assert "2 Host headers" in answer["error"]["message"]
    assert ask(any_host, "GET /health HTTP/1.1\r\nhost: evil.example")[0] == 200


def test_host_header_in_trailers_is_ignored(any_host: Live) -> None:
    head = "POST /health HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\nconnection: close"
    assert ask(any_host, f"{head}\r\n\r\n0\r\nhost: evil.example")[0] == 405


def test_refused_hosts_are_counted(live: Live) -> None:
    refused = live.state.metrics.refused
    before = refused["host_not_allowed"]
    assert live.http.get("/health", headers={"host": "evil.example"}).status_code == 403
    assert refused["host_not_allowed"] == before + 1


def test_allowed_hosts_replace_the_default(named: Live) -> None:
    assert named.http.get("/health").status_code == 403
    assert named.http.get("/health", headers={"host": "llm.example:443"}).status_code == 200
    assert named.http.get("/v1/models", headers={"host": "llm.example"}).status_code == 401


def test_server_with_keys_accepts_all_hosts(backend: Backend) -> None:
    with live_server(backend, api_key=("k",)) as live:
        assert live.http.get("/health", headers={"host": "any.example"}).status_code == 200
