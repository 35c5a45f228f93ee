"""Tokenizers in GGUF files, compared with the ones that the files were made from."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from inflight.checkpoint.builtin import checkpoint_folder
from inflight.errors import ModelError
from inflight.frontend.text.gguf_tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from inflight.frontend.text.tokenizer import Tokenizer as OurTokenizer
from tests.support.gguf_checkpoints import _add, write

TEXTS = (
    "Hello, world! It's 12345 o'clock; we'll SEE (or not).",
    "def add(a, b):\n    return a + b\n\n\n# done\t\n",
    "naïve café, Ελληνικά, 你好，世界, привет, 한국어 텍스트, émigré",
    "a  b   c    d \n e\r\n f",
    "don't DON'T x's 3.14 1,000,000 http://example.com/path?q=1",
    "🙂👍🏽 mixed 日本語テキスト and CamelCaseWords",
    "",
    " leading and trailing ",
)


def write_metadata(path: Path, metadata: dict[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        _add(writer, f"tokenizer.{key}", value)
    write(writer)
    return path


def bpe_metadata(tokenizer: Any, pre: str, size: int = 0) -> dict[str, Any]:
    state = json.loads(tokenizer.to_str())
    ids = state["model"]["vocab"] | {token["content"]: token["id"] for token in state["added_tokens"]}
    size = max(size, max(ids.values()) + 1)
    tokens, types = [f"[PAD{index}]" for index in range(size)], [UNUSED] * size
    special = {token["content"]: token["special"] for token in state["added_tokens"]}
    for text, index in ids.items():
        tokens[index] = text
        types[index] = NORMAL if text not in special else CONTROL if special[text] else USER_DEFINED
    return {
        "ggml.model": "gpt2",
        "ggml.pre": pre,
        "ggml.tokens": tokens,
        "ggml.token_type": types,
        "ggml.merges": [" ".join(pair) for pair in state["model"]["merges"]],
    }


# As the tokenizer.json of a model with that pre-tokenizer has it.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = GPT4O.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace(r"\p{N}{1,3}", r"\p{N}")


def reference(pre: str) -> Any:
    """A small tokenizer with the built-in model's tokens and this pre-tokenizer, as tokenizer.json would have it."""
    base = Tokenizer.from_file(str(checkpoint_folder() / "tokenizer.json"))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre in ("gpt-2", "starcoder"))
    patterns = {"llama-bpe": LLAMA3, "qwen2": QWEN2, "gpt-4o": GPT4O, "tekken": TEKKEN}
    steps: list[Any] = [byte_level]
    if pre in patterns:
        steps = [pre_tokenizers.Split(Regex(patterns[pre]), "isolated"), byte_level]
    if pre == "starcoder":
        steps = [pre_tokenizers.Digits(individual_digits=True), byte_level]
    if pre == "qwen2":
        base.normalizer = normalizers.NFC()
    base.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return base


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "gpt-2", "starcoder", "gpt-4o", "tekken"])
def test_byte_level_tokenizer_gives_the_same_tokens(tmp_path: Path, pre: str) -> None:
    expected = reference(pre)
    tokenizer = OurTokenizer.load(write_metadata(tmp_path / "t.gguf", bpe_metadata(expected, pre, 4000)))
    for text in (*TEXTS, "<|im_start|>user\n<think>Cafe\u0301</think><|im_end|>"):
        ids = expected.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.decode(ids) == expected.decode(ids)
    assert tokenizer.folder == tmp_path / "t.gguf"
    assert not tokenizer.knows(3999), "[PAD3999] is no token"
    assert {tokenizer.token(index) for index in tokenizer.special_ids} == {
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
    }


def sentencepiece(space_prefix: bool) -> tuple[Any, dict[str, Any]]:
    """A tokenizer as transformers converts SentencePiece's, and its metadata."""
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(
        TEXTS[:2] * 3,
        trainers.BpeTrainer(vocab_size=400, show_progress=False, special_tokens=["<unk>", *bytes_]),
    )
    state = json.loads(trained.to_str())["model"]
    pieces = sorted(state["vocab"], key=state["vocab"].__getitem__)
    control = ["<s>", "</s>"]
    tokens = ["<unk>", *control, *(piece for piece in pieces if piece != "<unk>"), "<|user|>"]
    types = [
        UNKNOWN if token == "<unk>"
        else CONTROL if token in control
        else USER_DEFINED if token == "<|user|>"
        else BYTE if token in bytes_
        else NORMAL
        for token in tokens
    ]  # fmt: skip
    ids = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=[tuple(pair) for pair in state["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if space_prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if space_prefix else [])])
    backend.add_special_tokens(control)
    backend.add_tokens([AddedToken("<|user|>", normalized=False)])
    scores = [0.0 if kind != NORMAL else -float(index) for index, kind in enumerate(types)]
    metadata = {
        "ggml.model": "llama",
        "ggml.pre": "default",
        "ggml.tokens": tokens,
        "ggml.token_type": types,
        "ggml.scores": scores,
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.unknown_token_id": 0,
        "ggml.add_space_prefix": space_prefix,
    }
    return backend, metadata


@pytest.mark.parametrize("space_prefix", [True, False])
def test_sentencepiece_tokenizer_gives_the_same_tokens(tmp_path: Path, space_prefix: bool) -> None:
    expected, metadata = sentencepiece(space_prefix)
    tokenizer = OurTokenizer.load(write_metadata(tmp_path / "t.gguf", metadata))
    for text in (*TEXTS, "<s>a<|user|> b</s>"):
        ids = expected.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.decode(ids) == expected.decode(ids)
    assert tokenizer.encode("a")[0] == 1, "texts begin with BOS"
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def test_flags_and_templates_are_read(tmp_path: Path) -> None:
    metadata = bpe_metadata(reference("qwen2"), "qwen2") | {
        "ggml.bos_token_id": 0,
        "ggml.eos_token_id": 2,
        "ggml.add_bos_token": True,
        "ggml.add_eos_token": True,
        "chat_template": "plain",
        "chat_templates": ["tool_use"],
        "chat_template.tool_use": "tools",
    }
    path = write_metadata(tmp_path / "t.gguf", metadata)
    tokenizer = OurTokenizer.load(path)
    ids = tokenizer.encode("a")
    assert (ids[0], ids[-1]) == (0, 2)
    assert tokenizer.chat_template == {"default": "plain", "tool_use": "tools"}
    assert OurTokenizer.load(path, "{{ own }}").chat_template == "{{ own }}"
    without = {key: value for key, value in metadata.items() if "template" not in key}
    assert OurTokenizer.load(write_metadata(tmp_path / "u.gguf", without)).chat_template is None


def change(key: str, value: Any) -> dict[str, Any]:
    return bpe_metadata(reference("qwen2"), "qwen2") | {key: value}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("ggml.model", "bert", "tokenizer of the kind 'bert': it must be one of gpt2, llama"),
        ("ggml.pre", "new-one", r"tokenizer\.ggml\.pre in .* is 'new-one': it must be one of llama-bpe"),
        ("ggml.merges", ["a b c"], "has 'a b c': it must be two tokens"),
        ("ggml.merges", ["a 你"], "merges 'a' and '你'"),
        ("ggml.token_type", [1, 1], "3072 tokens and 2 token types"),
        ("ggml.tokens", 7, "is 7: it must be a list of strings"),
        ("ggml.eos_token_id", 99_999, "is 99999: there are 3072 tokens"),
        ("ggml.add_bos_token", "yes", "is 'yes': it must be true or false"),
        ("chat_template", 5, "is 5: it must be a string"),
    ],
)
def test_metadata_that_makes_no_tokenizer_is_rejected(
    tmp_path: Path, key: str, value: Any, message: str
) -> None:
    path = write_metadata(tmp_path / "t.gguf", change(key, value))
    with pytest.raises(ModelError, match=message):
        OurTokenizer.load(path)


def test_too_few_scores_are_rejected(tmp_path: Path) -> None:
    _, metadata = sentencepiece(True)
    path = write_metadata(tmp_path / "t.gguf", metadata | {"ggml.scores": [0.0, 1.0]})
    with pytest.raises(ModelError, match="has 2 scores for"):
        OurTokenizer.load(path)


def test_long_piece_is_rejected_before_it_is_split(tmp_path: Path) -> None:
    """All ways to split a piece are tried: those of one with N characters have N^2 characters."""
    _, metadata = sentencepiece(True)
    size = len(metadata["ggml.tokens"])

    def with_piece(piece: str) -> Path:
        more = {"ggml.tokens": piece, "ggml.scores": 0.0, "ggml.token_type": NORMAL}
        longer = {key: [*metadata[key], value] for key, value in more.items()}
        return write_metadata(tmp_path / f"{len(piece)}.gguf", metadata | longer)

    path = with_piece("a" * 60_000)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=r"has a piece of 60000 characters: at most 256 are allowed$"):
            OurTokenizer.load(path)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000, "one piece of a file of 100 KB took gigabytes"
    finally:
        tracemalloc.stop()
    assert OurTokenizer.load(with_piece("a" * 256)).token(size) == "a" * 256


def test_pieces_with_many_merges_are_rejected_before_all_are_listed(tmp_path: Path) -> None:
    """All parts of one text make up each other: those of N characters, N^3 / 6 times."""
    _, metadata = sentencepiece(True)
    text = "".join(chr(0x4E00 + index) for index in range(120))
    parts = [text[first:end] for first in range(120) for end in range(first + 1, 121)]
    more = {"ggml.tokens": parts, "ggml.scores": [0.0] * len(parts), "ggml.token_type": [NORMAL] * len(parts)}
    path = write_metadata(tmp_path / "t.gguf", metadata | {key: metadata[key] + more[key] for key in more})
    with pytest.raises(ModelError, match=r"at most 16 for each piece are allowed$"):
        OurTokenizer.load(path)
