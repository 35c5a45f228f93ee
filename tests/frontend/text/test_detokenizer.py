from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.frontend.text.detokenizer import IncrementalDetokenizer
from inflight.frontend.text.tokenizer import Tokenizer

from .samples import BACKENDS, SENTENCES, backend, tokenizer

BYTE_FALLBACK = [name for name in BACKENDS if name.startswith("byte_fallback")]
NATIVE = [name for name in BACKENDS if name not in BYTE_FALLBACK]  # `decode` is that of the package


def stream(
    tok: Tokenizer, parts: list[list[int]], skip: bool = True, prompt_ids: list[int] | None = None
) -> list[str]:
    detokenizer = IncrementalDetokenizer(tok, skip, prompt_ids or [])
    return [*(detokenizer.push(part) for part in parts), detokenizer.flush()]


def cut(ids: list[int], cuts: list[int]) -> list[list[int]]:
    borders = [0, *sorted(min(border, len(ids)) for border in cuts), len(ids)]
    return [ids[start:end] for start, end in pairwise(borders)]


def any_ids(name: str) -> st.SearchStrategy[list[int]]:
    """Generate mostly known ids, often low ones (specials and bytes), and some beyond the vocabulary."""
    size = tokenizer(name).vocab_size
    low = st.integers(0, min(size, 300) - 1)
    return st.lists(
        low | st.integers(0, size - 1) | st.sampled_from([size, size + 77, 2**33, -1]), max_size=24
    )


CUTS = st.lists(st.integers(0, 24), max_size=8)


@pytest.mark.parametrize("name", NATIVE)
@given(data=st.data(), cuts=CUTS, skip=st.booleans())
def test_streamed_text_equals_decoding_by_the_tokenizers_package(
    name: str, data: st.DataObject, cuts: list[int], skip: bool
) -> None:
    ids = data.draw(any_ids(name))
    known = [token_id for token_id in ids if 0 <= token_id < 2**32]
    expected = backend(name).decode(known, skip_special_tokens=skip)
    assert tokenizer(name).decode(ids, skip) == expected
    assert "".join(stream(tokenizer(name), cut(ids, cuts), skip)) == expected


@pytest.mark.parametrize("name", BACKENDS)
@given(data=st.data(), cuts=CUTS, skip=st.booleans())
def test_streamed_text_equals_decoding_after_any_prompt(
    name: str, data: st.DataObject, cuts: list[int], skip: bool
) -> None:
    tok = tokenizer(name)
    prompt, ids = data.draw(any_ids(name)), data.draw(any_ids(name))
    before = IncrementalDetokenizer(tok, skip).push(prompt)
    after = "".join(stream(tok, cut(ids, cuts), skip, prompt))
    assert before + after == tok.decode(prompt + ids, skip)


@pytest.mark.parametrize("name", BYTE_FALLBACK)
@given(data=st.data(), text=st.text(alphabet="helo w é🙂東\n", max_size=12), cuts=CUTS)
def test_well_formed_bytes_decode_like_the_tokenizers_package(
    name: str, data: st.DataObject, text: str, cuts: list[int]
) -> None:
    tok = tokenizer(name)
    pieces = [token_id for token_id in range(tok.vocab_size) if "<0x" not in tok.token(token_id)]
    ids = data.draw(st.lists(st.sampled_from(pieces), max_size=6)) + tok.encode(text)
    expected = backend(name).decode(ids, skip_special_tokens=True)
    assert tok.decode(ids) == expected
    assert "".join(stream(tok, cut(ids, cuts))) == expected


@given(data=st.binary(max_size=12), cuts=CUTS)
def test_malformed_fallback_bytes_become_one_replacement_each(data: bytes, cuts: list[int]) -> None:
    tok = tokenizer("byte_fallback_no_strip")
    ids = [tok.token_id(f"<0x{byte:02X}>") for byte in data]
    text = "".join(stream(tok, cut([token_id for token_id in ids if token_id is not None], cuts)))
    valid = data.decode(errors="ignore")
    assert text.replace("\ufffd", "") == valid.replace("\ufffd", "")
    assert len(text) - len(valid) == len(data) - len(valid.encode())


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@given(
    text=st.text(st.characters(codec="utf-8", exclude_characters="▁"), max_size=30)
)  # which byte fallback writes for a space
def test_no_push_returns_half_a_character(name: str, text: str) -> None:
    tok = tokenizer(name)
    ids = tok.encode(text)
    pushes = stream(tok, [[token_id] for token_id in ids])
    assert "".join(pushes) == text
    assert pushes[-1] == ""  # nothing is held back once the last character is complete
    assert text.count("\ufffd") == sum(push.count("\ufffd") for push in pushes)


@pytest.mark.parametrize("sentence", [*SENTENCES, "👩‍👩‍👧‍👦 e\u0301 🇩🇪"])
def test_text_is_returned_as_early_as_possible(sentence: str) -> None:
    tok = tokenizer("byte_level")
    ids = tok.encode(sentence)
    detokenizer = IncrementalDetokenizer(tok)
    seen = ""
    for end, token_id in enumerate(ids, 1):
        seen += detokenizer.push([token_id])
        complete = tok.decode(ids[:end]).rstrip("\ufffd")
        assert seen == complete


def test_word_after_a_prompt_keeps_its_space() -> None:
    tok = tokenizer("byte_fallback")
    prompt, word = tok.encode("hello"), tok.token_id("▁hello")
    assert word is not None
    assert stream(tok, [[word]], prompt_ids=prompt) == [" hello", ""]
    assert stream(tok, [[word]]) == ["hello", ""]
    assert stream(tok, [[word]], prompt_ids=[1]) == ["hello", ""]  # only a hidden token before
    assert stream(tok, [[word]], skip=False, prompt_ids=[1]) == [" hello", ""]


def test_character_started_by_the_prompt_is_completed_by_the_output() -> None:
    tok = tokenizer("byte_level")
    ids = [tok.token_id(character) for character in "ðŁĺĢ"]  # the four bytes of one emoji
    known = [token_id for token_id in ids if token_id is not None]
    assert len(known) == 4
    prompt = tok.encode("hello") + known[:2]
    assert stream(tok, [known[2:3], known[3:]], prompt_ids=prompt) == ["", "😀", ""]
    assert stream(tok, [known[2:3]], prompt_ids=prompt) == ["", "\ufffd"]


def test_hidden_and_unknown_ids_have_no_text() -> None:
    tok = tokenizer("byte_level")
    end = tok.eos_token_id
    assert end is not None
    ids = tok.encode("hello")
    assert "".join(stream(tok, [[end], ids, [end, 10**6]])) == "hello"
    assert "".join(stream(tok, [ids, [end]], skip=False)) == "hello<|end|>"


def test_only_the_end_of_a_long_prompt_is_read() -> None:
    class Counted(list[int]):
        reads = 0

        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            self.reads += 1
            return super().__getitem__(index)

        def __reversed__(self):  # type: ignore[no-untyped-def]
            return (self[index] for index in range(len(self) - 1, -1, -1))

    for name in ("byte_level", "wordpiece"):
        prompt = Counted(tokenizer(name).encode("hello world " * 500, add_special_tokens=False))
        IncrementalDetokenizer(tokenizer(name), True, prompt)
        assert prompt.reads <= 8
