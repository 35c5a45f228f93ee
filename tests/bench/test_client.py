"""Event streams, parsed however their bytes are split."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.bench.client import EventReader, StreamError
from tests.bench.fake import DONE, event, token, usage

TEXTS = ["Zürich", " 😀", "\n", "", "x"]
STREAM = b"".join([*map(token, TEXTS[:-1]), token(TEXTS[-1], "length"), usage(7, 5, 4), DONE])


def read(*parts: bytes) -> EventReader:
    reader = EventReader()
    for now, part in enumerate(parts):
        reader.feed(part, float(now))
    return reader


def split(data: bytes, positions: list[int]) -> list[bytes]:
    edges = [0, *sorted(position % len(data) for position in positions), len(data)]
    return [data[low:high] for low, high in pairwise(edges)]


@given(positions=st.lists(st.integers(min_value=0), max_size=40))
def test_result_does_not_depend_on_how_the_stream_is_split(positions: list[int]) -> None:
    parts = split(STREAM, positions)
    reader = read(*parts)
    assert (reader.num_tokens, reader.num_prompt_tokens, reader.num_cached_tokens) == (5, 7, 4)
    assert (reader.num_seen, reader.done, reader.finished) == (4, True, True)  # one token had no text
    # A token's time is that of the part that contains the end of its line.
    data = b""
    ends: list[float] = []
    for now, part in enumerate(parts):
        data += part
        ends += [float(now)] * (_num_with_text(data) - len(ends))
    assert reader.times == ends


def _num_with_text(data: bytes) -> int:
    lines = data.split(b"\n")[:-1]
    return sum(b'"text": "' in line and b'"text": ""' not in line for line in lines)


def test_stream_can_arrive_one_byte_at_a_time() -> None:
    reader = read(*(bytes([byte]) for byte in STREAM))
    assert (reader.num_tokens, len(reader.times), reader.done) == (5, 4, True)


def test_crlf_and_comments_are_accepted() -> None:
    data = b": ping\r\n\r\nevent: x\r\n" + token("a").replace(b"\n", b"\r\n") + b"data:[DONE]\r\n\r\n"
    reader = read(data)
    assert (reader.num_tokens, reader.done) == (1, True)


def test_chat_events_count_content_and_reasoning() -> None:
    def delta(**fields: object) -> bytes:
        return event({"choices": [{"index": 0, "delta": fields, "finish_reason": None}]})

    reader = read(
        delta(role="assistant", content=""), delta(reasoning_content="Hm"), delta(content="Yes"), delta()
    )
    assert reader.times == [1.0, 2.0]


def test_token_ids_determine_the_number_of_tokens() -> None:
    reader = read(event({"choices": [{"index": 0, "text": "", "token_ids": [4, 5, 6]}]}))
    assert (reader.times, reader.num_tokens) == ([0.0], 3)


@pytest.mark.parametrize(
    ("data", "kind", "message"),
    [
        (event({"error": {"message": "out of luck", "code": 500}}), "stream_error", "out of luck"),
        (event({"error": "out of luck"}), "stream_error", "out of luck"),
        (b"data: {nonsense\n\n", "bad_response", "cannot parse an event"),
        (event({"choices": "none"}), "bad_response", "cannot parse an event"),
        (b"data: \xff\n\n", "bad_response", "cannot parse an event"),
    ],
)
def test_invalid_events_are_errors(data: bytes, kind: str, message: str) -> None:
    reader = EventReader()
    with pytest.raises(StreamError, match=message) as raised:
        reader.feed(token("a") + data, 0.0)
    assert raised.value.kind == kind
    assert reader.num_tokens == 1


def test_line_without_end_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inflight.bench.client.MAX_EVENT", 100)
    reader = EventReader()
    reader.feed(b"data: " + b"x" * 90, 0.0)
    with pytest.raises(StreamError, match="longer than 100 bytes"):
        reader.feed(b"x" * 10, 0.0)
