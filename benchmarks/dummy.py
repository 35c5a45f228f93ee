"""A checkpoint without weights: a config, and a tokenizer that gives every id its own text.

Random weights produce any id of the vocabulary. With a text for each, an answer is streamed token by token, as that of
a real model is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inflight.frontend.text.detokenizer import BYTE_OF

LETTERS = "etaoinshrdlucmfwypvbgkjqxz"


def write_checkpoint(folder: Path, config: dict[str, Any], pieces: Sequence[bytes] | None = None) -> Path:
    """For `--load-format dummy`. The tokens are words, or what is given."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pieces is None:
        words = [f"Ġ{spelling(number)}" for number in range(config["vocab_size"])]
    else:
        characters = {byte: character for character, byte in BYTE_OF.items()}
        words = ["".join(map(characters.__getitem__, piece)) for piece in pieces]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": words[0]},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def spelling(number: int) -> str:
    """A word for a number, another for each."""
    text = LETTERS[number % 26]
    while number := number // 26:
        number -= 1
        text = LETTERS[number % 26] + text
    return text
