"""Cutting before tokenizing gives what cutting after it would."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.errors import ModelError, PromptError
from inflight.frontend.scoring_inputs import EncodedText, ScoringInputs, TextGroup, encode_prefixes
from inflight.frontend.text.tokenizer import Tokenizer
from tests.frontend.text.samples import BACKENDS, END, backend, tokenizer

from .scoring_engine import CROSS_ENCODER, EMBEDDER, RERANKER, TEMPLATE, inputs

PREFIX_WORDS = st.sampled_from(
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
TEXTS = st.lists(PREFIX_WORDS, max_size=150).map(" ".join) | st.lists(PREFIX_WORDS, max_size=150).map("".join)


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=25)
@given(texts=st.lists(TEXTS, max_size=3), limit=st.integers(1, 40))
def test_prefixes_are_the_first_tokens_of_the_whole_text(name: str, texts: list[str], limit: int) -> None:
    tok = tokenizer(name)
    whole = tok.encode_plain(texts)
    assert encode_prefixes(tok, texts, [limit] * len(texts)) == [ids[:limit] for ids in whole]


@pytest.mark.parametrize("unit", ["one word after another ", "東京都に行きました", "abcdefghij", "\u00a0"])
def test_long_text_is_tokenized_only_up_to_its_limit(unit: str) -> None:
    seen: list[int] = []

    class Counting(Tokenizer):
        def encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
            seen.extend(map(len, texts))
            return super().encode_plain(texts)

    tok = tokenizer("byte_level")
    counting = Counting(tok._backend)
    text = unit * 100_000
    (ids,) = encode_prefixes(counting, [text], [100])
    assert ids == tok.encode_plain([text[:20_000]])[0][:100]
    assert sum(seen) < 10_000


WORDS = "the quick brown fox jumps over the lazy dog " * 20


def encode(made: ScoringInputs, *items: Any, **fields: Any) -> list[EncodedText]:
    group = TextGroup(items, "document", "documents", **fields)
    return made.encode(group, 0, len(items))


def test_texts_match_the_tokenizers_encoding() -> None:
    made = inputs(EMBEDDER)
    texts = ["hello world", "", "[SEP] is only text", "ÉCLAIR"]
    first, empty, spelled, _ = encode(made, *texts)
    assert list(first.ids) == backend("wordpiece").encode(texts[0]).ids
    assert list(empty.ids) == [101, 102]
    assert list(spelled.ids).count(102) == 1
    assert [found.ids for found in encode(made, *texts, prompt="query: ")] == [
        encode(made, f"query: {text}")[0].ids for text in texts
    ]


def test_lowercasing_follows_the_checkpoint() -> None:
    made = inputs(replace(EMBEDDER, lowercase=True), name="byte_level")
    assert encode(made, "HELLO") == encode(made, "hello")
    assert encode(inputs(EMBEDDER, name="byte_level"), "HELLO") != encode(made, "hello")


def test_pairs_match_the_tokenizers_encoding() -> None:
    pairs = [("why?", "because"), ("why?", "so"), ("how?", "")]
    for (first, second), found in zip(pairs, encode(inputs(CROSS_ENCODER), *pairs), strict=True):
        expected = backend("wordpiece").encode(first, second)
        assert list(found.ids) == expected.ids
        assert found.second_segment == expected.type_ids.index(1)


@pytest.mark.parametrize("fields", [{}, {"max_tokens": 5}])
def test_truncation_matches_the_tokenizer(fields: dict[str, int]) -> None:
    made = backend("wordpiece").from_str(backend("wordpiece").to_str())
    length = len(made.encode("why, oh why?", "").ids) + fields["max_tokens"] if fields else 64
    made.enable_truncation(length, strategy="only_second")
    (found,) = encode(inputs(CROSS_ENCODER), ("why, oh why?", WORDS), truncate=True, **fields)
    assert list(found.ids) == made.encode("why, oh why?", WORDS).ids
    (text,) = encode(inputs(EMBEDDER), WORDS, truncate=True)
    made.enable_truncation(64)
    assert list(text.ids) == made.encode(WORDS).ids


def test_error_for_a_long_text_names_its_index() -> None:
    with pytest.raises(PromptError, match="document 1 has 180 tokens: at most 62 are allowed") as caught:
        encode(inputs(EMBEDDER), "short", WORDS)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "documents"
    with pytest.raises(PromptError, match="document 0 has 90000 characters and more than 62 tokens"):
        encode(inputs(EMBEDDER), "short bit " * 9000)
    with pytest.raises(
        PromptError, match="document 1 has 180 tokens: at most 59 are allowed beside 2 of the"
    ):
        encode(inputs(CROSS_ENCODER), ("why?", "short"), ("why?", WORDS))
    with pytest.raises(PromptError, match=r"leaves no room for a document") as caught:
        encode(inputs(CROSS_ENCODER), (WORDS, "short"), truncate=True)
    assert caught.value.param == "query"


def test_token_ids_are_used_unchanged() -> None:
    made = inputs(EMBEDDER)
    assert encode(made, array("q", [7, 8]))[0].ids == array("q", [7, 8])
    assert len(encode(made, array("q", range(100)), truncate=True)[0].ids) == 64
    for wrong, said in (
        (array("q"), "is empty"),
        (array("q", [-1]), "id -1"),
        (array("q", [1] * 65), "65 tokens"),
    ):
        with pytest.raises(PromptError, match=f"document 1.*{said}"):
            encode(made, "fine", wrong)
    with pytest.raises(PromptError, match=r"document 1: .*lone surrogate"):
        encode(made, "fine", "\ud800")
    with pytest.raises(PromptError, match="has none: give token ids"):
        encode(replace(made, tokenizer=None), "text")


def test_template_frames_query_and_document() -> None:
    made = inputs(RERANKER, 200, "byte_level")
    tok = tokenizer("byte_level")
    end = tok.token_id(END)
    assert end is not None
    for instruction in (None, "Judge hard."):
        first = made.first_of(f"why {END}?", instruction)
        for document in ("hello world", " two  spaces", "\nnext", "", f"東京 {END}"):
            (found,) = encode(made, (first, document))
            body = TEMPLATE.body.format(
                instruction=instruction or TEMPLATE.instruction, query=f"why {END}?", document=document
            )
            prefix, suffix = tok.encode(TEMPLATE.prefix), tok.encode(TEMPLATE.suffix)
            assert list(found.ids) == [*prefix, *tok.encode_plain([body])[0], *suffix]
            assert list(found.ids).count(end) == 2
    (cut,) = encode(made, (made.first_of("why?", None), WORDS), truncate=True)
    assert len(cut.ids) == 200
    assert list(cut.ids[-len(suffix) :]) == suffix


def test_template_that_cannot_be_split_is_rejected() -> None:
    facts = replace(RERANKER, template=replace(TEMPLATE, body="{query} {document}!"))
    with pytest.raises(ModelError, match="cannot split the model"):
        encode(inputs(facts, 64, "byte_level"), ("a", "b"))
    with pytest.raises(ModelError, match="cannot split the model"):
        encode(
            inputs(replace(RERANKER, template=replace(TEMPLATE, body="{query}{document}")), 64, "metaspace"),
            ("a", "b"),
        )
