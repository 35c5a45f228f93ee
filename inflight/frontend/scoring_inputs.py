"""Texts, pairs of texts and token ids as a model that embeds, classifies or scores reads them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np

from inflight.errors import ModelError, PromptError
from inflight.frontend.input_processor import context_length_error
from inflight.frontend.text.tokenizer import TextFrame, Tokenizer, check_text
from inflight.scoring import PairTemplate, PoolingFacts

Pair = tuple[str, str]  # read as one text; when scoring, a query and a document
TextItem: TypeAlias = "str | array[int] | Pair"  # token ids are used unchanged

CHARACTERS_COUNTED = 64  # per token that fits: longer texts are rejected without counting their tokens
# Of the first prefix that is tried. Most texts have fewer, so that one try is enough.
CHARACTERS_PER_TOKEN = 6
# The last tokens of a prefix may differ from those of the whole text, so this many are dropped. Words are tokenized
# independently: a cut between words changes next to nothing. Inside a word it can change more: WordPiece does not read
# words of over 100 letters at all.
SPARE_AFTER_WORD, SPARE_INSIDE_WORD = 8, 128


@dataclass(frozen=True, slots=True)
class TextGroup:
    """Texts of one call that are read the same way."""

    items: Sequence[TextItem]
    name: str  # of one text, in messages
    param: str  # the parameter they came from
    prompt: str = ""  # put before each text
    # Cut texts that are too long (the second text of a pair) instead of rejecting them.
    truncate: bool = False
    max_tokens: int | None = None  # left of a text that is cut


@dataclass(frozen=True, slots=True)
class EncodedText:
    """The token ids of one text or pair."""

    ids: array[int]
    second_segment: int = 0  # start of the second text; 0: there is none


@dataclass(frozen=True)
class ScoringInputs:
    """Encodes texts with the tokenizer's special tokens around them. Special tokens spelled in a text are text."""

    facts: PoolingFacts
    tokenizer: Tokenizer | None
    vocab_size: int
    max_model_len: int

    def encode(self, group: TextGroup, start: int, stop: int) -> list[EncodedText]:
        """Encode items [start, stop) of a group. Raises PromptError, with the item's index, if one cannot be read."""
        items = group.items[start:stop]
        encoded: dict[int, EncodedText] = {}
        texts = {index: item for index, item in enumerate(items, start) if isinstance(item, str)}
        pairs = {index: item for index, item in enumerate(items, start) if isinstance(item, tuple)}
        if texts:
            encoded |= self._encode_texts(group, texts)
        if pairs:
            encoded |= self._encode_pairs(group, pairs)
        for index, item in enumerate(items, start):
            if isinstance(item, array):
                encoded[index] = self._cut_ids(group, index, item)
            self._check_ids(group, index, encoded[index].ids)
        return [encoded[index] for index in range(start, start + len(items))]

    # ---- texts ----

    def _encode_texts(self, group: TextGroup, texts: dict[int, str]) -> dict[int, EncodedText]:
        frame = self._tokenizer.frame
        room = self.max_model_len - frame.num_tokens
        readable = [self._readable(group, index, text) for index, text in texts.items()]
        limit = _limit(group, room)
        encoded = {}
        all_ids = encode_prefixes(self._tokenizer, readable, [limit] * len(texts))
        for index, text, ids in zip(texts, readable, all_ids, strict=True):
            if len(ids) > room:
                raise self._too_long(group, index, text, room)
            encoded[index] = EncodedText(array("q", frame.around(ids)))
        return encoded

    def _readable(self, group: TextGroup, index: int, text: str) -> str:
        """Return a text as the model was trained to see it, before it is tokenized."""
        try:
            check_text(text)
        except PromptError as error:
            raise PromptError(f"{group.name} {index}: {error}", param=group.param) from None
        text = group.prompt + text
        return text.lower() if self.facts.lowercase else text

    # ---- pairs ----

    def _encode_pairs(self, group: TextGroup, pairs: dict[int, Pair]) -> dict[int, EncodedText]:
        frame = self._pair_frame
        firsts = self._encode_firsts(group, pairs, frame)
        rooms = {
            index: self.max_model_len - frame.num_tokens - len(firsts[first])
            for index, (first, _) in pairs.items()
        }
        readable = [self._before_second + self._readable(group, index, pairs[index][1]) for index in pairs]
        limits = [_limit(group, rooms[index]) for index in pairs]
        encoded = {}
        all_ids = encode_prefixes(self._tokenizer, readable, limits)
        for index, text, ids in zip(pairs, readable, all_ids, strict=True):
            first = pairs[index][0]
            if len(ids) > rooms[index]:
                raise self._too_long(
                    group, index, text, rooms[index], f" beside {len(firsts[first])} of the query"
                )
            joined, second_segment = frame.around_pair(firsts[first], ids)
            encoded[index] = EncodedText(array("q", joined), second_segment)
        return encoded

    def _encode_firsts(
        self, group: TextGroup, pairs: dict[int, Pair], frame: TextFrame
    ) -> dict[str, list[int]]:
        """Encode each first text once: all documents of a query share it. First texts are never cut."""
        room = self.max_model_len - frame.num_tokens - 1
        indices = {first: index for index, (first, _) in reversed(pairs.items())}
        readable = [self._readable(group, index, first) for first, index in indices.items()]
        all_ids = encode_prefixes(self._tokenizer, readable, [room + 1] * len(readable))
        for (first, index), ids in zip(indices.items(), all_ids, strict=True):
            if len(ids) > room:
                raise context_length_error(
                    f"the query of {group.name} {index} has {len(first)} characters, and more than {room} tokens: "
                    f"it leaves no room for a document (max_model_len is {self.max_model_len})",
                    param="query",
                )
        return dict(zip(indices, all_ids, strict=True))

    @cached_property
    def _pair_frame(self) -> TextFrame:
        template = self.facts.template
        if template is None:
            return self._tokenizer.pair_frame
        tokenizer = self._tokenizer
        prefix = tokenizer.encode(template.prefix, add_special_tokens=False)
        suffix = tokenizer.encode(template.suffix, add_special_tokens=False)
        self._check_split(template)
        return TextFrame(tuple(prefix), tuple(suffix))

    def first_of(self, query: str, instruction: str | None) -> str:
        """Return the first text of a pair: the query or, with a template, everything before the document."""
        template = self.facts.template
        if template is None:
            return query
        before, _, _ = template.body.partition("{document}")
        instruction = template.instruction if instruction is None else instruction
        return before.format(instruction=instruction, query=query).removesuffix(self._before_second)

    @cached_property
    def _before_second(self) -> str:
        """The template's white space before a document: most tokenizers read it as part of the next word."""
        if self.facts.template is None:
            return ""
        before = self.facts.template.body.partition("{document}")[0]
        return before[len(before.rstrip()) :]

    def _check_split(self, template: PairTemplate) -> None:
        """Check that the text before a document has the same tokens on its own: all documents of a query share it."""
        first, rest = self.first_of("a", None), self._before_second + "b"
        whole, *parts = self._tokenizer.encode_plain([first + rest, first, rest])
        if whole != [*parts[0], *parts[1]] or not template.body.endswith("{document}"):
            raise ModelError(
                "this tokenizer cannot split the model's template before the document: the tokens would change"
            )

    # ---- token ids ----

    def _cut_ids(self, group: TextGroup, index: int, ids: array[int]) -> EncodedText:
        limit = _limit(group, self.max_model_len)
        if len(ids) > self.max_model_len and not group.truncate:
            raise context_length_error(
                f"{group.name} {index} has {len(ids)} tokens: at most {self.max_model_len} are allowed "
                "(max_model_len); set truncate, or shorten it",
                param=group.param,
            )
        return EncodedText(ids[:limit])

    def _check_ids(self, group: TextGroup, index: int, ids: array[int]) -> None:
        if not ids:
            raise PromptError(f"{group.name} {index} is empty: it must have a token", param=group.param)
        numbers = np.frombuffer(ids, dtype=np.int64)
        if numbers.min() < 0 or numbers.max() >= self.vocab_size:
            wrong = next(i for i in ids if not 0 <= i < self.vocab_size)
            raise PromptError(
                f"{group.name} {index} has the token id {wrong}: ids must be from 0 to {self.vocab_size - 1}",
                param=group.param,
            )

    def _too_long(self, group: TextGroup, index: int, text: str, room: int, beside: str = "") -> PromptError:
        if len(text) > CHARACTERS_COUNTED * room:  # not worth tokenizing just for the message
            size = f"{len(text)} characters and more than {room} tokens"
        else:
            size = f"{len(self._tokenizer.encode_plain([text])[0])} tokens"
        return context_length_error(
            f"{group.name} {index} has {size}: at most {room} are allowed{beside} "
            f"(max_model_len is {self.max_model_len}); set truncate, or shorten it",
            param=group.param,
        )

    @property
    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise PromptError("texts need a tokenizer, and this engine has none: give token ids")
        return self.tokenizer


def _limit(group: TextGroup, room: int) -> int:
    """Return how many tokens of a text to encode: the kept ones, plus one to detect texts that are too long."""
    if not group.truncate:
        return room + 1
    return room if group.max_tokens is None else min(room, group.max_tokens)


# ---- prefixes of long texts ----


def encode_prefixes(tokenizer: Tokenizer, texts: Sequence[str], limits: Sequence[int]) -> list[list[int]]:
    """Return the first tokens of each text, up to its limit, without tokenizing all of a long text.

    The result is the same as if all tokens were computed and then cut.
    """
    prefix_ids: list[list[int]] = [[]] * len(texts)
    sizes = [(limit + SPARE_AFTER_WORD) * CHARACTERS_PER_TOKEN for limit in limits]
    remaining = list(range(len(texts)))
    while remaining:
        prefixes = [_prefix(texts[index], sizes[index]) for index in remaining]
        all_ids = tokenizer.encode_plain([prefix for prefix, _ in prefixes])
        too_short = []
        for index, (prefix, spare), ids in zip(remaining, prefixes, all_ids, strict=True):
            if len(prefix) == len(texts[index]) or len(ids) >= limits[index] + spare:
                prefix_ids[index] = ids[: limits[index]]
            else:
                sizes[index] *= 2
                too_short.append(index)
        remaining = too_short
    return prefix_ids


def _prefix(text: str, size: int) -> tuple[str, int]:
    """Return about `size` characters, up to the end of a word if possible, and how many of its last tokens to drop."""
    if len(text) <= size:
        return text, 0
    for end in range(size, size * 3 // 4, -1):
        if text[end].isspace() and not text[end - 1].isspace():
            return text[:end], SPARE_AFTER_WORD
    return text[:size], SPARE_INSIDE_WORD
