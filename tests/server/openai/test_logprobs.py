"""The JSON of logprobs: by definition, and in pieces of bounded size."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from inflight.events import TokenLogprob, pack_logprobs
from inflight.server.formatters import json_pieces
from inflight.server.openai.formatters import MAX_BATCH, chat_logprobs, completion_logprobs, prompt_logprobs


def text(value: Any) -> Any:
    return json.loads(b"".join(json_pieces(value)))


def position(*candidates: tuple[int, float, int]) -> bytes:
    return pack_logprobs([TokenLogprob(*candidate) for candidate in candidates])


# The token itself, which is second of the most likely ones; one that is not among these; and one that ties.
SECOND = position((7, -1.0, 2), (5, -0.5, 1), (7, -1.0, 2))
OUTSIDE = position((9, -math.inf, 40), (5, -0.5, 1), (7, -1.0, 2))
TIED = position((8, -0.5, 1), (3, -0.5, 1), (4, -0.5, 1))


def test_chat_lists_the_most_likely_tokens_in_order_and_the_token_itself_separately() -> None:
    items = text(chat_logprobs([SECOND, OUTSIDE, TIED], 2, None))["content"]
    assert [item["logprob"] for item in items] == [-1.0, -9999.0, -0.5]
    assert [[top["logprob"] for top in item["top_logprobs"]] for item in items] == [
        [-0.5, -1.0],
        [-0.5, -1.0],
        [-0.5, -0.5],
    ]
    assert all(set(top) == {"token", "logprob", "bytes"} for item in items for top in item["top_logprobs"])
    assert text(chat_logprobs([SECOND], 0, None))["content"][0]["top_logprobs"] == []


def test_completions_have_parallel_lists() -> None:
    logprobs, end = completion_logprobs([1, 7, 9], [None, SECOND, OUTSIDE], 2, None, 10)
    assert end == 10  # without a tokenizer all texts are empty
    assert text(logprobs) == {
        "text_offset": [10, 10, 10],
        "token_logprobs": [None, -1.0, -9999.0],
        "tokens": ["", "", ""],
        "top_logprobs": [None, {"": -1.0}, {"": -9999.0}],
    }


def test_prompt_logprobs_are_keyed_by_token_id() -> None:
    assert prompt_logprobs(None, 2, None) is None
    positions = text(prompt_logprobs([None, SECOND], 2, None))
    assert positions[0] is None
    assert list(positions[1]) == ["7", "5"]
    assert positions[1]["5"] == {"logprob": -0.5, "rank": 1, "decoded_token": None}


@pytest.mark.parametrize("count", [0, 20])
def test_pieces_are_bounded_however_long_the_answer_is(count: int) -> None:
    num_positions = 4 * MAX_BATCH
    packed = position(*((rank, -1.5, rank) for rank in range(1, count + 2)))
    ids = [1] * num_positions
    cases = {
        "chat": chat_logprobs([packed] * num_positions, count, None),
        "completion": completion_logprobs(ids, [packed] * num_positions, count, None, 0)[0],
        "prompt": prompt_logprobs([packed] * num_positions, count, None),
    }
    for name, value in cases.items():
        pieces = list(json_pieces(value))
        assert max(map(len, pieces)) < 100 * MAX_BATCH, name
        json.loads(b"".join(pieces))


@pytest.mark.parametrize("value", [{}, {"a": {"b": [1, "x"], "c": {}}, "d": None}, [], 5])
def test_pieces_join_to_the_json_of_the_value(value: Any) -> None:
    assert text(value) == value
    assert text(iter([value, value])) == [value, value]
    assert text({"a": iter(())}) == {"a": []}
