"""Drafts by lookup: text that stood before is continued alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from inflight.config import SpeculationConfig
from inflight.request import Request
from inflight.scheduling.drafts import NO_GUESS, Guess, expected_length, record_of

MAX_PLACES = 16  # the most recent places that a lookup compares
SEPARATOR = -1  # between answers
START = -2  # before an answer


class TokenIndex:
    """Tokens, and where each run of `size` of them was followed by more."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.tokens: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = {}

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens, and index what is followed by them."""
        tokens, size, places = self.tokens, self.size, self._places
        first = max(len(tokens), size)
        tokens += token_ids
        for place in range(first, len(tokens)):
            found = places.setdefault(tuple(tokens[place - size : place]), [])
            found.append(place)
            if len(found) > 2 * MAX_PLACES:
                del found[:MAX_PLACES]

    def lookup(self, tail: Sequence[int], depth: int) -> list[tuple[int, int]]:
        """Return (match, place): as many of the tail's last tokens, at most `depth`, also stand before this place."""
        tokens, size = self.tokens, self.size
        found = self._places.get(tuple(tail[-size:]), ())
        most = min(depth, len(tail))
        matches = []
        for place in found[-MAX_PLACES:]:
            match = size
            while match < most and match < place and tokens[place - 1 - match] == tail[-1 - match]:
                match += 1
            matches.append((match, place))
        return matches


@dataclass(frozen=True, slots=True)
class Matching:
    """How a text is continued from an index: longer where more tokens match, and as it went on most often."""

    least: int  # tokens that match
    depth: int  # tokens that are compared
    factor: float  # drafts for each token that matches
    min_probability: float  # of the last draft, by frequency

    @classmethod
    def of(cls, config: SpeculationConfig) -> Matching:
        if config.method == "ngram":
            return cls(
                config.prompt_lookup_min,
                config.prompt_lookup_max,
                math.inf,
                config.suffix_decoding_min_token_prob,
            )
        return cls(
            2,
            config.suffix_decoding_max_tree_depth,
            config.suffix_decoding_max_spec_factor,
            config.suffix_decoding_min_token_prob,
        )

    def guess(self, index: TokenIndex, tail: Sequence[int], most: int) -> Guess:
        """Return the longest draft, by the number of its tokens that are expected to be right."""
        matches = index.lookup(tail, self.depth)
        best = NO_GUESS
        for match in sorted({match for match, _ in matches}, reverse=True):
            limit = int(min(most, match * self.factor))
            if limit <= expected_length(best):  # shorter matches make no longer drafts
                break
            draft = self._walk(index.tokens, [place for other, place in matches if other >= match], limit)
            best = max(best, draft, key=expected_length)
        return best

    def _walk(self, tokens: list[int], places: list[int], limit: int) -> Guess:
        """Follow the most frequent continuation of these places."""
        token_ids: list[int] = []
        probabilities: list[float] = []
        reached = 1.0
        while len(places) > 1 and len(token_ids) < limit:
            counts: dict[int, int] = {}
            for place in places:
                if place < len(tokens):
                    counts[tokens[place]] = counts.get(tokens[place], 0) + 1
            if not counts:
                break
            # Of equally frequent ones, the most recent.
            token_id = max(reversed(counts), key=counts.__getitem__)
            share = counts[token_id] / sum(counts.values())
            reached *= share
            if token_id == SEPARATOR or reached < self.min_probability:
                break
            token_ids.append(token_id)
            probabilities.append(share)
            places = [place + 1 for place in places if place < len(tokens) and tokens[place] == token_id]
        if len(places) == 1:  # it goes on like this
            rest = tokens[places[0] : places[0] + limit - len(token_ids)]
            rest = rest[: rest.index(SEPARATOR)] if SEPARATOR in rest else rest
            token_ids += rest
            probabilities += [1.0] * len(rest)
        return Guess(token_ids, probabilities)

    def tail(self, token_ids: list[int], ahead: list[int]) -> list[int]:
        """Return the last of these tokens, as many as are compared."""
        return (token_ids[-self.depth :] + ahead)[-self.depth :]


class Predictions:
    """Implements `Drafter`: looks in the text that a client expects the answer to be like.

    The draft begins with that text. Where the answer has left it, it goes on where the last tokens stand in it.
    """

    def __init__(self, config: SpeculationConfig) -> None:
        self._matching = replace(Matching.of(config), factor=math.inf)

    def propose(self, request: Request, ahead: list[int], most: int) -> Guess:
        prediction = request.spec.prediction_ids
        if not prediction:
            return NO_GUESS
        index = record_of(request).kept(self, self._new_index)
        first = len(index.tokens) - self._matching.least
        if first < len(prediction):
            index.extend(prediction[first : first + INDEXED_AT_ONCE].tolist())
        begin = max(request.num_prompt_tokens, len(request.token_ids) - self._matching.depth)
        outputs = request.token_ids[begin:]
        return self._matching.guess(index, [START] * self._matching.least + outputs + ahead, most)

    def _new_index(self) -> TokenIndex:
        index = TokenIndex(self._matching.least)
        index.extend([START] * self._matching.least)
        return index

    def ended(self, request: Request) -> None:
        pass

    def clear(self) -> None:
        pass


INDEXED_AT_ONCE = 1_000  # tokens of a request that are indexed at once, so that others hardly wait
MAX_ANSWER_TOKENS = 400_000  # of all answers that are kept


class Lookup:
    """Implements `Drafter`: looks in the request's own text and in earlier answers.

    Answers are looked up only by requests that may share cached prefixes with them.
    """

    def __init__(self, config: SpeculationConfig) -> None:
        self._matching = Matching.of(config)
        self._max_answers = 0 if config.method == "ngram" else config.suffix_decoding_max_cached_requests
        # Answers by cache key. When there are many, the older ones are dropped as a whole.
        self._answers: dict[str, TokenIndex] = {}
        self._older: dict[str, TokenIndex] = {}
        self._num_answers = self._num_answer_tokens = 0  # not counting the older ones

    def propose(self, request: Request, ahead: list[int], most: int) -> Guess:
        index = record_of(request).kept(self, self._new_index)
        tokens, num_indexed = request.token_ids, len(index.tokens)
        if num_indexed < len(tokens):
            index.extend(tokens[num_indexed : num_indexed + INDEXED_AT_ONCE])
            if len(index.tokens) < len(tokens):
                return NO_GUESS
        key, tail = request.spec.cache_key, self._matching.tail(tokens, ahead)
        indices = index, self._answers.get(key), self._older.get(key)
        guesses = [self._matching.guess(known, tail, most) for known in indices if known is not None]
        return max(guesses, key=expected_length)  # of equal ones, the request's own

    def _new_index(self) -> TokenIndex:
        return TokenIndex(self._matching.least)

    def ended(self, request: Request) -> None:
        answer = request.token_ids[request.num_prompt_tokens :]
        if len(answer) <= self._matching.least or not self._max_answers:
            return
        index = self._answers.setdefault(request.spec.cache_key, self._new_index())
        index.extend([SEPARATOR, *answer])
        self._num_answers += 1
        self._num_answer_tokens += len(answer)
        if 2 * self._num_answers >= self._max_answers or 2 * self._num_answer_tokens >= MAX_ANSWER_TOKENS:
            self._older, self._answers = self._answers, {}
            self._num_answers = self._num_answer_tokens = 0

    def clear(self) -> None:
        self._answers.clear()
        self._older.clear()
        self._num_answers = self._num_answer_tokens = 0
