"""Special tokens around texts, against those that the package itself adds."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from inflight.errors import ModelError, PromptError
from inflight.frontend.text.tokenizer import Tokenizer

from .samples import (
    BACKENDS,
    END,
    PAD,
    SENTENCES,
    backend,
    byte_fallback_backend,
    byte_level_backend,
    metaspace_backend,
    minilm_folder,
    tokenizer,
)


def save(folder: Path, raw: Any, config: dict[str, Any] | None = None, **others: object) -> Path:
    raw.save(str(folder / "tokenizer.json"))
    for name, content in {"tokenizer_config": config or {}, **others}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("name", BACKENDS)
@given(text=st.text(max_size=40) | st.sampled_from([*SENTENCES, f"{END}hello </s><s>[CLS] <unk>"]))
def test_encode_equals_the_tokenizers_package(name: str, text: str) -> None:
    for add in (False, True):
        assert tokenizer(name).encode(text, add) == backend(name).encode(text, add_special_tokens=add).ids


def test_encode_batch_equals_encode_of_each_text() -> None:
    tok = tokenizer("wordpiece")
    assert tok.encode_batch(SENTENCES) == [tok.encode(sentence) for sentence in SENTENCES]
    assert tok.encode_batch([]) == []


@pytest.mark.parametrize("text", ["\ud800", "fine until \udfff here", "é\udc80"])
def test_lone_surrogates_are_rejected(text: str) -> None:
    with pytest.raises(PromptError, match=r"lone surrogate, U\+D"):
        tokenizer("byte_level").encode(text)


def test_text_that_is_not_a_string_is_rejected() -> None:
    with pytest.raises(PromptError, match="of type list"):
        tokenizer("byte_level").encode(["hello"])  # type: ignore[arg-type]


def test_vocabulary_size_and_special_tokens() -> None:
    tok = tokenizer("byte_level")
    assert tok.vocab_size == max(backend("byte_level").get_vocab(True).values()) + 1
    assert tok.special_ids == {0, 1}
    assert tok.eos_token_id == 0
    assert tok.bos_token_id is None
    assert tok.token(0) == END
    assert tok.token(tok.vocab_size) == tok.token(-1) == tok.token(2**40) == ""
    assert not tok.knows(tok.vocab_size)
    assert tok.token_id(PAD) == 1


def test_vocab_size_counts_from_the_highest_id() -> None:
    sparse = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 9}, unk_token="a"))
    tok = Tokenizer(sparse)
    assert tok.vocab_size == 10
    assert not tok.knows(5)
    assert tok.decode([0, 5, 9]) == "a b"


@pytest.mark.parametrize("name", BACKENDS)
@given(text=st.text(alphabet="helo </s>|unkdpa\n", max_size=30))
def test_plain_text_never_becomes_a_special_token(name: str, text: str) -> None:
    tok = tokenizer(name)
    unknown = {tok.token_id("<unk>"), tok.token_id("[UNK]")}
    try:
        ids = tok.encode(text, add_special_tokens=False, parse_special=False)
    except PromptError:
        assert name == "metaspace"
        assert "</s>" in text
        return
    assert not set(ids) & (tok.special_ids - unknown)


def test_special_tokens_in_text_are_parsed_by_default() -> None:
    tok = tokenizer("byte_level")
    text = f"hello{END}"
    assert tok.encode(text)[-1] == tok.eos_token_id
    plain = tok.encode(text, parse_special=False)
    assert tok.eos_token_id not in plain
    assert tok.decode(plain) == text
    with_bos = tokenizer("byte_fallback").encode("<s>a", parse_special=False)
    assert with_bos.count(1) == 1  # the one that the post-processor adds
    with pytest.raises(PromptError, match="'</s>'"):
        tokenizer("metaspace").encode("a</s>", parse_special=False)
    assert 0 in tokenizer("metaspace").encode("Ω", parse_special=False)  # the unknown token is allowed


def test_stored_truncation_and_padding_are_off(tmp_path: Path) -> None:
    raw = byte_level_backend()
    raw.enable_truncation(3)
    raw.enable_padding(length=50)
    tok = Tokenizer.load(save(tmp_path, raw))
    assert tok.decode(tok.encode(SENTENCES[0])) == SENTENCES[0]
    assert len(tok.encode("hello")) < 50


def test_configured_bos_and_eos_apply_if_the_post_processor_adds_none(tmp_path: Path) -> None:
    config = {"bos_token": PAD, "eos_token": {"content": END}, "add_bos_token": True, "add_eos_token": True}
    raw = byte_level_backend()
    raw.post_processor = processors.ByteLevel()
    tok = Tokenizer.load(save(tmp_path, raw, config))
    assert tok.encode("hello") == [1, *tok.encode("hello", add_special_tokens=False), 0]
    assert tok.encode_batch(["hello", ""]) == [tok.encode("hello"), [1, 0]]
    assert tok.encode(END, parse_special=False)[0] == 1


def test_special_tokens_of_the_post_processor_are_not_doubled(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True}
    tok = Tokenizer.load(save(tmp_path, byte_fallback_backend(), config))
    ids = tok.encode("hello")
    assert ids == [1, *tok.encode("hello", add_special_tokens=False)]


def test_special_tokens_come_from_both_files_and_tokenizer_config_wins(tmp_path: Path) -> None:
    folder = save(
        tmp_path,
        byte_level_backend(),
        {"eos_token": {"content": END, "lstrip": False}, "pad_token": None},
        special_tokens_map={"eos_token": PAD, "bos_token": {"content": PAD}},
    )
    tok = Tokenizer.load(folder)
    assert tok.special_tokens == {"eos_token": END, "bos_token": PAD}
    assert (tok.eos_token_id, tok.bos_token_id) == (0, 1)


def test_tokens_declared_only_in_the_configuration_are_added(tmp_path: Path) -> None:
    raw = byte_level_backend()
    size = max(raw.get_vocab(True).values()) + 1
    declared = {
        str(size): {"content": "<|turn|>", "special": True},
        str(size + 1): {"content": "<think>", "special": False},
        str(size + 9): {"content": "<|nowhere|>", "special": True},  # not the next id, so it is not added
    }
    config = {"added_tokens_decoder": declared, "eos_token": "<|turn|>", "sep_token": "<tool call>"}
    tok = Tokenizer.load(save(tmp_path, raw, config))
    assert tok.encode("<|turn|><think>") == [size, size + 1]
    assert tok.eos_token_id == size
    assert size in tok.special_ids
    assert size + 1 not in tok.special_ids
    assert tok.token_id("<|nowhere|>") is None
    assert tok.token_id("<tool call>") in tok.special_ids  # named special although added as plain


def test_load_agrees_with_transformers_on_a_real_checkpoint() -> None:
    folder = minilm_folder()
    ours, theirs = Tokenizer.load(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.special_ids == set(theirs.all_special_ids)
    for sentence in SENTENCES:
        ids = theirs(sentence)["input_ids"]
        assert ours.encode(sentence) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("present", [(), ("tokenizer.model",)])
def test_missing_tokenizer_error_says_what_to_do(tmp_path: Path, present: tuple[str, ...]) -> None:
    for name in present:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ModelError, match=r"no tokenizer.json in .*skip_tokenizer_init") as caught:
        Tokenizer.load(tmp_path)
    assert all(name in str(caught.value) for name in present)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("content", ["{", "[1]"])
def test_damaged_file_is_named_in_the_error(tmp_path: Path, name: str, content: str) -> None:
    save(tmp_path, metaspace_backend())
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match=name):
        Tokenizer.load(tmp_path)


def test_chat_templates_are_read_from_all_known_files(tmp_path: Path) -> None:
    def loaded() -> object:
        return Tokenizer.load(tmp_path).chat_template

    save(tmp_path, metaspace_backend())
    assert loaded() is None
    save(tmp_path, metaspace_backend(), {"chat_template": "inline"})
    assert loaded() == "inline"
    named = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    save(tmp_path, metaspace_backend(), {"chat_template": named})
    assert loaded() == {"default": "one", "tool_use": "two"}
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "older file"}))
    assert loaded() == {"default": "older file", "tool_use": "two"}
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("three")
    assert loaded() == {"default": "file", "tool_use": "two", "rag": "three"}


def test_concurrent_encoding_is_consistent() -> None:
    tok = Tokenizer(byte_fallback_backend())
    texts = [f"hello w {END} é🙂 <s> {index}" for index in range(40)]
    expected = [Tokenizer(byte_fallback_backend()).encode(text, parse_special=False) for text in texts]

    def work(_: int) -> list[list[int]]:
        return [tok.encode(text, parse_special=False) for text in texts]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [expected] * 4


FIRST, SECOND = "hello world", "the quick brown fox"


def template(single: str, pair: str) -> Any:
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=[("<s>", 0), ("</s>", 1)])


PROCESSORS = {
    "roberta": processors.RobertaProcessing(("</s>", 1), ("<s>", 0)),
    "types": template("$A </s>", "$A </s> $B:1 </s>:1"),
    "sequence": processors.Sequence([processors.ByteLevel(), template("<s> $A", "<s> $A </s> </s> $B")]),
}


def check_frames(raw: Any) -> None:
    tok = Tokenizer(raw)
    first, second = tok.encode_plain([FIRST, SECOND])
    assert tok.frame.around(first) == raw.encode(FIRST).ids
    assert tok.frame.num_tokens == raw.num_special_tokens_to_add(False)
    encoding = raw.encode(FIRST, SECOND)
    ids, second_segment = tok.pair_frame.around_pair(first, second)
    assert ids == encoding.ids
    assert second_segment == (encoding.type_ids.index(1) if 1 in encoding.type_ids else 0)
    assert tok.pair_frame.num_tokens == raw.num_special_tokens_to_add(True)


@pytest.mark.parametrize("name", BACKENDS)
def test_frames_equal_the_tokenizers_package(name: str) -> None:
    check_frames(backend(name))


@pytest.mark.parametrize("name", PROCESSORS)
def test_frames_equal_those_of_post_processors(name: str) -> None:
    raw = byte_level_backend()
    raw.post_processor = PROCESSORS[name]
    check_frames(raw)


def test_tokenizer_that_reorders_texts_is_rejected() -> None:
    raw = byte_level_backend()
    raw.post_processor = template("$A", "$B $A")
    with pytest.raises(ModelError, match="two texts"):
        _ = Tokenizer(raw).pair_frame


def test_frame_follows_the_flags_if_the_post_processor_adds_none() -> None:
    raw = byte_level_backend()
    tok = Tokenizer(raw, specials={"eos_token": "<|end|>"}, add_eos=True)
    if tok.eos_token_id is None:
        tok = Tokenizer(raw, specials={"eos_token": tokenizer("byte_level").token(0)}, add_eos=True)
    assert tok.frame.around(tok.encode_plain([FIRST])[0]) == tok.encode(FIRST)


@pytest.mark.parametrize("name", BACKENDS)
def test_plain_texts_never_contain_special_tokens(name: str) -> None:
    tok = tokenizer(name)
    spelled = [f"a {special} b" for special in tok.special_spellings]
    unknown = {tok.token_id("<unk>"), tok.token_id("[UNK]")}
    for ids in tok.encode_plain([*spelled, *SENTENCES]):
        assert not set(ids) & (tok.special_ids - unknown)
    assert tok.encode_plain(SENTENCES) == tok.encode_batch(SENTENCES, False)


def test_long_special_token_is_rejected_before_its_pieces_are_kept() -> None:
    raw = byte_level_backend()
    raw.add_special_tokens([tokenizers.AddedToken("a" * 100_000, special=True)])
    with pytest.raises(ModelError, match="special tokens are too long"):
        Tokenizer(raw)
