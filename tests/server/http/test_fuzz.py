"""Random input on the socket: every answer is well-formed, and the server is unaffected afterwards."""

from __future__ import annotations

import json
import logging
import re
import socket
import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.http.test_limits import connect
from tests.server.live import Backend, Live, live_server

EXAMPLES = 150
SECONDS = 60.0  # then the rest of the examples is left out
STATUSES = {100, 200, 400, 403, 404, 405, 408, 413, 415, 431, 503}
LAST = b"\r\n\r\nGET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
_START = re.compile(rb"HTTP/1\.1 (\d{3}) [^\r\n]*\r\n((?:[^\r\n]+\r\n)*)\r\n")

# ---- what is sent ----

NOISE = st.binary(max_size=40) | st.sampled_from(
    [
        *(b"\r\n", b"\n", b"\r", b"\0", b"\r\n\r\n", b" ", b":", b"0\r\n\r\n", b"\x16\x03\x01\x02"),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ]
)
GOOD = json.dumps({"prompt": [5, 6], "max_tokens": 3, "temperature": 0}).encode()
STREAMED = json.dumps({"prompt": [5, 6], "max_tokens": 3, "stream": True}).encode()
BODIES = st.sampled_from([b"", b"{", b"[" * 500, b'{"prompt": "' + b"x" * 5000 + b'"}']) | NOISE
METHODS = st.sampled_from([b"DELETE", b"OPTIONS", b"CONNECT", b"PUT", b"get", b"\xff"])
TARGETS = st.sampled_from(
    [
        *(b"/tokenize", b"/metrics", b"/nothing", b"*", b"", b"//", b"/v1/requests/x", b"/" + b"x" * 3000),
        *(b"/%00%ff", b"/\xc3\xa4", b"http://localhost/health", b"localhost:80"),
    ]
)
VERSIONS = st.sampled_from([b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/9", b"", b"http/1.1"])
HARMLESS = st.sampled_from(
    [b"accept: */*", b"connection: keep-alive", b"expect: 100-continue", b"te: trailers"]
)
ODD = st.sampled_from(
    [
        *(b"content-type: text/plain", b"x: " + b"y" * 3000, b" folded", b"no colon", b": no name"),
        *(b"content-length: 5", b"content-length: -1", b"content-length: 99999999999999999999"),
        *(b"transfer-encoding: chunked", b"transfer-encoding: gzip, chunked", b"transfer-encoding: identity"),
        *(b"connection: close", b"connection: upgrade", b"upgrade: websocket", b"content-length: 0x5"),
        *(b"host: evil.example", b"origin: null", b"authorization: Bearer \xff"),
    ]
)
EXTENSIONS = st.sampled_from([b";a=b", b";" + b"x" * 3000, b" ", b"\0"])
ENDS = st.sampled_from(
    [b"", b"0\r\nx: y\r\n\r\n", b"0\r\nx: " + b"y" * 3000, b"-1\r\n", b"fffffffffffffffff\r\n", b"0\r\n"]
)


def mostly(draw: st.DrawFn, usual: list[bytes], odd: st.SearchStrategy[bytes]) -> bytes:
    """One oddity at a time gets further into the server than many."""
    return draw(odd) if draw(st.integers(0, 15)) == 7 else draw(st.sampled_from(usual))


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """Nearly one."""
    method = mostly(draw, [b"GET", b"POST", b"POST"], METHODS)
    target = mostly(draw, [b"/health"] if method == b"GET" else [b"/v1/completions"], TARGETS)
    body = mostly(draw, [GOOD, STREAMED], BODIES)
    lines = [b" ".join([method, target, mostly(draw, [b"HTTP/1.1"], VERSIONS)]), b"host: localhost"]
    lines += [mostly(draw, [draw(HARMLESS)], ODD | NOISE) for _ in range(draw(st.integers(0, 3)))]
    lines.append(b"content-type: application/json")
    if draw(st.booleans()):
        lines.append(b"content-length: %d" % len(body))
    else:
        lines.append(b"transfer-encoding: chunked")
        cut = draw(st.integers(0, len(body)))
        extension = mostly(draw, [b""], EXTENSIONS)
        parts = [
            b"%x%s\r\n%s\r\n" % (len(part), extension, part) for part in (body[:cut], body[cut:]) if part
        ]
        body = b"".join(parts) + mostly(draw, [b"0\r\n\r\n"], ENDS)
    return b"\r\n".join([*lines, b"", body])


CONVERSATIONS = st.lists(requests() | requests() | requests() | NOISE, min_size=1, max_size=5).map(b"".join)

# ---- what comes back ----


def converse(live: Live, sent: bytes, cuts: list[int]) -> bytes:
    """All that the server answers until it closes."""
    received = b""
    with connect(live) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            for start, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
                connection.sendall(sent[start:end])
            connection.settimeout(1.0)
            while True:
                try:
                    part = connection.recv(65536)
                except TimeoutError:  # the last request became the body of another, and all are answered
                    connection.shutdown(socket.SHUT_WR)
                    continue
                if not part:
                    return received
                received += part
        except ConnectionError:  # closed while more was sent
            return received


def check(answers: bytes) -> None:
    """Whole answers, one after the other; the connection may be closed within the last of them."""
    at = 0
    while at < len(answers):
        start = _START.match(answers, at)
        assert start is not None, answers[at:]
        status, headers = int(start[1]), start[2].lower()
        assert status in STATUSES, answers[at:]
        at = start.end()
        length = re.search(rb"^content-length: (\d+)\r$", headers, re.MULTILINE)
        if length is not None:
            body = answers[at : at + int(length[1])]
            at += len(body)
            if b"content-type: application/json" in headers and len(body) == int(length[1]):
                assert ("error" in json.loads(body)) is (status >= 400 and b'"status"' not in body)
        elif b"transfer-encoding: chunked" in headers:
            end = answers.find(b"\r\n0\r\n\r\n", at)
            at = len(answers) if end < 0 else end + 7
        elif status != 100:
            return  # its end is that of the connection


class Errors(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.received: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.received.append(record.getMessage())


@pytest.fixture(scope="module")
def fuzzed(backend: Backend) -> Iterator[Live]:
    with live_server(
        backend, max_body_size=4096, max_header_size=2048, read_timeout=0.05, log_requests=False
    ) as live:
        yield live


def test_random_bytes_get_well_formed_answers(fuzzed: Live) -> None:
    ends_at = time.monotonic() + SECONDS
    errors = Errors()

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(CONVERSATIONS, st.data())
    def run(sent: bytes, data: st.DataObject) -> None:
        cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=4)))
        if time.monotonic() < ends_at:
            check(converse(fuzzed, sent + LAST, cuts))
            assert not errors.received

    logging.getLogger().addHandler(errors)
    try:
        run()
    finally:
        logging.getLogger().removeHandler(errors)
    assert fuzzed.http.get("/health", headers={"connection": "close"}).status_code == 200
    fuzzed.wait_until_idle()
    fuzzed.wait_until("no connection", lambda: not fuzzed.server.server_state.connections)
    fuzzed.wait_until("no task", lambda: not fuzzed.server.server_state.tasks)
