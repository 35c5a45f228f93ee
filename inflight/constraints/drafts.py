"""Drafts that a grammar suggests: text that it forces, and what followed before in answers of the same grammar."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from inflight.constraints.compiler import GrammarCompiler
from inflight.constraints.matcher import MAX_TOKENS_PER_MASK
from inflight.errors import RequestError
from inflight.request import Request
from inflight.scheduling.drafts import NO_GUESS, Guess, record_of

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_CONSUMED = 256  # tokens of a request that are consumed at once, so that others hardly wait
MAX_GRAMMARS = 64  # whose habits are kept
MAX_SITUATIONS = 2_000  # of one grammar
MAX_CHOICES = 4  # tokens that are tried in a situation
END_WEIGHT = 0.5  # of a spelling that ends with the forced text: the model may prefer a token that goes on
MIN_REACHED = 0.2  # how likely all tokens of a draft must be right

SPECIAL = b"\xff"  # begins a special token, as \xff[17]
Situation = bytes | int  # the text that must follow; if none must, the last token


class Habits:
    """Which tokens followed in each situation, in answers of one grammar."""

    def __init__(self) -> None:
        self._counts: OrderedDict[Situation, dict[int, float]] = OrderedDict()

    def add(self, situation: Situation, token_id: int) -> None:
        counts = self._counts.get(situation)
        if counts is None:
            self._counts[situation] = {token_id: 1.0}
            if len(self._counts) > MAX_SITUATIONS:
                self._counts.popitem(last=False)
            return
        counts[token_id] = counts.get(token_id, 0.0) + 1
        self._counts.move_to_end(situation)

    def clear(self) -> None:
        self._counts.clear()

    def guess(
        self, situation: Situation, state: LLMatcher, spelling: int, weight: float
    ) -> tuple[int, float]:
        """Return the likeliest token and its probability among those that the grammar allows, or zero.

        `spelling`: the tokenizer's own, which counts like `weight` observations; -1: there is none.
        """
        counts = self._counts.get(situation)
        if counts is None:
            return spelling, weight
        total = sum(counts.values()) + 1  # something else may follow, too
        if spelling >= 0 and spelling not in counts:
            counts = {**counts, spelling: weight}
        elif spelling >= 0:
            total -= 1
        for token_id in heapq.nlargest(MAX_CHOICES, counts, counts.__getitem__):
            if counts[token_id] < MIN_REACHED * total:
                break
            if state.validate_tokens([token_id]) == 1:
                return token_id, counts[token_id] / total
            total -= counts[token_id]
        return -1, 0.0


class _DraftedAnswer:
    """The answer of a request in its grammar, as far as its tokens were consumed."""

    def __init__(self, habits: Habits, request: Request) -> None:
        self.state: LLMatcher | None = None  # until the grammar is compiled
        self.habits = habits
        self._num_consumed = request.num_prompt_tokens

    def catch_up(self, tokens: list[int]) -> LLMatcher | None:
        """Consume known tokens. Return the state in which more can follow, or None if nothing can yet or any more."""
        state, first = self.state, self._num_consumed
        if state is None:
            return None
        for place in range(first, min(len(tokens), first + MAX_CONSUMED)):
            if state.is_stopped():
                return None
            if (place - first + 1) % MAX_TOKENS_PER_MASK == 0:
                state.compute_bitmask()  # renews the lexer's fuel
            self.habits.add(state.compute_ff_bytes() or tokens[place - 1], tokens[place])
            state.consume_token(tokens[place])
            self._num_consumed += 1
        can_follow = self._num_consumed == len(tokens) and not state.is_stopped()  # a failed one has stopped
        return state if can_follow else None


class GrammarDrafts:
    """Implements `Drafter` and `Constraints` with matchers of its own, which consume only known tokens.

    A forced text is drafted in the tokenizer's spelling, unless answers are known to spell it otherwise. Elsewhere the
    grammar often leaves few choices, such as the space behind a colon: there, that token is drafted which followed the
    same token before. Habits are those of a grammar and of requests that may share cached prefixes. A request whose
    matcher fails has no drafts any more.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._habits: OrderedDict[tuple[str, str, str], Habits] = OrderedDict()
        self._spelling = lru_cache(4096)(self._spell)

    def propose(self, request: Request, ahead: list[int], most: int) -> Guess:
        if request.params.structured_outputs is None:
            return NO_GUESS
        answer = self._answer(request)
        known = answer.catch_up(request.token_ids)
        if known is None:
            return NO_GUESS
        state = known.deep_copy()
        if ahead and state.try_consume_tokens(ahead) < len(ahead):
            return NO_GUESS
        last, reached = (ahead or request.token_ids)[-1], 1.0
        token_ids: list[int] = []
        probabilities: list[float] = []
        spelled: tuple[int, ...] = ()  # the rest of the forced text
        while len(token_ids) < most:
            if forced := state.compute_ff_bytes():
                spelled = spelled or self._spelling(last, forced)
                weight = END_WEIGHT if len(spelled) == 1 and SPECIAL not in forced else float(bool(spelled))
                token_id, probability = answer.habits.guess(
                    forced, state, spelled[0] if spelled else -1, weight
                )
            else:
                token_id, probability = answer.habits.guess(last, state, -1, 0.0)
            reached *= probability
            if reached < MIN_REACHED:
                break
            token_ids.append(token_id)
            probabilities.append(probability)
            spelled = spelled[1:] if spelled and spelled[0] == token_id else ()
            last = token_id
            state.consume_token(token_id)
            if state.is_stopped():
                break
        return Guess(token_ids, probabilities)

    def num_allowed(self, request: Request, token_ids: list[int]) -> int:
        state = self._answer(request).catch_up(request.token_ids)
        return 0 if state is None else max(0, state.validate_tokens(token_ids))

    def ended(self, request: Request) -> None:
        if request.params.structured_outputs is not None:
            self._answer(request).catch_up(request.token_ids)

    def clear(self) -> None:
        for habits in self._habits.values():
            habits.clear()
        self._habits.clear()

    def _answer(self, request: Request) -> _DraftedAnswer:
        answer = record_of(request).kept(self, partial(self._begin, request))
        constraint = request.params.structured_outputs
        if answer.state is None and constraint is not None:  # until the grammar is compiled
            grammar = self._compiler.compiled(constraint)
            answer.state = None if grammar is None else grammar.state_for_drafts()
        return answer

    def _begin(self, request: Request) -> _DraftedAnswer:
        constraint = request.params.structured_outputs
        assert constraint is not None
        key = request.spec.cache_key, constraint.kind, constraint.text
        habits = self._habits.setdefault(key, Habits())
        self._habits.move_to_end(key)
        if len(self._habits) > MAX_GRAMMARS:
            self._habits.popitem(last=False)
        return _DraftedAnswer(habits, request)

    def _spell(self, last: int, forced: bytes) -> tuple[int, ...]:
        """Return the tokens of a forced text behind another token, as the tokenizer spells them together.

        They end before a special token and before parts of characters.
        """
        vocabulary = self._compiler.vocabulary
        pieces, special_ids = vocabulary.pieces, vocabulary.special_ids
        text, _, rest = forced.partition(SPECIAL)
        if not text:
            return (int(rest[1 : rest.index(b"]")]),)
        if vocabulary.spell is None:
            return ()
        for before in (b"" if last in special_ids else pieces[last], b""):
            try:
                token_ids = vocabulary.spell((before + text).decode(errors="ignore"))
            except RequestError:  # it looks like a special token
                return ()
            size, index = 0, len(token_ids)
            while index and size < len(text):
                index -= 1
                size += len(pieces[token_ids[index]])
            spelled = b"".join(pieces[token_id] for token_id in token_ids[index:])
            if spelled and text.startswith(spelled):
                return tuple(token_ids[index:])
        return ()
