"""Stop strings, at which a text is cut, and the token sequences of bad words, which are never generated."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from inflight.errors import ParameterError
from inflight.frontend.text.tokenizer import Tokenizer

_ROOT = 0
_CODE_POINTS = 0x110000


class _Automaton:
    """An Aho-Corasick automaton that searches for all stop strings at once.

    Its state is the longest suffix of the text that is a prefix of some stop string. That suffix is exactly the text
    that must be held back, and keeping it is how a stop string that spans several tokens is found. Time is linear in
    the text, however many and long the stop strings are. One flat dict of edges is far smaller than one dict per state.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.edges: dict[int, int] = {}  # state * _CODE_POINTS + character -> state
        self.depth = [0]  # characters from the root
        self.fallback = [_ROOT]  # the state of the longest proper suffix
        self.match: list[str | None] = [None]  # the longest stop that ends in this state
        # Breadth first: a fallback is shorter than its state, so it is complete before it is needed.
        growing = [(stop, _ROOT) for stop in stops]
        level = 0
        while growing:
            growing = [(stop, self._grow(state, stop, level)) for stop, state in growing]
            level += 1
            growing = [(stop, state) for stop, state in growing if len(stop) > level]

    def _grow(self, parent: int, stop: str, level: int) -> int:
        """Return the state one character further along a stop string, creating it if needed."""
        character = ord(stop[level])
        key = parent * _CODE_POINTS + character
        state = self.edges.get(key)
        if state is None:
            fallback = _ROOT if parent == _ROOT else self.step(self.fallback[parent], character)
            state = self.edges[key] = len(self.depth)
            self.depth.append(level + 1)
            self.fallback.append(fallback)
            self.match.append(self.match[fallback])
        if len(stop) == level + 1:
            self.match[state] = stop
        return state

    def step(self, state: int, character: int) -> int:
        while True:
            following = self.edges.get(state * _CODE_POINTS + character)
            if following is not None:
                return following
            if state == _ROOT:
                return _ROOT
            state = self.fallback[state]


_automaton = lru_cache(maxsize=8)(_Automaton)  # shared by the outputs of one request


class StopStrings:
    """Cuts a text at the stop string that is completed first; if several end there, at the longest."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._automaton = _automaton(tuple(stops))
        self._include = include
        self._state = _ROOT
        self._pending = ""  # as long as the depth of the state
        self.matched: str | None = None  # the stop string at which the text ended

    def push(self, text: str) -> str:
        """Return the text that is safe to send, which is all but a possible start of a stop string."""
        if self.matched is not None:
            return ""
        automaton, state = self._automaton, self._state
        if not automaton.edges:  # there are no stops
            return text
        for index, character in enumerate(text):
            state = automaton.step(state, ord(character))
            stop = automaton.match[state]
            if stop is not None:
                return self._end(self._pending + text[: index + 1], stop)
        self._state = state
        text = self._pending + text
        safe = len(text) - automaton.depth[state]
        self._pending = text[safe:]
        return text[:safe]

    def flush(self) -> str:
        """Return the text that was held back, at the natural end of the output."""
        pending, self._pending, self._state = self._pending, "", _ROOT
        return pending

    def _end(self, text: str, stop: str) -> str:
        self.matched = stop
        self._pending = ""
        return text if self._include else text[: len(text) - len(stop)]


def bad_word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences whose last token is banned if the tokens before it were just generated.

    Every word is banned both at the start of a text and after a space, as these are different tokens.
    """
    stripped = [word.lstrip() or word for word in words]
    spellings = [*stripped, *(f" {word}" for word in stripped)]
    encoded = tokenizer.encode_batch(spellings, add_special_tokens=False)
    for word, ids in zip(words, encoded, strict=False):  # only the spellings without a space
        if not ids:
            raise ParameterError(
                f"bad_words contains {word!r}: this tokenizer has no tokens for it", param="bad_words"
            )
    sequences = dict.fromkeys((tuple(ids) for ids in encoded if ids), False)  # whether each is redundant
    # A sequence that ends in another banned sequence is redundant: the shorter one always applies first. The endings
    # are a tree of tokens from the last one on, with None where a sequence begins.
    endings: dict[int | None, Any] = {}
    for sequence in sorted(sequences, key=len):
        node = endings
        for token_id in reversed(sequence):
            node = node.setdefault(token_id, {})
            if None in node:
                sequences[sequence] = True
                break
        node[None] = {}
    return tuple(sequence for sequence, is_redundant in sequences.items() if not is_redundant)
