"""Rounding steps up to shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.execution.gpu.shapes import Buckets, TextBuckets

LIMITS = st.tuples(st.integers(1, 700), st.integers(1, 20_000)).filter(lambda limits: limits[0] <= limits[1])


@given(LIMITS, st.data())
def test_every_step_fits_its_shape(limits: tuple[int, int], data: st.DataObject) -> None:
    max_entries, max_tokens = limits
    buckets = Buckets(max_entries, max_tokens)
    count = data.draw(st.integers(1, max_entries))
    shape = buckets.decode(count, prefix=False)
    assert count <= shape.num_tokens == shape.num_decodes == shape.num_samples <= max_entries
    num_tokens = data.draw(st.integers(1, max_tokens))
    num_entries = data.draw(st.integers(1, min(num_tokens, max_entries)))
    num_decodes = data.draw(st.integers(0, num_entries - 1))
    num_samples = data.draw(st.integers(0, num_entries))
    num_chunks = num_entries - num_decodes
    shape = buckets.mixed(num_tokens, num_decodes, num_chunks, num_samples, prefix=False)
    assert num_tokens <= shape.num_tokens <= max_tokens
    assert num_decodes <= shape.num_decodes <= max_entries
    assert num_chunks <= shape.num_chunks
    assert num_samples <= shape.num_samples <= max_entries
    assert shape.chunks


@given(LIMITS)
def test_usual_shapes_cover_usual_steps(limits: tuple[int, int]) -> None:
    buckets = Buckets(*limits, short_context_sizes=range(2, 9))
    usual = buckets.usual()
    assert len(set(usual)) == len(usual)
    for count in {1, limits[0] // 2 or 1, limits[0]}:
        assert buckets.decode(count, prefix=False) in usual
    for num_tokens in {1, limits[1] // 2 or 1, limits[1]}:
        assert buckets.mixed(num_tokens, 0, 1, 1, prefix=False) in usual
    for count in range(2, min(8, limits[0]) + 1):
        assert buckets.decode(count, prefix=False, short_context=True) in usual
    for count in range(2, min(64, limits[0]) + 1):
        assert (
            buckets.decode(count, prefix=True) in usual or buckets.decode(count, prefix=True).num_tokens > 64
        )
    assert usual[0].num_tokens == max(shape.num_tokens for shape in usual)


@pytest.mark.parametrize(("count", "size"), [(1, 1), (3, 4), (9, 16), (65, 80), (256, 256)])
def test_sizes_are_close_together_where_steps_are_small(count: int, size: int) -> None:
    assert Buckets(256, 8192).decode(count, prefix=False).num_tokens == size


def test_scoring_prompts_uses_another_shape() -> None:
    buckets = Buckets(8, 64)
    plain, scored = (buckets.mixed(20, 1, 1, 2, prefix=False, scores=scores) for scores in (False, True))
    assert plain != scored
    assert plain == replace(scored, scores=False)


MAX_TEXTS, MAX_TOKENS = st.integers(1, 2048), st.integers(1, 40_000)


@given(MAX_TEXTS, MAX_TOKENS, st.data())
def test_every_step_of_texts_fits_its_shape(max_texts: int, max_tokens: int, data: st.DataObject) -> None:
    buckets = TextBuckets(max_texts, max_tokens)
    num_tokens = data.draw(st.integers(1, max_tokens))
    num_texts = data.draw(st.integers(1, min(num_tokens, 2 * max_texts)))  # filled up, each has another
    shape = buckets.shape(num_tokens, num_texts)
    assert num_tokens <= shape.num_tokens <= buckets.largest.num_tokens == max_tokens
    assert num_texts <= shape.num_texts <= min(shape.num_tokens, buckets.largest.num_texts)
    # Little of a large step is padding.
    assert shape.num_tokens - num_tokens < max(32, num_tokens / 4)


@given(MAX_TEXTS, MAX_TOKENS)
def test_usual_text_shapes_cover_usual_steps(max_texts: int, max_tokens: int) -> None:
    buckets = TextBuckets(max_texts, max_tokens)
    usual = buckets.usual()
    assert len(set(usual)) == len(usual)
    assert usual[0].num_tokens == max_tokens
    for num_tokens in {1, max_tokens // 2 or 1, max_tokens}:
        for text_len in (32, 100, 500):
            num_texts = min(-(-num_tokens // text_len), max_texts)
            assert buckets.shape(num_tokens, num_texts) in usual


def test_number_of_usual_shapes_stays_small() -> None:
    assert len(TextBuckets(1024, 16384).usual()) < 200


def test_shapes_without_padding_have_no_capacity_for_it() -> None:
    buckets = TextBuckets(1024, 16384)
    assert buckets.shape(16384, 1024).num_texts == 1024
    assert buckets.shape(16384, 1025).num_texts == 2048
    assert max(shape.num_texts for shape in buckets.usual()) <= 1024
