"""The small tokenizer that other tests write beside their checkpoints."""

from __future__ import annotations

from pathlib import Path

from tests.support.checkpoints import END_OF_TURN, VOCAB_SIZE, write_tokenizer


def test_tokenizer_covers_any_text_within_the_vocabulary(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(write_tokenizer(tmp_path) / "tokenizer.json"))
    text = "Grüße, 世界! \U0001f642\n\ttabs and \x00 bytes"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert max(ids) < VOCAB_SIZE
    assert tokenizer.token_to_id(END_OF_TURN) == 0


def test_transformers_reads_it_with_its_chat_template(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(write_tokenizer(tmp_path))
    messages = [{"role": "user", "content": "hello"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|user|>hello<|end|><|assistant|>"
    assert tokenizer.eos_token == END_OF_TURN
