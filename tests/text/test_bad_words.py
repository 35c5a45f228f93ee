from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.errors import ParameterError
from inflight.text import bad_word_ids

from .samples import metaspace_backend, tokenizer


def test_a_word_is_forbidden_with_and_without_a_leading_space() -> None:
    tok = tokenizer("byte_level")
    expected = {tuple(tok.encode(text)) for text in ("hello", " hello")}
    assert len(expected) == 2
    assert set(bad_word_ids(tok, ["hello"])) == expected
    assert set(bad_word_ids(tok, ["hello", " hello", "hello"])) == expected


def test_a_sequence_that_ends_in_another_is_left_out() -> None:
    tok = tokenizer("byte_fallback")
    ids = bad_word_ids(tok, ["hello"])
    assert (tok.token_id("▁hello"),) in ids
    assert all(other == one or other[-len(one) :] != one for one in ids for other in ids)


@given(words=st.lists(st.text(alphabet="helo wrd", min_size=1, max_size=8), max_size=5))
def test_every_spelling_is_met_by_some_sequence(words: list[str]) -> None:
    tok = tokenizer("byte_level")
    ids = bad_word_ids(tok, words)
    assert len(set(ids)) == len(ids)
    for word in words:
        core = word.lstrip() or word
        for text in (core, f" {core}"):
            spelled = tuple(tok.encode(text))
            assert any(spelled[-len(one) :] == one for one in ids)


def test_no_words_no_sequences() -> None:
    assert bad_word_ids(tokenizer("byte_level"), []) == ()


def test_a_word_without_tokens_is_refused() -> None:
    from tokenizers import normalizers

    from inflight.text import Tokenizer

    backend = metaspace_backend()
    backend.normalizer = normalizers.Replace("z", "")
    backend.pre_tokenizer = None
    with pytest.raises(ParameterError, match="'zz'"):
        bad_word_ids(Tokenizer(backend), ["hello", "zz"])
