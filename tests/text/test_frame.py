"""What stands around texts, against what the package itself puts there."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import processors

from inflight.errors import ModelError
from inflight.text import Tokenizer

from .samples import BACKENDS, SENTENCES, backend, byte_level_backend, tokenizer

FIRST, SECOND = "hello world", "the quick brown fox"


def template(single: str, pair: str) -> Any:
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=[("<s>", 0), ("</s>", 1)])


PROCESSORS = {
    "roberta": processors.RobertaProcessing(("</s>", 1), ("<s>", 0)),
    "types": template("$A </s>", "$A </s> $B:1 </s>:1"),
    "sequence": processors.Sequence([processors.ByteLevel(), template("<s> $A", "<s> $A </s> </s> $B")]),
}


def check(made: Any) -> None:
    tok = Tokenizer(made)
    first, second = tok.encode_plain([FIRST, SECOND])
    assert tok.frame.around(first) == made.encode(FIRST).ids
    assert tok.frame.num_tokens == made.num_special_tokens_to_add(False)
    found = made.encode(FIRST, SECOND)
    ids, second_segment = tok.pair_frame.around_pair(first, second)
    assert ids == found.ids
    assert second_segment == (found.type_ids.index(1) if 1 in found.type_ids else 0)
    assert tok.pair_frame.num_tokens == made.num_special_tokens_to_add(True)


@pytest.mark.parametrize("name", BACKENDS)
def test_frames_are_the_package_s(name: str) -> None:
    check(backend(name))


@pytest.mark.parametrize("name", PROCESSORS)
def test_frames_of_post_processors(name: str) -> None:
    made = byte_level_backend()
    made.post_processor = PROCESSORS[name]
    check(made)


def test_a_tokenizer_that_changes_the_order_is_refused() -> None:
    made = byte_level_backend()
    made.post_processor = template("$A", "$B $A")
    with pytest.raises(ModelError, match="two texts"):
        _ = Tokenizer(made).pair_frame


def test_flags_speak_where_the_post_processor_is_silent() -> None:
    made = byte_level_backend()
    tok = Tokenizer(made, specials={"eos_token": "<|end|>"}, add_eos=True)
    if tok.eos_token_id is None:
        tok = Tokenizer(made, specials={"eos_token": tokenizer("byte_level").token(0)}, add_eos=True)
    assert tok.frame.around(tok.encode_plain([FIRST])[0]) == tok.encode(FIRST)


@pytest.mark.parametrize("name", BACKENDS)
def test_plain_texts_never_hold_special_tokens(name: str) -> None:
    tok = tokenizer(name)
    spelled = [f"a {special} b" for special in tok.special_spellings]
    unknown = {tok.token_id("<unk>"), tok.token_id("[UNK]")}
    for ids in tok.encode_plain([*spelled, *SENTENCES]):
        assert not set(ids) & (tok.special_ids - unknown)
    assert tok.encode_plain(SENTENCES) == tok.encode_batch(SENTENCES, False)
