"""Texts, pairs of texts and token ids, as a model that embeds, classifies or scores reads them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from inflight.errors import ModelError, PromptError
from inflight.frontend.input_processor import context_length_error
from inflight.frontend.text_heads import encode_heads
from inflight.pooling import PairTemplate, PoolingFacts
from inflight.text import TextFrame, Tokenizer, check_text

Pair = tuple[str, str]  # read as one; for a score, a query and a document
TextItem = str | array[int] | Pair  # token ids are taken as they are

CHARACTERS_COUNTED = (
    64  # for each token that fits: a text that is too long and has no more is told its length
)


@dataclass(frozen=True, slots=True)
class TextGroup:
    """Texts of one call that are read alike."""

    items: Sequence[TextItem]
    name: str  # of one of them, in messages
    param: str  # under which they were given
    prompt: str = ""  # text before each
    strip: bool = False  # white space around a text is no part of it, as sentence-transformers has it
    # What is too long is cut, of a pair the second text; `max_tokens` of it are left at most.
    truncate: bool = False
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class EncodedText:
    """What the model reads."""

    ids: array[int]
    second_segment: int = 0  # where it begins; 0: there is none


@dataclass(frozen=True)
class PoolingInputs:
    """From text to token ids, with the special tokens that the tokenizer puts around. What texts spell is text."""

    facts: PoolingFacts
    tokenizer: Tokenizer | None
    vocab_size: int
    max_model_len: int

    def encode(self, group: TextGroup, start: int, stop: int) -> list[EncodedText]:
        """Items [start, stop) of a group. Raises PromptError for the first that the model cannot read, which says
        where it stands in the group."""
        items = group.items[start:stop]
        found: dict[int, EncodedText] = {}
        texts = {start + place: item for place, item in enumerate(items) if isinstance(item, str)}
        pairs = {start + place: item for place, item in enumerate(items) if isinstance(item, tuple)}
        if texts:
            found |= self._encode_texts(group, texts)
        if pairs:
            found |= self._encode_pairs(group, pairs)
        for index, item in enumerate(items, start):
            if isinstance(item, array):
                found[index] = self._as_given(group, index, item)
            self._check_ids(group, index, found[index].ids)
        return [found[index] for index in range(start, start + len(items))]

    # ---- texts ----

    def _encode_texts(self, group: TextGroup, texts: dict[int, str]) -> dict[int, EncodedText]:
        frame = self._tokenizer.frame
        room = self.max_model_len - frame.num_tokens
        readable = [self._readable(group, index, text) for index, text in texts.items()]
        limit = _limit(group, room)
        found = {}
        all_ids = encode_heads(self._tokenizer, readable, [limit] * len(texts))
        for index, text, ids in zip(texts, readable, all_ids, strict=True):
            if len(ids) > room:
                raise self._too_long(group, index, text, room)
            found[index] = EncodedText(array("q", frame.around(ids)))
        return found

    def _readable(self, group: TextGroup, index: int, text: str) -> str:
        """A text as the model was trained to see it, before it is tokenized."""
        try:
            check_text(text)
        except PromptError as error:
            raise PromptError(f"{group.name} {index}: {error}", param=group.param) from None
        text = group.prompt + text
        if group.strip:
            text = text.strip()
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
        found = {}
        all_ids = encode_heads(self._tokenizer, readable, limits)
        for index, text, ids in zip(pairs, readable, all_ids, strict=True):
            first = pairs[index][0]
            if len(ids) > rooms[index]:
                raise self._too_long(
                    group, index, text, rooms[index], f" beside {len(firsts[first])} of the query"
                )
            joined, second_segment = frame.around_pair(firsts[first], ids)
            found[index] = EncodedText(array("q", joined), second_segment)
        return found

    def _encode_firsts(
        self, group: TextGroup, pairs: dict[int, Pair], frame: TextFrame
    ) -> dict[str, list[int]]:
        """The first texts, each but once: all documents of a query have the same. They are never cut."""
        room = self.max_model_len - frame.num_tokens - 1
        places = {first: index for index, (first, _) in reversed(pairs.items())}
        readable = [self._readable(group, index, first) for first, index in places.items()]
        found = encode_heads(self._tokenizer, readable, [room + 1] * len(readable))
        for (first, index), ids in zip(places.items(), found, strict=True):
            if len(ids) > room:
                raise context_length_error(
                    f"the query of {group.name} {index} has {len(first)} characters, and more than {room} tokens: "
                    f"it leaves no room for a document (max_model_len is {self.max_model_len})",
                    param="query",
                )
        return dict(zip(places, found, strict=True))

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
        """A query as the first text of a pair; with a template, all of it that stands before the document."""
        template = self.facts.template
        if template is None:
            return query
        before, _, _ = template.body.partition("{document}")
        given = template.instruction if instruction is None else instruction
        return before.format(instruction=given, query=query).removesuffix(self._before_second)

    @cached_property
    def _before_second(self) -> str:
        """White space that a template has before a document: most tokenizers read it as part of the next word."""
        if self.facts.template is None:
            return ""
        before = self.facts.template.body.partition("{document}")[0]
        return before[len(before.rstrip()) :]

    def _check_split(self, template: PairTemplate) -> None:
        """All documents of a query share what stands before them: that must be tokenized as it is on its own."""
        first, rest = self.first_of("a", None), self._before_second + "b"
        whole, *parts = self._tokenizer.encode_plain([first + rest, first, rest])
        if whole != [*parts[0], *parts[1]] or not template.body.endswith("{document}"):
            raise ModelError(
                "this tokenizer does not read the template's document apart from what is before it"
            )

    # ---- token ids ----

    def _as_given(self, group: TextGroup, index: int, ids: array[int]) -> EncodedText:
        limit = _limit(group, self.max_model_len)
        if len(ids) > self.max_model_len and not group.truncate:
            raise context_length_error(
                f"{group.name} {index} has {len(ids)} tokens: at most {self.max_model_len} are allowed "
                "(max_model_len); ask to truncate it, or shorten it",
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
        if len(text) > CHARACTERS_COUNTED * room:  # not worth tokenizing it for a figure
            size = f"{len(text)} characters and more than {room} tokens"
        else:
            size = f"{len(self._tokenizer.encode_plain([text])[0])} tokens"
        return context_length_error(
            f"{group.name} {index} has {size}: at most {room} are allowed{beside} "
            f"(max_model_len is {self.max_model_len}); ask to truncate it, or shorten it",
            param=group.param,
        )

    @property
    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise PromptError("texts need a tokenizer, and this engine runs without one: give token ids")
        return self.tokenizer


def _limit(group: TextGroup, room: int) -> int:
    """Tokens of a text that are looked at: all that are kept and, where nothing may be cut, one more."""
    if not group.truncate:
        return room + 1
    return room if group.max_tokens is None else min(room, group.max_tokens)
