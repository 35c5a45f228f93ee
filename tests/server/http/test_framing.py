"""Framing of requests on one connection, in whatever pieces they arrive."""

from __future__ import annotations

import httptools
from hypothesis import given
from hypothesis import strategies as st

from inflight.server.http.limits import MAX_CHUNKS, RequestFraming

MAX = 1024


class Parsed:
    """The requests that the parser sees, fed as far as the framing says."""

    def __init__(self) -> None:
        self.framing = RequestFraming()
        self.parser = httptools.HttpRequestParser(self)
        self.headers: list[tuple[bytes, bytes]] = []
        self.bodies: list[bytes] = []
        self.num_begun = 0  # requests whose headers are complete
        self.num_ended = 0

    def on_message_begin(self) -> None:
        self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.num_begun += 1
        self.bodies.append(b"")
        self.framing.headers_complete(self.headers)

    def on_body(self, body: bytes) -> None:
        self.bodies[-1] += body

    def on_message_complete(self) -> None:
        self.num_ended += 1

    def feed(self, data: bytes) -> None:
        start = 0
        while start < len(data):
            end = self.framing.advance(data, start, MAX)
            assert end > start
            before = self.num_begun
            self.parser.feed_data(data[start:end])
            assert self.num_begun <= before + 1
            assert self.framing.in_headers == (self.num_begun == self.num_ended)
            start = end


bodies = st.binary(max_size=60) | st.text("\r\n0;a", max_size=60).map(str.encode)


@st.composite
def requests(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """The bytes of a request, and its body."""
    head = draw(st.sampled_from([b"", b"\r\n", b"\r\n\r\n"])) + b"POST / HTTP/1.1\r\nhost: x\r\n"
    if draw(st.booleans()):
        body = draw(bodies)
        return head + b"Content-Length: %d\r\n\r\n" % len(body) + body, body
    chunks = draw(st.lists(bodies.filter(len), max_size=5))
    extension = draw(st.sampled_from([b"", b";a", b";name=value"]))
    trailers = draw(st.sampled_from([b"", b"x: y\r\n", b"x: y\r\nlong: " + b"z" * 50 + b"\r\n"]))
    sent = b"".join(b"%X%s\r\n%s\r\n" % (len(chunk), extension, chunk) for chunk in chunks)
    return head + b"Transfer-Encoding: chunked\r\n\r\n" + sent + b"0\r\n" + trailers + b"\r\n", b"".join(
        chunks
    )


@given(st.lists(requests(), max_size=5), st.data())
def test_parser_gets_one_request_at_a_time(
    sent_requests: list[tuple[bytes, bytes]], data: st.DataObject
) -> None:
    sent = b"".join(request for request, _ in sent_requests)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=20)))
    parsed = Parsed()
    for start, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
        parsed.feed(sent[start:end])
    assert parsed.bodies == [body for _, body in sent_requests]
    assert parsed.num_ended == len(sent_requests)


def test_chunk_sizes_do_not_count_as_extra_bytes() -> None:
    framing = RequestFraming()
    framing.headers_complete([(b"transfer-encoding", b"chunked")])
    for _ in range(1000):
        framing.advance(b"0003\r\nabc\r\n", 0, MAX)
    assert framing.num_extra_bytes == 0
    framing.advance(b"3;ext\r\nabc\r\n", 0, MAX)
    assert framing.num_extra_bytes == len(b";ext")
    framing.advance(b"0\r\nx: y\r\nhalf", 0, MAX)
    assert framing.num_extra_bytes == len(b";extx: y\r\nhalf")
    assert not framing.in_headers
    assert framing.advance(b"\r\n\r\nGET", 0, MAX) == 4
    assert framing.in_headers


def test_framing_stops_after_too_many_extra_bytes() -> None:
    framing = RequestFraming()
    framing.headers_complete([(b"transfer-encoding", b"chunked")])
    data = b"0\r\n" + b"x: y\r\n" * 10_000
    assert framing.advance(data, 0, MAX) < MAX + 20


def test_chunks_are_parsed_a_few_at_a_time() -> None:
    framing = RequestFraming()
    framing.headers_complete([(b"transfer-encoding", b"chunked")])
    for chunk, num in ((b"1\r\na\r\n", MAX_CHUNKS + 1), (b"1;e\r\na\r\n", MAX_CHUNKS)):
        assert framing.in_chunks
        assert framing.advance(chunk * 1000, 0, MAX) == num * len(chunk)
