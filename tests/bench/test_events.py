"""Streams, read however their bytes are cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.bench.events import EventReader, StreamError
from tests.bench.fake import DONE, event, token, usage

TEXTS = ["Zürich", " 😀", "\n", "", "x"]
STREAM = b"".join([*map(token, TEXTS[:-1]), token(TEXTS[-1], "length"), usage(7, 5, 4), DONE])


def read(*parts: bytes) -> EventReader:
    reader = EventReader()
    for now, part in enumerate(parts):
        reader.feed(part, float(now))
    return reader


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % len(data) for place in places), len(data)]
    return [data[low:high] for low, high in pairwise(edges)]


@given(places=st.lists(st.integers(min_value=0), max_size=40))
def test_a_stream_is_the_same_however_it_is_cut(places: list[int]) -> None:
    parts = cut(STREAM, places)
    reader = read(*parts)
    assert (reader.num_tokens, reader.num_prompt_tokens, reader.num_cached_tokens) == (5, 7, 4)
    assert (reader.num_seen, reader.done, reader.finished) == (4, True, True)  # one token had no text
    # A token's time is that of the part with the end of its line.
    seen = b""
    ends: list[float] = []
    for now, part in enumerate(parts):
        seen += part
        ends += [float(now)] * (_num_with_text(seen) - len(ends))
    assert reader.times == ends


def _num_with_text(data: bytes) -> int:
    lines = data.split(b"\n")[:-1]
    return sum(b'"text": "' in line and b'"text": ""' not in line for line in lines)


def test_one_byte_at_a_time() -> None:
    reader = read(*(bytes([byte]) for byte in STREAM))
    assert (reader.num_tokens, len(reader.times), reader.done) == (5, 4, True)


def test_other_ends_of_lines_and_comments() -> None:
    data = b": ping\r\n\r\nevent: x\r\n" + token("a").replace(b"\n", b"\r\n") + b"data:[DONE]\r\n\r\n"
    reader = read(data)
    assert (reader.num_tokens, reader.done) == (1, True)


def test_a_chat() -> None:
    def delta(**fields: object) -> bytes:
        return event({"choices": [{"index": 0, "delta": fields, "finish_reason": None}]})

    reader = read(
        delta(role="assistant", content=""), delta(reasoning_content="Hm"), delta(content="Yes"), delta()
    )
    assert reader.times == [1.0, 2.0]


def test_ids_tell_how_many_tokens_an_event_brings() -> None:
    reader = read(event({"choices": [{"index": 0, "text": "", "token_ids": [4, 5, 6]}]}))
    assert (reader.times, reader.num_tokens) == ([0.0], 3)


@pytest.mark.parametrize(
    ("data", "kind", "told"),
    [
        (event({"error": {"message": "out of luck", "code": 500}}), "stream_error", "out of luck"),
        (event({"error": "out of luck"}), "stream_error", "out of luck"),
        (b"data: {nonsense\n\n", "bad_response", "cannot be read"),
        (event({"choices": "none"}), "bad_response", "cannot be read"),
        (b"data: \xff\n\n", "bad_response", "cannot be read"),
    ],
)
def test_what_a_stream_should_not_have(data: bytes, kind: str, told: str) -> None:
    reader = EventReader()
    with pytest.raises(StreamError, match=told) as raised:
        reader.feed(token("a") + data, 0.0)
    assert raised.value.kind == kind
    assert reader.num_tokens == 1


def test_a_line_without_end_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inflight.bench.events.MAX_EVENT", 100)
    reader = EventReader()
    reader.feed(b"data: " + b"x" * 90, 0.0)
    with pytest.raises(StreamError, match="longer than 100 bytes"):
        reader.feed(b"x" * 10, 0.0)
