"""Limits on sizes, connections, queues and time."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from inflight.server.observability.request_log import QueuePace
from tests.server.live import Backend, Live, live_server
from tests.support.waiting import wait_until

PATH = "/v1/completions"
POST = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
GOOD = {"prompt": [5, 6], "max_tokens": 4, "temperature": 0}
ENDLESS = {"prompt": [5, 6], "max_tokens": 2000, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def _small(backend: Backend) -> Iterator[Live]:
    with live_server(
        backend, max_body_size=4096, max_header_size=2048, read_timeout=0.5, max_connections=8
    ) as live:
        yield live


@pytest.fixture
def small(_small: Live) -> Iterator[Live]:
    yield _small
    _small.wait_until_idle()
    _small.complete(**GOOD)


def connect(live: Live) -> socket.socket:
    host, _, port = live.url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def reply(connection: socket.socket) -> bytes:
    """All that comes until the server closes."""
    received = b""
    try:
        while part := connection.recv(65536):
            received += part
    except ConnectionResetError:
        pass
    return received


def test_large_body_is_refused(small: Live) -> None:
    response = small.post(PATH, {"prompt": "x" * 5000})
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"


def test_large_chunked_body_is_refused(small: Live) -> None:
    parts = (b'{"prompt": "', *[b"x" * 1000] * 20, b'"}')
    response = small.http.post(PATH, content=iter(parts), headers={"content-type": "application/json"})
    assert response.status_code == 413


def test_endless_body_is_refused_while_it_arrives(small: Live) -> None:
    with connect(small) as connection:
        connection.sendall(f"{POST}transfer-encoding: chunked\r\n\r\n".encode())
        try:
            for _ in range(10_000):
                connection.sendall(b"400\r\n" + b"x" * 1024 + b"\r\n")
        except OSError:  # the server has closed, as it should
            return
        raise AssertionError("ten megabytes were taken")


def test_body_with_too_large_content_length_is_refused_before_it_arrives(small: Live) -> None:
    with connect(small) as connection:
        connection.sendall(f"{POST}content-length: 99999999999\r\n\r\n".encode())
        assert reply(connection).startswith(b"HTTP/1.1 413 ")


def test_body_that_does_not_arrive_times_out(small: Live) -> None:
    with connect(small) as connection:
        connection.sendall(f"{POST}content-length: 10\r\n\r\n{{".encode())
        assert reply(connection).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("head", ["GET /health", "POST /nothing"])
def test_body_that_continues_after_its_answer_is_cut_off(head: str, small: Live) -> None:
    with connect(small) as connection:
        connection.sendall(f"{head} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999\r\n\r\n".encode())
        with pytest.raises(ConnectionError):
            wait_until(lambda: connection.sendall(b"x"), "the end of the connection")
    small.wait_until("no connection", lambda: len(small.server.server_state.connections) <= 1)


def test_client_that_leaves_before_its_body_is_complete_logs_no_error(
    small: Live, caplog: pytest.LogCaptureFixture
) -> None:
    responses = small.state.metrics.responses
    before = responses[PATH, "499"]
    with connect(small) as connection:
        connection.sendall(f"{POST}content-length: 10\r\n\r\n{{".encode())
    small.wait_until("its line in the log", lambda: responses[PATH, "499"] == before + 1)
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


def test_upgrade_to_another_protocol_is_ignored(small: Live, caplog: pytest.LogCaptureFixture) -> None:
    headers = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    assert small.http.get("/health", headers=headers).status_code == 200
    assert not caplog.records


def test_http_2_upgrade_request_is_answered_over_http_1_1(small: Live) -> None:
    """As Java's client and curl may, in their first request."""
    headers = {"connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "http2-settings": "AAMAAABk"}
    for _ in range(2):
        assert small.post(PATH, GOOD, headers=headers).status_code == 200


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("streamed", [True, False])
def test_http_1_0_response_is_not_chunked(version: str, streamed: bool, small: Live) -> None:
    body = json.dumps({**GOOD, "stream": streamed}).encode()
    head = (
        POST.replace("HTTP/1.1", f"HTTP/{version}")
        + f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    with connect(small) as connection:
        connection.sendall(head.encode() + body)
        start, _, content = reply(connection).partition(b"\r\n\r\n")
    assert start.startswith(b"HTTP/1.1 200 ")
    assert (b"transfer-encoding" in start) is (streamed and version == "1.1")
    assert (b"content-length" in start) is not streamed
    if version == "1.0":
        assert content.startswith(b"data: {" if streamed else b"{")
        assert content.endswith(b"data: [DONE]\n\n" if streamed else b"}")


@pytest.mark.parametrize(
    "lines",
    [
        b"x-long: " + b"x" * 3000 + b"\r\n\r\n",  # one that is complete
        b"x-long: " + b"x" * 300_000,  # one that never ends
        b"".join(b"x-%d: y\r\n" % number for number in range(1000)),
    ],
)
def test_large_headers_are_refused(lines: bytes, small: Live) -> None:
    with connect(small) as connection:
        try:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + lines)
        except OSError:
            return
        answer = reply(connection)
    assert answer.startswith(b"HTTP/1.1 431 ") or answer == b""  # a reset may overtake the answer


CHUNKED = POST.encode() + (b"transfer-encoding: chunked\r\n\r\n")


@pytest.mark.parametrize(
    "lines",
    [
        b"0\r\n" + b"x-trailer: y\r\n" * 400,
        b"0\r\nx-trailer: " + b"y" * 4000,
        b"1;" + b"x" * 4000,
        b"1;extension=value\r\n{\r\n" * 400,
    ],
)
def test_trailers_and_chunk_extensions_count_as_headers(lines: bytes, small: Live) -> None:
    with connect(small) as connection:
        connection.sendall(CHUNKED + lines)
        answer = reply(connection)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"headers_too_large" in answer


@pytest.mark.parametrize("path", [PATH, "/nothing"])
def test_endless_trailers_are_not_read(path: str, small: Live) -> None:
    with connect(small) as connection:
        connection.sendall(CHUNKED.replace(PATH.encode(), path.encode()) + b"0\r\n")
        with pytest.raises(ConnectionError):
            send_lines(connection)


def send_lines(connection: socket.socket) -> None:
    for _ in range(10_000):
        connection.sendall(b"x-trailer: " + b"y" * 1024 + b"\r\n")


def test_many_small_chunks_and_a_trailer_are_accepted(small: Live) -> None:
    body = json.dumps(GOOD).encode().ljust(3000)
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    with connect(small) as connection:
        connection.sendall(CHUNKED + chunks + b"0\r\nconnection: close\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 200"


def test_long_url_is_refused(small: Live) -> None:
    assert small.http.get("/health?" + "x" * 3000).status_code == 431


def test_headers_that_do_not_arrive_close_the_connection(small: Live) -> None:
    with connect(small) as connection:
        connection.sendall(b"GET /health HT")
        assert reply(connection) == b""
    with connect(small) as connection:
        assert reply(connection) == b""


def test_invalid_http_is_refused(small: Live) -> None:
    with connect(small) as connection:
        connection.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
        head, _, body = reply(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["code"] == "invalid_http"


@pytest.fixture
def patient(backend: Backend) -> Iterator[Live]:
    """As small, but silent clients are kept for as long as a test takes."""
    with live_server(backend, max_connections=8) as live:
        yield live


def test_connections_over_the_limit_are_refused_but_probes_are_answered(patient: Live) -> None:
    patient.http.get("/health")
    with contextlib.ExitStack() as held:
        for _ in range(6):  # seven in all; the eighth is kept for probes
            held.enter_context(connect(patient))
        patient.wait_until("all of them", lambda: len(patient.server.server_state.connections) == 7)
        for head, status in (
            (b"GET /v1/models", b"503"),
            (b"POST /v1/completions", b"503"),
            (b"GET /health", b"200"),
            (b"HEAD /ready?x=y", b"200"),
        ):
            with connect(patient) as one_more:
                one_more.sendall(head + b" HTTP/1.1\r\nhost: localhost\r\n\r\n")
                answer = reply(one_more)
            assert answer.startswith(b"HTTP/1.1 " + status), head
            assert b"connection: close" in answer
            assert (b"too_many_connections" in answer) is (status == b"503")
            patient.wait_until("its end", lambda: len(patient.server.server_state.connections) == 7)
        # A client that takes this connection too and sends nothing loses it to the next.
        silent = [held.enter_context(connect(patient)) for _ in range(20)]
        with connect(patient) as probe:
            probe.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert reply(probe).startswith(b"HTTP/1.1 200 ")
        assert reply(silent[0]).startswith(b"HTTP/1.1 503 ")
        assert patient.http.get("/v1/models").status_code == 200
    patient.wait_until("a free slot", lambda: len(patient.server.server_state.connections) < 7)


def test_connection_serves_several_requests(small: Live) -> None:
    body = json.dumps(GOOD).encode()
    one = f"{POST}content-length: {len(body)}\r\n\r\n".encode() + body
    with connect(small) as connection:
        connection.sendall(one * 3)  # at once
        received = b""
        while received.count(b"HTTP/1.1 200") < 3 or not received.endswith(b"}}}"):
            part = connection.recv(65536)
            assert part
            received += part


# ---- lists ----


@pytest.mark.parametrize(
    "body",
    [
        {"bad_words": ["nothing of the kind"], "n": 10},
        {"bad_words": ["nothing of the kind"], "prompt": [[5], [6], [7], [8]], "n": 4},
        {"stop_token_ids": [5] * 10, "n": 7},
        {"logit_bias": {str(number): 1 for number in range(65)}},
        {"allowed_token_ids": [*range(30)], "prompt": ["a", "b", "c"]},
    ],
)
def test_token_lists_are_bounded_times_the_answers(body: dict[str, Any], backend: Backend) -> None:
    with live_server(backend, max_listed_tokens=64) as live:
        response = live.post(PATH, {**GOOD, **body})
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "too_many_listed_tokens"
        assert response.json()["error"]["param"] == next(iter(body))
        chat = {"messages": [{"role": "user", "content": "x"}], **body, "n": 64}
        chat.pop("prompt", None)
        assert live.post("/v1/chat/completions", chat).json()["error"]["code"] == "too_many_listed_tokens"
        first = {name: value for name, value in body.items() if name not in ("n", "prompt", "logit_bias")}
        assert live.post(PATH, {**GOOD, **first}).status_code == 200


# ---- logprobs ----


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"logprobs": 4, "max_tokens": 13}, "logprobs"),
        ({"logprobs": 4, "n": 4, "max_tokens": 4}, "logprobs"),
        ({"logprobs": 0, "prompt": [[5], [6], [7]], "n": 3, "max_tokens": 8}, "logprobs"),
        ({"logprobs": 4, "n": 4, "max_tokens": 4, "stream": True}, "logprobs"),
        ({"prompt_logprobs": 4, "prompt": [5] * 13}, "prompt_logprobs"),
        ({"logprobs": 4, "echo": True, "max_tokens": 1, "prompt": [5] * 13}, "prompt_logprobs"),
        ({"logprobs": 4, "echo": True, "max_tokens": 0, "prompt": [5] * 13}, "prompt_logprobs"),
    ],
)
def test_logprobs_are_bounded_times_the_tokens_and_the_answers(
    body: dict[str, Any], param: str, backend: Backend
) -> None:
    with live_server(backend, max_answer_logprobs=64) as live:
        response = live.post(PATH, {**GOOD, **body})
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("too_many_logprobs", param)
        assert "at most 64 are allowed" in error["message"]
        smaller = {**GOOD, **body, "n": 1, "prompt": [5], "max_tokens": 4}
        assert live.post(PATH, smaller).status_code == 200


def test_logprobs_of_chats_are_bounded(backend: Backend) -> None:
    with live_server(backend, max_answer_logprobs=64) as live:
        chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 1, "n": 2}
        refused = live.post("/v1/chat/completions", {**chat, "max_tokens": 17})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "too_many_logprobs")
        # An answer whose length the client leaves open gets as many tokens as the limit allows.
        open_ended = live.post("/v1/chat/completions", {**chat, "ignore_eos": True}).json()
        assert [choice["finish_reason"] for choice in open_ended["choices"]] == ["length"] * 2
        assert open_ended["usage"]["completion_tokens"] == 2 * 16
        assert live.post("/v1/chat/completions", {**chat, "n": 64}).status_code == 400


# ---- the queue and time ----


def test_full_queue_refuses_at_once(backend: Backend) -> None:
    core = backend.core
    with live_server(backend, max_queue=1) as live:
        core.max_queue, before = 1, core.max_queue
        rows = core.scheduler.pool._free_rows[:]
        core.scheduler.pool._free_rows[:] = rows[:1]  # one request runs, one waits, the third is too many
        try:
            with (
                backend.held_steps(5),
                live.http.stream("POST", PATH, json={**ENDLESS, "stream": True}),
                live.http.stream("POST", PATH, json={**GOOD, "stream": True}) as waiting,
            ):
                for streamed in (False, True):
                    response = live.post(PATH, {**GOOD, "stream": streamed})
                    assert response.status_code == 429
                    assert response.json()["error"]["code"] == "queue_full"
                    assert int(response.headers["retry-after"]) >= 1
                assert live.http.get("/ready").status_code == 503
                assert live.http.get("/ready").json()["status"] == "queue full"
                assert live.http.get("/health").status_code == 200
                # Two answers do not fit together: neither may stay.
                assert live.post(PATH, {**GOOD, "n": 2, "temperature": 1.0}).status_code == 429
                assert waiting.status_code == 200
        finally:
            live.wait_until_idle()
            core.max_queue = before
            core.scheduler.pool._free_rows[:] = rows


def test_full_queue_refusal_estimates_retry_after(backend: Backend) -> None:
    """However many were refused before it: a refusal is no end of anything."""
    core, pool = backend.core, backend.core.scheduler.pool
    with live_server(backend, max_queue=1) as live:
        core.max_queue, before = 1, core.max_queue
        rows, pool._free_rows[:] = pool._free_rows[:], pool._free_rows[:1]
        pace = live.state.request_log.pace
        try:
            with (
                backend.held_steps(5),
                live.http.stream("POST", PATH, json={**ENDLESS, "stream": True}),
                live.http.stream("POST", PATH, json={**GOOD, "stream": True}),
            ):
                live.backend.run(_set(pace, between_ends=40.0))
                for logged in live.state.request_log:
                    logged.first_token_at = None  # nothing but the pace to go by
                received = [int(live.post(PATH, GOOD).headers["retry-after"]) for _ in range(20)]
                assert set(received) == {40}
        finally:
            live.wait_until_idle()
            core.max_queue = before
            pool._free_rows[:] = rows


async def _set(pace: QueuePace, between_ends: float) -> None:
    pace._between_ends = between_ends


def test_answers_that_can_run_at_once_need_no_queue_slot(backend: Backend) -> None:
    core = backend.core
    with live_server(backend, max_queue=16) as live:
        core.max_queue, before = 16, core.max_queue
        try:
            body = {**GOOD, "temperature": 1.0}
            assert live.post(PATH, {**body, "n": 20}).status_code == 200
            refused = live.post(PATH, {**ENDLESS, "temperature": 1.0, "n": 64 + 16 + 1})
            assert refused.status_code == 429
            message = refused.json()["error"]["message"]
            assert "max_queue is 16" in message
            assert "(max_num_seqs)" in message
        finally:
            live.wait_until_idle()
            core.max_queue = before


@pytest.mark.parametrize("streamed", [False, True])
def test_requests_over_their_time_limit_fail(streamed: bool, backend: Backend) -> None:
    with backend.held_steps():
        for first, whole, status, code in (
            (0.02, 60.0, 503, "first_token_timeout"),
            (60.0, 0.02, 504, "request_timeout"),
        ):
            # The time is over before the stream has begun, or after that.
            statuses = {200, status} if streamed else {status}
            assert status_in_time(backend, streamed, code, first, whole) in statuses


@pytest.mark.parametrize("streamed", [False, True])
def test_time_limit_within_an_answer_ends_it(streamed: bool, backend: Backend) -> None:
    """On a busy machine a second may be over before a stream has begun."""
    seconds = iter((1.0, 4.0, 16.0))
    received: list[int] = []
    while not received or (streamed and received[-1] != 200):
        with backend.held_steps(5):
            received.append(status_in_time(backend, streamed, "request_timeout", 60.0, next(seconds)))
    assert set(received) <= {200, 504}
    assert received[-1] == (200 if streamed else 504)


def status_in_time(backend: Backend, streamed: bool, code: str, first: float, whole: float) -> int:
    """The status of a request that ends with this error at such limits. In a stream the error is the last event, and
    there is no end mark."""
    with live_server(backend, first_token_timeout=first, request_timeout=whole) as live:
        with live.http.stream("POST", PATH, json={**ENDLESS, "stream": streamed}) as response:
            text = response.read().decode()
        event = text
        if response.status_code == 200:
            assert "[DONE]" not in text
            event = text.strip().split("\n\n")[-1].removeprefix("data: ")
        assert json.loads(event)["error"]["code"] == code
        live.wait_until_idle()
    return response.status_code
