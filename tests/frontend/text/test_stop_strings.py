from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers

from inflight.errors import ParameterError
from inflight.frontend.input_processor import bad_word_ids
from inflight.frontend.output_processor import StopStrings, _Automaton
from inflight.frontend.text.tokenizer import Tokenizer

from .samples import metaspace_backend, tokenizer


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Search character by character for the first end of any stop, and return the longest stop that ends there."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return (text[:end] if include else text[: end - len(longest)]), longest
    return text, None


def must_hold(text: str, stops: list[str]) -> int:
    return max(
        (size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])),
        default=0,
    )


TEXT = st.text(alphabet="abc", max_size=40)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=5)


@given(text=TEXT, stops=STOPS, include=st.booleans(), cuts=st.lists(st.integers(0, 40), max_size=10))
def test_any_split_ends_where_the_naive_search_ends(
    text: str, stops: list[str], include: bool, cuts: list[int]
) -> None:
    finder = StopStrings(stops, include)
    borders = [0, *sorted(min(border, len(text)) for border in cuts), len(text)]
    sent = ""
    for start, end in pairwise(borders):
        sent += finder.push(text[start:end])
        if finder.matched is None:
            assert len(sent) == end - must_hold(text[:end], stops)  # no more is held back than necessary
    sent += finder.flush()
    assert (sent, finder.matched) == naive(text, stops, include)


def test_stop_string_across_pushes_is_held_back_and_cut() -> None:
    finder = StopStrings(["</end>"])
    assert [finder.push(part) for part in ["text <", "/en", "ding </", "end> more"]] == [
        "text ",
        "",
        "</ending ",
        "",
    ]
    assert finder.matched == "</end>"
    assert finder.push("after") == ""
    assert finder.flush() == ""


@pytest.mark.parametrize(("include", "expected"), [(False, "one "), (True, "one STOP")])
def test_include_keeps_the_stop_string_and_nothing_after_it(include: bool, expected: str) -> None:
    finder = StopStrings(["STOP"], include)
    assert finder.push("one STOP two") == expected


def test_stop_string_that_is_completed_first_wins() -> None:
    finder = StopStrings(["abcd", "bc"])
    assert finder.push("xabcd") == "xa"
    assert finder.matched == "bc"


def test_flush_returns_held_text() -> None:
    finder = StopStrings(["stop"])
    assert finder.push("never st") == "never "
    assert finder.flush() == "st"
    assert finder.push("op") == "op"  # released text takes no part in a later match
    assert finder.matched is None


def test_text_passes_unchanged_without_stop_strings() -> None:
    finder = StopStrings([])
    assert finder.push("anything") == "anything"
    assert finder.flush() == ""


def test_work_is_linear_for_many_long_stop_strings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # 64 stops of 1024 characters that all nearly match everywhere: a search per stop would be quadratic.
    stops = ["a" * (1023 - index) + "b" + "c" * index for index in range(64)]
    finder = StopStrings(stops)
    lookups = 0

    class Counted(dict[int, int]):
        def get(self, key, default=None):  # type: ignore[no-untyped-def]
            nonlocal lookups
            lookups += 1
            return super().get(key, default)

    monkeypatch.setattr(finder, "_automaton", _Automaton(tuple(stops)))
    finder._automaton.edges = Counted(finder._automaton.edges)
    text = ("a" * 900 + "d") * 10
    assert finder.push(text) == text
    assert lookups <= 2 * len(text) + 2


def test_bad_word_is_banned_with_and_without_a_leading_space() -> None:
    tok = tokenizer("byte_level")
    expected = {tuple(tok.encode(text)) for text in ("hello", " hello")}
    assert len(expected) == 2
    assert set(bad_word_ids(tok, ["hello"])) == expected
    assert set(bad_word_ids(tok, ["hello", " hello", "hello"])) == expected


def test_sequence_that_ends_in_another_is_omitted() -> None:
    tok = tokenizer("byte_fallback")
    ids = bad_word_ids(tok, ["hello"])
    assert (tok.token_id("▁hello"),) in ids
    assert all(other == one or other[-len(one) :] != one for one in ids for other in ids)


@given(words=st.lists(st.text(alphabet="helo wrd", min_size=1, max_size=8), max_size=5))
def test_every_spelling_ends_in_a_banned_sequence(words: list[str]) -> None:
    tok = tokenizer("byte_level")
    ids = bad_word_ids(tok, words)
    assert len(set(ids)) == len(ids)
    for word in words:
        core = word.lstrip() or word
        for text in (core, f" {core}"):
            spelled = tuple(tok.encode(text))
            assert any(spelled[-len(one) :] == one for one in ids)


def test_no_bad_words_yield_no_sequences() -> None:
    assert bad_word_ids(tokenizer("byte_level"), []) == ()


def test_bad_word_without_tokens_is_rejected() -> None:
    backend = metaspace_backend()
    backend.normalizer = normalizers.Replace("z", "")
    backend.pre_tokenizer = None
    with pytest.raises(ParameterError, match="'zz'"):
        bad_word_ids(Tokenizer(backend), ["hello", "zz"])
