"""Unread responses use little memory and count against limits until they are read."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response
from starlette.types import Message

from inflight.server.access.keys import Caller
from inflight.server.errors import ApiError
from inflight.server.http.bodies import ENGINE_RESPONSE, PIECE, PacedSend, UnsentBytes
from inflight.server.openai.responses import conversation
from tests.server.calling import CallingBackend
from tests.server.live import Live, live_server

ALICE, BOB = Caller("alice"), Caller("bob")
KEYS = """
keys:
  - {name: alice, key: alice-secret}
  - {name: bob, key: bob-secret, max_concurrent: 1}
  - {name: carol, key: carol-secret, requests_per_minute: 3}
"""
SIZE = 4 << 20  # of an answer: more than sockets on both ends take
MAX_UNSENT = 8 * SIZE


def test_key_may_use_half_of_the_limit() -> None:
    unsent = UnsentBytes(1000)
    unsent.take(ALICE, 300)
    with pytest.raises(ApiError) as refused:
        unsent.take(ALICE, 300)
    assert (refused.value.status, refused.value.code) == (429, "too_many_unsent_bytes")
    assert refused.value.headers["retry-after"] == "1"
    unsent.take(BOB, 450)
    with pytest.raises(ApiError):
        unsent.take(Caller("carol"), 300)
    unsent.release(ALICE, 300)
    unsent.take(Caller("carol"), 300)
    unsent.release(Caller("carol"), 300)
    unsent.release(BOB, 450)
    assert unsent.num_bytes == 0


def test_only_response_may_have_any_size() -> None:
    unsent = UnsentBytes(1000)
    unsent.take(ALICE, 5000)
    with pytest.raises(ApiError):
        unsent.take(BOB, 1)


async def sent(size: int, unsent: UnsentBytes, **scope: Any) -> tuple[list[Message], PacedSend, list[int]]:
    messages: list[Message] = []
    counted: list[int] = []

    async def send(message: Message) -> None:
        messages.append(message)
        counted.append(unsent.num_bytes)

    async def receive() -> Message:
        raise AssertionError("there is no body to read")

    whole = {"type": "http", "path": "/x", "inflight.caller": ALICE, **scope}
    paced = PacedSend(whole, send, unsent)
    try:
        await Response(b"x" * size)(whole, receive, paced)
    finally:
        paced.close()
    return messages, paced, counted


async def test_large_bodies_are_sent_in_pieces_and_counted() -> None:
    unsent = UnsentBytes(1 << 30)
    (start, *pieces), _, counted = await sent(2 * PIECE + 5, unsent)
    assert start["status"] == 200
    assert [(len(piece["body"]), piece["more_body"]) for piece in pieces] == [
        *2 * [(PIECE, True)],
        (5, False),
    ]
    assert counted == 4 * [2 * PIECE + 5]
    assert unsent.num_bytes == 0


@pytest.mark.parametrize(
    ("size", "scope"), [(PIECE, {}), (3 * PIECE, {ENGINE_RESPONSE: True})], ids=["small", "paid"]
)
async def test_small_responses_and_engine_responses_are_sent_at_once(size: int, scope: Any) -> None:
    unsent = UnsentBytes(0)
    unsent.take(ALICE, 1)
    messages, paced, counted = await sent(size, unsent, **scope)
    assert len(messages) == 2
    assert counted == [1, 1]
    assert paced.refusal is None


async def test_response_over_the_limit_is_replaced_by_a_refusal() -> None:
    unsent = UnsentBytes(1000)
    unsent.take(ALICE, 1)
    (start, body), paced, _ = await sent(2 * PIECE, unsent)
    assert start["status"] == 429
    assert (b"retry-after", b"1") in start["headers"]
    assert b"too_many_unsent_bytes" in body["body"]
    assert paced.refusal is not None
    assert unsent.num_bytes == 1


# ---- over HTTP ----


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    keys: Path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys.write_text(KEYS)
    backend = CallingBackend(tmp_path_factory.mktemp("tokenizer"))
    with live_server(backend, keys=str(keys), max_unsent_bytes=MAX_UNSENT) as live:
        yield live
    backend.close()


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}-secret"}


def stored(server: Live, name: str) -> str:
    """The path of a large response of this key."""
    body = {"input": "Why?", "prompt_cache_key": "x" * SIZE}
    with pytest.MonkeyPatch.context() as patch:  # no field of a stored response may be this large otherwise
        patch.setattr(conversation, "MAX_REPEATED_CHARACTERS", 2 * SIZE)
        response = server.post("/v1/responses", body, headers=bearer(name))
    assert response.status_code == 200, response.text[:500]
    return f"/v1/responses/{response.json()['id']}"


@contextlib.contextmanager
def unread(server: Live, path: str, name: str, times: int = 1) -> Iterator[list[socket.socket]]:
    """Connections that have requested a path and read nothing but the status."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    with contextlib.ExitStack() as stack:
        connections = []
        for _ in range(times):
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((host, int(port)))
            head = f"GET {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {name}-secret\r\n\r\n"
            connection.sendall(head.encode())
            assert connection.recv(12) == b"HTTP/1.1 200"
            connections.append(connection)
        yield connections
    server.wait_until("all is let go", lambda: server.state.unsent.num_bytes == 0)


def test_unread_responses_are_not_copied_into_connection_buffers(server: Live) -> None:
    path = stored(server, "alice")
    with unread(server, path, "alice", 3):

        def waiting() -> int:
            connections = server.server.server_state.connections
            return sum(one.transport.get_write_buffer_size() for one in connections)

        server.wait_until("something waits to be read", waiting)
        assert waiting() <= 3 * 4 * PIECE
        assert 3 * SIZE < server.state.unsent.num_bytes < 4 * SIZE
        assert server.http.get("/v1/models", headers=bearer("alice")).status_code == 200


def test_unread_responses_are_bounded_per_key(server: Live) -> None:
    path = stored(server, "alice")
    with unread(server, path, "alice", 3):
        refused = server.http.get(path, headers=bearer("alice"))
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "too_many_unsent_bytes"
        assert server.http.get(stored(server, "bob"), headers=bearer("bob")).status_code == 200
        count = server.state.metrics.refused["too_many_unsent_bytes"]
    assert count == 1
    read = server.http.get(path, headers=bearer("alice"))
    assert len(read.content) > SIZE
    assert read.json()["prompt_cache_key"] == "x" * SIZE


def test_unread_responses_count_as_requests_of_their_key(server: Live) -> None:
    path = stored(server, "bob")
    for route in (path, f"{path}/input_items"):
        assert server.http.get(route, headers=bearer("bob")).status_code == 200
    with unread(server, path, "bob"):
        for route in (path, f"{path}/input_items"):
            refused = server.http.get(route, headers=bearer("bob"))
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert refused.json()["error"]["code"] == "concurrency_limit_exceeded"
    server.wait_until("none is running", lambda: not server.state.keys.named("bob").num_running)
    path = stored(server, "carol")
    answers = [server.http.get(path, headers=bearer("carol")).status_code for _ in range(3)]
    assert answers == [200, 200, 429]
