"""The tokenizer in the metadata of a GGUF file.

The file holds tokens, merges or scores, and the name of a pre-tokenizer; how that one splits a text is known here. A
tokenizer that cannot be rebuilt exactly is rejected by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from inflight.checkpoint.gguf_file import GgufFile
from inflight.errors import ModelError, shown

# The types of tokens.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_SPACE = "▁"  # SentencePiece's
# Characters of a piece that is merged; real ones have at most 32. All ways to split it are tried.
MAX_PIECE = 256
MERGES_PER_PIECE = 16  # ways to merge a piece from two others, on average; real vocabularies have about two

_SPECIAL_KEYS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",  # the format's spelling
    "pad_token": "padding",
    "cls_token": "cls",
    "mask_token": "mask",
}

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased_words(suffix: str) -> str:
    """Words split where a lower-case letter is followed by an upper-case one."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return f"{start}{_UPPER}*{_LOWER}+{suffix}|{start}{_UPPER}+{_LOWER}*{suffix}"


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """How a text is split before merges are applied."""

    # Each splits the parts that the ones before have left; then the text becomes bytes.
    patterns: tuple[str, ...]
    gpt2_words: bool = False  # whether GPT-2's own pattern comes last
    digits: bool = False  # whether each digit is alone
    ignore_merges: bool = False  # whether a word that is a token needs no merges
    adds_bos: bool = False
    nfc: bool = False  # whether the text is normalised first


_LLAMA3 = _PreTokenizer((rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}",), ignore_merges=True, adds_bos=True)
_GPT4 = _PreTokenizer(_LLAMA3.patterns)
_QWEN2 = _PreTokenizer((rf"{_WORDS}|\p{{N}}|{_REST}",), nfc=True)
_GPT2 = _PreTokenizer((), gpt2_words=True)
_STARCODER = _PreTokenizer((), gpt2_words=True, digits=True)
_CJK = "[一-龥぀-ゟ゠-ヿ]+"
_DEEPSEEK3 = _PreTokenizer(
    (
        r"\p{N}{1,3}",
        _CJK,
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
_DEEPSEEK_CODER = _PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"))
_GPT4O = _PreTokenizer((rf"{_cased_words(f'{_CONTRACTIONS}?')}|\p{{N}}{{1,3}}|{_CASED_REST}",))
_TEKKEN = _PreTokenizer((rf"{_cased_words('')}|\p{{N}}|{_CASED_REST}",), ignore_merges=True, adds_bos=True)

_PRE_TOKENIZERS = {
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0"), _LLAMA3
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _GPT4),
    **dict.fromkeys(("glm4", "glm5"), _PreTokenizer(_LLAMA3.patterns, ignore_merges=True)),
    **dict.fromkeys(("qwen2", "megrez"), _QWEN2),
    **dict.fromkeys(
        ("deepseek-r1-qwen", "stablelm2", "hunyuan", "solar-open"), _PreTokenizer(_QWEN2.patterns)
    ),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "jais", "exaone4", "mellum", "trillion"), _GPT2),
    **dict.fromkeys(("starcoder", "refact", "smollm", "command-r", "codeshell", "exaone"), _STARCODER),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK3),
    "deepseek-coder": _DEEPSEEK_CODER,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _GPT4O),
    "tekken": _TEKKEN,
}


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """A tokenizer of the `tokenizers` package, and what else the metadata says about text."""

    backend: Any
    specials: dict[str, str]  # by the names that templates use
    add_bos: bool
    add_eos: bool
    templates: dict[str, str]


def read_gguf_tokenizer(file: GgufFile) -> GgufTokenizer:
    model = file.fields.string("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level_bpe, "llama": _sentencepiece}
    if model not in builders:
        raise ModelError(
            f"{file.path} has a tokenizer of the kind {shown(model)}: it must be one of {', '.join(builders)}; "
            "or set --tokenizer to a folder with a tokenizer.json"
        )
    tokens = file.fields.strings("tokenizer.ggml.tokens")
    types = file.fields.integers("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise ModelError(f"{file.path} has {len(tokens)} tokens and {len(types)} token types")
    vocabulary = _GgufVocabulary(tokens, types)
    backend, adds_bos = builders[model](file, vocabulary)
    # Longer spellings first: the package prefers tokens that were added earlier.
    for token_type, special in ((CONTROL, True), (USER_DEFINED, False)):
        added = sorted(vocabulary.of_type(token_type), key=len, reverse=True)
        backend.add_tokens([AddedToken(text, special=special, normalized=False) for text in added])
    specials = {name: text for name, key in _SPECIAL_KEYS.items() if (text := _special(file, tokens, key))}
    return GgufTokenizer(
        backend,
        specials,
        file.fields.boolean("tokenizer.ggml.add_bos_token", adds_bos),
        file.fields.boolean("tokenizer.ggml.add_eos_token", False),
        _templates(file),
    )


class _GgufVocabulary:
    """Tokens by their text, and their types. Converters fill gaps with [PADn], which stand for nothing."""

    def __init__(self, tokens: list[str], types: list[int]) -> None:
        self.ids = {
            text: index
            for index, (text, token_type) in enumerate(zip(tokens, types, strict=True))
            if text and not (token_type == UNUSED and text.startswith("[PAD"))
        }
        self._types = types

    def of_type(self, token_type: int) -> list[str]:
        return [text for text, index in self.ids.items() if self._types[index] == token_type]


def _byte_level_bpe(file: GgufFile, vocabulary: _GgufVocabulary) -> tuple[Any, bool]:
    """Return the tokenizer, and whether texts begin with BOS by default."""
    name = file.fields.string("tokenizer.ggml.pre", "")
    split = _PRE_TOKENIZERS.get(name)
    if split is None:
        raise ModelError(
            f"tokenizer.ggml.pre in {file.path} is {shown(name)}: it must be one of {', '.join(_PRE_TOKENIZERS)}; "
            "or set --tokenizer to a folder with a tokenizer.json"
        )
    merges = [_pair(file, merge) for merge in file.fields.strings("tokenizer.ggml.merges")]
    ids = vocabulary.ids
    for left, right in merges:
        if left not in ids or right not in ids or left + right not in ids:
            raise ModelError(
                f"{file.path} merges {shown(left)} and {shown(right)}: one of them, or both together, is no token"
            )
    backend = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=split.ignore_merges))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.digits else []
    steps += [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.gpt2_words))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    if split.nfc:
        backend.normalizer = normalizers.NFC()
    return backend, split.adds_bos


def _pair(file: GgufFile, merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right or " " in right:
        raise ModelError(f"tokenizer.ggml.merges in {file.path} has {shown(merge)}: it must be two tokens")
    return left, right


def _sentencepiece(file: GgufFile, vocabulary: _GgufVocabulary) -> tuple[Any, bool]:
    """Return a BPE tokenizer whose merges follow from the scores of the pieces, and that BOS comes first."""
    ids = vocabulary.ids
    scores = file.fields.numbers("tokenizer.ggml.scores", above=-math.inf)
    if len(scores) <= max(ids.values(), default=-1):
        raise ModelError(f"{file.path} has {len(scores)} scores for {max(ids.values()) + 1} tokens")
    pieces = vocabulary.of_type(NORMAL)
    longest = max(map(len, pieces), default=0)
    if longest > MAX_PIECE:
        raise ModelError(
            f"tokenizer.ggml.tokens in {file.path} has a piece of {longest} characters: at most {MAX_PIECE} are allowed"
        )
    merges = list(islice(_merges_by_score(pieces, ids, scores), MERGES_PER_PIECE * len(pieces) + 1))
    if len(merges) > MERGES_PER_PIECE * len(pieces):
        raise ModelError(
            f"tokenizer.ggml.tokens in {file.path} has {len(pieces)} pieces that are two others together in more than "
            f"{len(pieces) * MERGES_PER_PIECE} ways: at most {MERGES_PER_PIECE} for each piece are allowed"
        )
    unknown = next(iter(vocabulary.of_type(UNKNOWN)), None)
    has_bytes = bool(vocabulary.of_type(BYTE))
    backend = Tokenizer(
        models.BPE(vocab=ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes)
    )
    spaces = normalizers.Replace(" ", _SPACE)
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.fields.boolean("tokenizer.ggml.add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = spaces
    backend.decoder = decoders.Sequence(steps)
    return backend, True


def _merges_by_score(
    pieces: list[str], ids: dict[str, int], scores: list[float]
) -> Iterator[tuple[str, str]]:
    """Yield the pairs of tokens that make up a piece, the pieces with the highest scores first."""
    for piece in sorted(pieces, key=lambda piece: (-scores[ids[piece]], ids[piece])):
        pairs = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        known = [(left, right) for left, right in pairs if left in ids and right in ids]
        yield from sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))


def _special(file: GgufFile, tokens: list[str], key: str) -> str | None:
    name = f"tokenizer.ggml.{key}_token_id"
    if name not in file.metadata:
        return None
    index = file.fields.integer(name, least=0)
    if not 0 <= index < len(tokens):
        raise ModelError(f"{name} in {file.path} is {index}: there are {len(tokens)} tokens")
    return tokens[index]


def _templates(file: GgufFile) -> dict[str, str]:
    templates = {}
    if "tokenizer.chat_template" in file.metadata:
        templates["default"] = file.fields.string("tokenizer.chat_template")
    for name in file.fields.strings("tokenizer.chat_templates", []):
        templates[name] = file.fields.string(f"tokenizer.chat_template.{name}")
    return templates
