"""Rounding steps of encoders up to shapes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inflight.execution.gpu.text_shapes import TextBuckets

MAX_TEXTS, MAX_TOKENS = st.integers(1, 2048), st.integers(1, 40_000)


@given(MAX_TEXTS, MAX_TOKENS, st.data())
def test_every_step_fits_its_shape(max_texts: int, max_tokens: int, data: st.DataObject) -> None:
    buckets = TextBuckets(max_texts, max_tokens)
    num_tokens = data.draw(st.integers(1, max_tokens))
    num_texts = data.draw(st.integers(1, min(num_tokens, 2 * max_texts)))  # filled up, each has another
    shape = buckets.shape(num_tokens, num_texts)
    assert num_tokens <= shape.num_tokens <= buckets.largest.num_tokens == max_tokens
    assert num_texts <= shape.num_texts <= min(shape.num_tokens, buckets.largest.num_texts)
    # Of large steps little is padding.
    assert shape.num_tokens - num_tokens < max(32, num_tokens / 4)


@given(MAX_TEXTS, MAX_TOKENS)
def test_usual_shapes_are_those_that_steps_get(max_texts: int, max_tokens: int) -> None:
    buckets = TextBuckets(max_texts, max_tokens)
    usual = buckets.usual()
    assert len(set(usual)) == len(usual)
    assert usual[0].num_tokens == max_tokens
    for num_tokens in {1, max_tokens // 2 or 1, max_tokens}:
        for text_len in (32, 100, 500):
            num_texts = min(-(-num_tokens // text_len), max_texts)
            assert buckets.shape(num_tokens, num_texts) in usual


def test_there_are_no_more_usual_shapes_than_can_be_captured_at_start() -> None:
    assert len(TextBuckets(1024, 16384).usual()) < 200


def test_texts_without_filling_have_no_room_for_it() -> None:
    buckets = TextBuckets(1024, 16384)
    assert buckets.shape(16384, 1024).num_texts == 1024
    assert buckets.shape(16384, 1025).num_texts == 2048
    assert max(shape.num_texts for shape in buckets.usual()) <= 1024
