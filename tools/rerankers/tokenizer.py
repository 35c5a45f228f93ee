"""The WordPiece tokenizer of both models: lower case, any word splits into pieces it knows."""

import string
from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

PAD, UNK, CLS, SEP, MASK = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
VOCAB_SIZE = 4096
# Every letter and digit at the start of a word and inside it, so that no ASCII word is unknown.
_ALPHABET = string.ascii_lowercase + string.digits


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """A tokenizer whose first ids are BERT's special tokens, with BERT's pairs: [CLS] query [SEP] text [SEP]."""
    tokenizer = Tokenizer(models.WordPiece(unk_token=UNK, max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True, strip_accents=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=[*_ALPHABET, *string.punctuation],
        show_progress=False,
    )
    inside = [f"{first}{_ALPHABET}" for first in _ALPHABET]
    tokenizer.train_from_iterator([*inside, *texts], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{CLS} $A {SEP}",
        pair=f"{CLS} $A {SEP} $B:1 {SEP}:1",
        special_tokens=[(CLS, SPECIAL.index(CLS)), (SEP, SPECIAL.index(SEP))],
    )
    return tokenizer
