"""The byte-level BPE of the built-in model, trained on the generated corpus."""

import json
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.builtin.chat_format import MARKUP, SPECIAL_TOKENS

VOCAB_SIZE = 3072
# Words and punctuation with the space before them, digits one by one and without it.
_PIECES = r"'(?:s|t|re|ve|m|ll|d)\b| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_PIECES_WITHOUT_SPACE = r"'(?:s|t|re|ve|m|ll|d)\b|\p{L}+|\p{N}|[^\s\p{L}\p{N}]+|\s+"
_SPACE = "Ġ"  # as the byte-level alphabet writes it
_WITH_SPACE = 0.4  # of the tokens beyond bytes and markup


def _splitting(pieces: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pieces), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """A tokenizer whose first ids are the special tokens and whose last are the markup. Any text survives a round trip.

    A word is cut in the same way with and without a space before it: the merges with a space come after all others,
    and only add the space to the first piece. So `"Paris"` in JSON has the tokens of ` Paris` in the question but for
    the space, which makes it easy to copy.
    """
    texts = list(_without_markup(texts))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = vocab_size - len(SPECIAL_TOKENS) - len(alphabet) - len(MARKUP)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _splitting(_PIECES_WITHOUT_SPACE)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(MARKUP) - int(_WITH_SPACE * merged),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocab, merges = model["vocab"], [tuple(merge) for merge in model["merges"]]
    tokenizer.pre_tokenizer = _splitting(_PIECES)
    for token in _after_a_space(tokenizer, texts, vocab_size - len(MARKUP) - len(vocab)):
        merges.append((_SPACE, token))
        vocab[_SPACE + token] = len(vocab)
    finished = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    finished.pre_tokenizer = tokenizer.pre_tokenizer
    finished.decoder = decoders.ByteLevel()
    finished.add_special_tokens(list(SPECIAL_TOKENS))
    finished.add_tokens([AddedToken(text, normalized=False) for text in MARKUP])
    return finished


def _after_a_space(tokenizer: Tokenizer, texts: list[str], count: int) -> list[str]:
    """The tokens that follow a space most often, as the first of their word; of equal ones the first in order."""
    space = token_id(tokenizer, _SPACE)
    counted: Counter[int] = Counter()
    for encoding in tokenizer.encode_batch_fast(texts):
        counted.update(second for first, second in pairwise(encoding.ids) if first == space)
    tokens = {one: token for token, one in tokenizer.get_vocab().items()}
    found = {tokens[one]: number for one, number in counted.items()}
    found = {token: number for token, number in found.items() if token[0] != _SPACE and not token.isdigit()}
    return sorted(found, key=lambda token: (-found[token], token))[:count]


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that must exist."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer has no token {token!r}; was it trained by tools.builtin.tokenizer?")
    return int(found)


def _without_markup(texts: Iterable[str]) -> Iterable[str]:
    """The trainer would otherwise merge the letters of the special tokens, which never occur as letters."""
    for text in texts:
        for token in (*SPECIAL_TOKENS, *MARKUP):
            text = text.replace(token, "\n")
        yield text
