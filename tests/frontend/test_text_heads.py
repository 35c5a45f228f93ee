"""Cutting before tokenizing gives what cutting after it would."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.frontend.text_heads import encode_heads
from inflight.text import Tokenizer
from tests.text.samples import BACKENDS, tokenizer

WORDS = st.sampled_from(
    [
        "hello",
        "unaffable",
        "x",
        "東京都",
        "é́a",
        "don't",
        "...",
        "3.14159",
        "\n",
        "  ",
        "😀",
        "a" * 130,
        "</s>",
    ]
)
TEXTS = st.lists(WORDS, max_size=150).map(" ".join) | st.lists(WORDS, max_size=150).map("".join)


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=25)
@given(texts=st.lists(TEXTS, max_size=3), limit=st.integers(1, 40))
def test_a_head_is_the_beginning_of_the_whole(name: str, texts: list[str], limit: int) -> None:
    tok = tokenizer(name)
    whole = tok.encode_plain(texts)
    assert encode_heads(tok, texts, [limit] * len(texts)) == [ids[:limit] for ids in whole]


@pytest.mark.parametrize("unit", ["one word after another ", "東京都に行きました", "abcdefghij", "\u00a0"])
def test_a_long_text_is_not_tokenized_whole(unit: str) -> None:
    seen: list[int] = []

    class Counting(Tokenizer):
        def encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
            seen.extend(map(len, texts))
            return super().encode_plain(texts)

    tok = tokenizer("byte_level")
    counting = Counting(tok._backend)
    text = unit * 100_000
    (ids,) = encode_heads(counting, [text], [100])
    assert ids == tok.encode_plain([text[:20_000]])[0][:100]
    assert sum(seen) < 10_000
