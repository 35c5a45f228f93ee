"""The byte-level BPE of the built-in model, trained on the generated corpus."""

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.builtin.examples import SPECIAL_TOKENS

VOCAB_SIZE = 2048
# Words with their space before them, digits one by one (so that sums can be learned), the rest in runs.
_PIECES = r"'(?:s|t|re|ve|m|ll|d)\b| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """A tokenizer whose first ids are the special tokens. Any text survives a round trip."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_without_markup(texts), trainer)
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that must exist."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer has no token {token!r}; was it trained by tools.builtin.tokenizer?")
    return int(found)


def _without_markup(texts: Iterable[str]) -> Iterable[str]:
    """The trainer would otherwise merge the letters of the special tokens, which never occur as letters."""
    for text in texts:
        for token in SPECIAL_TOKENS:
            text = text.replace(token, "\n")
        yield text
