"""Pipelined requests: few are read, they are answered in order, and a disconnect is still noticed."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import httpx
import pytest

from inflight.server.http.protocol import BoundedProtocol
from tests.server.http.test_limits import connect, reply
from tests.server.live import Backend, Live, live_server

PATH = "/v1/completions"
GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
LAST = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
ENDLESS = {"prompt": [5, 6], "max_tokens": 2000, "temperature": 0.7, "ignore_eos": True}


@pytest.fixture(scope="module")
def _own(backend: Backend) -> Iterator[Live]:
    with live_server(backend, max_header_size=2048) as live:
        yield live


@pytest.fixture
def own(_own: Live) -> Iterator[Live]:
    """A server with no other connections."""
    yield _own
    _own.wait_until_idle()
    _own.wait_until("no connection", lambda: not _own.server.server_state.connections)


def post(**body: object) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


def protocol_of(live: Live) -> BoundedProtocol:
    (found,) = live.server.server_state.connections
    assert isinstance(found, BoundedProtocol)
    return found


def flood(connection: socket.socket, data: bytes) -> None:
    """As much as is taken."""
    connection.setblocking(False)
    try:
        for _ in range(10_000):
            connection.sendall(data)
    except BlockingIOError:
        pass
    finally:
        connection.setblocking(True)


def test_flood_of_requests_stays_in_the_socket(own: Live) -> None:
    with own.backend.held_steps(5), connect(own) as connection:
        connection.sendall(post(**ENDLESS, request_id="endless"))
        own.wait_until("a start", lambda: len(own.state.request_log) == 1)
        flood(connection, GET * 1000)
        protocol = protocol_of(own)
        own.wait_until("a request that waits", lambda: protocol.pipeline)
        own.wait_until("reading on hold", lambda: protocol.flow.read_paused)
        assert len(protocol.pipeline) == 1
        assert len(protocol._unparsed) < 1 << 20
        connection.close()
        # That the client is gone is not seen behind so much.
        assert httpx.delete(f"{own.url}/v1/requests/endless").status_code == 200


def test_pipelined_requests_are_answered_in_order(own: Live) -> None:
    paths = [b"/health", b"/version", b"/nothing"] * 100
    gets = b"".join(b"GET %s HTTP/1.1\r\nhost: localhost\r\n\r\n" % path for path in paths)
    with connect(own) as connection:
        connection.sendall(
            post(prompt=[5, 6], max_tokens=4) + gets + post(prompt=[5, 6], max_tokens=4) + LAST
        )
        statuses = [part[:3] for part in reply(connection).split(b"HTTP/1.1 ")[1:]]
    assert statuses == [b"200", *[b"200", b"200", b"404"] * 100, b"200", b"200"]


def test_pipelined_chunked_requests_are_answered_in_order(own: Live) -> None:
    head, _, content = post(prompt=[5, 6], max_tokens=4, user="x" * 200).partition(b"\r\n\r\n")
    head = head.partition(b"content-length")[0] + b"transfer-encoding: chunked\r\n\r\n"
    small = b"".join(b"1\r\n%c\r\n" % byte for byte in content + b" " * 1000)
    large = b"%x\r\n%s\r\n" % (100_000 + len(content), content + b" " * 100_000)
    asked = [small, large, small] * 5
    with connect(own) as connection:
        connection.sendall(b"".join(head + body + b"0\r\n\r\n" for body in asked) + LAST)
        statuses = [part[:3] for part in reply(connection).split(b"HTTP/1.1 ")[1:]]
    assert statuses == [b"200"] * (len(asked) + 1)


def test_body_that_the_app_does_not_read_is_skipped(own: Live) -> None:
    """What has no route is answered at once, and its body is passed over."""
    head = b"POST /nothing HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    with connect(own) as connection:
        connection.sendall(head + b"1\r\na\r\n" * 200_000 + b"0\r\n\r\n" + LAST)
        statuses = [part[:3] for part in reply(connection).split(b"HTTP/1.1 ")[1:]]
    assert statuses == [b"404", b"200"]


@pytest.mark.parametrize("num_behind", [1, 2, 1000])
@pytest.mark.parametrize("streamed", [False, True])
def test_disconnect_is_noticed_behind_pipelined_requests(num_behind: int, streamed: bool, own: Live) -> None:
    metrics = own.state.metrics
    before = metrics.num_disconnects
    with own.backend.held_steps(5):
        with connect(own) as connection:
            connection.sendall(post(**ENDLESS, n=3, stream=streamed))
            own.wait_until("a start", lambda: len(own.state.request_log) == 1)
            connection.sendall(GET * num_behind)
            own.wait_until("a request that waits", lambda: protocol_of(own).pipeline)
        own.wait_until("its end", lambda: metrics.num_disconnects == before + 1)


@pytest.mark.parametrize(
    ("behind", "status"),
    [(b"nonsense\r\n\r\n", b"400"), (b"GET /" + b"x" * 3000, b"431"), (GET + b"nonsense\r\n\r\n", b"400")],
)
def test_refusal_follows_earlier_answers(behind: bytes, status: bytes, own: Live) -> None:
    with connect(own) as connection:
        with own.backend.held_steps(5):
            connection.sendall(post(prompt=[5, 6], max_tokens=40, ignore_eos=True))
            own.wait_until("a start", lambda: len(own.state.request_log) == 1)
            connection.sendall(behind)
        answers = reply(connection).split(b"HTTP/1.1 ")[1:]
    assert [answer[:3] for answer in answers] == [b"200"] * (len(answers) - 1) + [status]
    assert json.loads(answers[0].partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 40


def test_disconnect_is_noticed_behind_invalid_data(own: Live) -> None:
    metrics = own.state.metrics
    before = metrics.num_disconnects
    with own.backend.held_steps(5):
        with connect(own) as connection:
            connection.sendall(post(**ENDLESS))
            own.wait_until("a start", lambda: len(own.state.request_log) == 1)
            connection.sendall(b"nonsense\r\n\r\n")
            own.wait_until("reading on hold", lambda: protocol_of(own).flow.read_paused)
        own.wait_until("its end", lambda: metrics.num_disconnects == before + 1)
