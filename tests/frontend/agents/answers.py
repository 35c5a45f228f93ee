"""Random answers that a grammar allows, and the messages that a parser reads from them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any

import tokenizers

from inflight.constraints.compiler import GrammarCompiler
from inflight.constraints.matcher import Matcher
from inflight.frontend.agents.answer_grammar import answer_grammar
from inflight.frontend.agents.parser import MessageParser
from inflight.frontend.agents.source import ParsedMessage
from inflight.frontend.input_processor import vocabulary_of
from inflight.frontend.text.detokenizer import IncrementalDetokenizer
from inflight.frontend.text.tokenizer import Tokenizer
from inflight.structured_outputs import StructuredOutputs
from tests.constraints.walking import allowed_ids
from tests.frontend.text.samples import byte_level_backend

END = "<|over|>"
HURRY_AFTER = 80
MAX_TOKENS = 900
# In formats that have no tokens for their tags.
CLOSING_TAGS = (
    *("\n</parameter>", "</parameter>", "</param>", "</steptml:parameter>", "</｜DSML｜parameter>"),
    "</",
)
ENDS = ("/", "end", "close")
CLOSING = tuple("\"'])}>\n")
WORDS = ('{"', '":', '"}', "}}", "]}", " true", "name", "\n", "Paris", *CLOSING_TAGS)


def runs(parser: MessageParser, token_ids: Sequence[int]) -> Iterator[Sequence[int]]:
    """Split token ids so that each of the parser's markers is in a piece of its own: if the pieces are fed one by one
    with their text, it is unambiguous where in the text a marker is a token."""
    for is_marker, group in groupby(token_ids, parser.marker_ids.__contains__):
        ids = list(group)
        yield from ([token_id] for token_id in ids) if is_marker else (ids,)


@dataclass(frozen=True)
class Model:
    """A stand-in for a model: a tokenizer with the markers of a format, as special or ordinary tokens."""

    tokenizer: Tokenizer
    grammars: GrammarCompiler
    markers: frozenset[int]
    tags: frozenset[int]  # parts of calls that are no markers
    end: int

    @classmethod
    @cache
    def with_markers(cls, markers: tuple[str, ...], special: bool, words: tuple[str, ...] = ()) -> Model:
        """Return a model with these markers, and with tokens for the words that its calls begin with."""
        backend = byte_level_backend()
        backend.add_special_tokens([tokenizers.AddedToken(END, special=True)])
        backend.add_tokens([tokenizers.AddedToken(word, special=False) for word in (*WORDS, *words)])
        added = [tokenizers.AddedToken(marker, special=special) for marker in markers]
        (backend.add_special_tokens if special else backend.add_tokens)(added)
        tokenizer = Tokenizer(backend)
        end = tokenizer.token_id(END)
        assert end is not None
        marker_ids, tag_ids = (
            frozenset(i for i in map(tokenizer.token_id, texts) if i is not None)
            for texts in (markers, (*CLOSING_TAGS, *words, "["))
        )
        vocabulary = vocabulary_of(tokenizer, tokenizer.vocab_size, (end,))
        return cls(tokenizer, GrammarCompiler(lambda: vocabulary), marker_ids, tag_ids, end)

    def walk(self, constraint: StructuredOutputs, seed: int) -> list[int]:
        """Sample the ids of an answer, without the end token. After a while, prefer tokens that end it soon."""
        matcher = self.grammars.compile(constraint).matcher()
        generator, ids = random.Random(seed), list[int]()
        while len(ids) < MAX_TOKENS:
            allowed = allowed_ids(matcher, self.tokenizer.vocab_size)
            assert matcher.error is None, matcher.error
            assert allowed, f"nothing may follow {self.text(ids)!r}"
            hurries = len(ids) > HURRY_AFTER
            if self.end in allowed and (hurries or generator.random() < 0.1):
                return ids
            ids.append(self._choose(generator, [i for i in allowed if i != self.end] or allowed, hurries))
            if ids[-1] == self.end:
                return ids[:-1]
            matcher.advance(ids[-1:])
        raise AssertionError(f"no end after {self.text(ids)!r}")

    def _choose(self, generator: random.Random, allowed: list[int], hurries: bool) -> int:
        markers = [i for i in allowed if i in self.markers]
        if hurries and not self.tokenizer.special_ids.isdisjoint(markers):
            ends = [i for i in markers if any(word in self.text([i]).lower() for word in ENDS)]
            return generator.choice(ends or markers)
        for group in (markers, [i for i in allowed if i in self.tags]):
            if group and generator.random() < 0.4:
                return generator.choice(group)
        closing = (
            [i for i in allowed if self.text([i])[:1] in CLOSING or self.text([i]) == "</"] if hurries else []
        )
        return generator.choice(closing or allowed)

    def text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def matcher(self, constraint: StructuredOutputs) -> Matcher:
        return self.grammars.compile(constraint).matcher()

    def read(self, parser: MessageParser, ids: Sequence[int]) -> ParsedMessage:
        detokenizer = IncrementalDetokenizer(self.tokenizer, skip_special_tokens=False)
        message = ParsedMessage()
        for run in runs(parser, ids):
            message.add(parser.feed(detokenizer.push(run), run))
        message.add(parser.feed(detokenizer.flush()))
        message.add(parser.finish())
        return message

    def answer(
        self,
        seed: int,
        tool_format: str | None,
        reasoning: str | None,
        tools: Sequence[Mapping[str, Any]],
        **options: Any,
    ) -> ParsedMessage:
        """Return the message that a parser reads from a random answer."""
        prompt = options.get("prompt", "")
        grammar = answer_grammar(tool_format, reasoning, tools=tools, tokenizer=self.tokenizer, **options)
        assert grammar is not None
        parser = MessageParser(
            *(tool_format, reasoning),
            tools=tools,
            tokenizer=self.tokenizer,
            prompt=prompt,
            shaped_content="content" in options,
        )
        return self.read(parser, self.walk(grammar, seed))
