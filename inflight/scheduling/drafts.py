"""Speculation: which tokens decodes verify beside their own, and how many.

A drafter guesses the tokens that follow a request's last one. A step computes these drafts together with it, samples
after each as it would have without drafts, and keeps what it sampled as far as the drafts before were right. So drafts
never change a token. They pay where a step of some more tokens takes hardly longer, and where they are often right:
both are measured all the time, and a draft is made only where it pays.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import itemgetter, mul
from typing import Any, NamedTuple, Protocol

from inflight.config import SpeculationConfig
from inflight.request import Request
from inflight.scheduling.batch import Batch, Sampled, ScheduledStep
from inflight.scheduling.scheduler import NoSpeculation, Speculation, SpeculationStats


class Guess(NamedTuple):
    """Guessed tokens. Each is right with its probability, given that those before it are."""

    token_ids: list[int]
    probabilities: list[float]


NO_GUESS = Guess([], [])


class Drafter(Protocol):
    """Guesses what follows."""

    def propose(self, request: Request, most: int) -> Guess:
        """Return guesses of the at most `most` tokens that follow all tokens of a request, which are known."""

    def ended(self, request: Request) -> None:
        """Note that a request has all its tokens."""

    def clear(self) -> None:
        """Forget all requests that have ended."""


# ---- how many ----

NUM_FIRST_STEPS = 4  # steps
STEP_WEIGHT = 0.1  # of a step among those of its size


class StepCosts:
    """How long steps take, by their number of tokens, from those observed."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # by size class
        self._counts: dict[int, int] = {}  # of the steps observed
        self._sizes: list[int] = []  # those observed, in order

    def observe(self, num_tokens: int, seconds: float) -> None:
        size = _size_class(num_tokens)
        before = self._seconds.get(size, seconds)
        count = self._counts[size] = self._counts.get(size, 0) + 1
        if count == 1:
            insort(self._sizes, size)
        if count <= NUM_FIRST_STEPS:  # first steps are often slow
            self._seconds[size] = min(seconds, before)
            return
        change = min(max(seconds / before, 0.5), 2.0)  # one slow step says little
        factor = 1 + STEP_WEIGHT * (change - 1)
        for other in self._sizes:  # contexts and the machine's load change all of them
            self._seconds[other] *= factor

    def knows(self, num_tokens: int) -> bool:
        """Return whether a step of about this size was observed."""
        return _size_class(num_tokens) in self._seconds

    @property
    def reach(self) -> int:
        """The largest step to try: little more than the largest observed."""
        return self._sizes[-1] + max(1, self._sizes[-1] >> 3) if self._sizes else 0

    def estimate(self, num_tokens: int) -> float:
        """Return about how long a step takes: a straight line between observed sizes, and on behind them."""
        sizes, seconds = self._sizes, self._seconds
        if len(sizes) < 2:
            return seconds[sizes[0]] if sizes else 1.0
        index = min(max(bisect_left(sizes, num_tokens), 1), len(sizes) - 1)
        below, above = sizes[index - 1], sizes[index]
        slope = (seconds[above] - seconds[below]) / (above - below)
        if num_tokens < below or num_tokens > above:
            slope = max(slope, 0.0)
        return seconds[below] + (num_tokens - below) * slope


def _size_class(num_tokens: int) -> int:
    """Return the number of tokens to within an eighth, so that few sizes cover all steps."""
    grain = 1 << max(0, num_tokens.bit_length() - 4)
    return num_tokens // grain * grain


@dataclass(slots=True)
class HitRate:
    """How often guesses were right recently, with a prior."""

    memory: float  # how many observations count, about
    hits: float = 0.0
    tries: float = 0.0

    def add(self, is_hit: bool) -> None:
        keep = 1 - 1 / self.memory
        self.hits, self.tries = self.hits * keep + is_hit, self.tries * keep + 1

    def fade(self, share: float) -> None:
        """Forget a share of all observations."""
        self.hits -= self.hits * share
        self.tries -= self.tries * share

    def estimate(self, expected: float) -> float:
        return (self.hits + PRIOR * expected) / (self.tries + PRIOR)


PRIOR = 4.0  # how many observations an expectation is worth
FIRST_PROBABILITY = 0.5  # of drafts, before any was verified
MIN_PROBABILITY = 0.05  # of a drafted token, however little it seems to cost: on a busy machine, times vary
RECOVERY = 0.002  # share of the record of drafts that is forgotten with every token without drafts


@dataclass(slots=True)
class DraftRecord:
    """The state of speculation for one request."""

    drafts: HitRate = field(default_factory=lambda: HitRate(30.0))  # how often its drafts were right
    index: TokenIndex | None = None  # of its own tokens, for lookups
    has_ended: bool = False


def _record(request: Request) -> DraftRecord:
    if request.draft_record is None:
        request.draft_record = DraftRecord()
    record: DraftRecord = request.draft_record
    return record


class AdaptiveSpeculation:
    """Implements `Speculation` with a drafter."""

    def __init__(self, drafter: Drafter, most: int) -> None:
        self._drafter = drafter
        self._most = most  # drafts of a request in a step
        self._costs = StepCosts()
        self._places = [HitRate(200.0) for _ in range(most)]  # by place in the draft, of all requests lately
        self.stats = SpeculationStats()

    def choose(self, step: ScheduledStep, room: int) -> Iterator[tuple[int, list[int]]]:
        """Yield drafts, the likeliest tokens first, as long as the step yields more tokens per second with them."""
        num_tokens, num_decodes, costs = step.batch.num_tokens, step.batch.num_decodes, self._costs
        room = min(room, costs.reach - num_tokens)
        if (
            room <= 0 or not num_decodes or not costs.knows(num_tokens)
        ):  # see first what it costs without drafts
            return
        seconds = costs.estimate(num_tokens)
        # How likely a token must be: one more makes the step this much longer for all of them.
        break_even = max(MIN_PROBABILITY, num_decodes * (costs.estimate(num_tokens + 1) / seconds - 1))
        drafts: dict[int, list[int]] = {}
        slots: list[tuple[float, int]] = []  # how likely a drafted token is returned, and its entry
        for entry, draft in self._drafts(step, room, break_even):
            drafts[entry] = draft.token_ids
            slots += [(probability, entry) for probability in draft.probabilities]
        slots = [slot for slot in slots if slot[0] >= MIN_PROBABILITY]
        slots.sort(key=itemgetter(0), reverse=True)  # those of a draft stay in order: each is less likely
        returned, best, num_drafted = float(num_decodes), num_decodes / seconds, 0
        for number, (probability, _) in enumerate(slots[:room], 1):
            returned += probability
            rate = returned / max(
                seconds, costs.estimate(num_tokens + number)
            )  # fewer tokens are never slower
            if rate > best:
                best, num_drafted = rate, number
        for entry, length in Counter(entry for _, entry in slots[:num_drafted]).items():
            yield entry, drafts[entry][:length]

    def _drafts(self, step: ScheduledStep, room: int, break_even: float) -> Iterator[tuple[int, Guess]]:
        """Yield the drafts of entries for which one may pay. Their probabilities are those of being returned."""
        places = [place.estimate(FIRST_PROBABILITY) for place in self._places]
        for entry in range(step.batch.num_decodes):
            request = step.requests[entry]
            most = min(self._most, request.max_total - request.num_tokens, room)
            has_outputs = request.num_computed > request.num_prompt_tokens
            if not has_outputs or request.num_in_flight > 1 or most <= 0:
                continue
            drafts = _record(request).drafts
            if drafts.estimate(places[0]) <= break_even:
                drafts.fade(RECOVERY)
                self._places[0].fade(RECOVERY / step.batch.num_decodes)
                continue
            token_ids, probabilities = self._drafter.propose(request, most)
            rates = (drafts.estimate(place) for place in places)
            each = [min(1.0, own * rate) for own, rate in zip(probabilities, rates, strict=False)]
            if token_ids:
                yield entry, Guess(token_ids, list(accumulate(each, mul)))

    def settle(self, step: ScheduledStep, sampled: Sampled) -> None:
        for entry, draft in step.batch.drafts.items():
            request, num_accepted = step.requests[entry], max(0, len(sampled.token_ids[entry]) - 1)
            self.stats.num_drafts += 1
            self.stats.num_drafted += len(draft)
            self.stats.num_accepted += num_accepted
            request.record.num_drafted_tokens += len(draft)
            request.record.num_accepted_tokens += num_accepted
            if request.record.finish_reason is None:  # otherwise it is not known how far the draft was right
                self._learn(request, len(draft), num_accepted)
        for request in step.requests:
            if request.record.finish_reason in ("stop", "length") and not _record(request).has_ended:
                _record(request).has_ended = True
                self._drafter.ended(request)

    def _learn(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        record = _record(request).drafts
        for place in range(min(num_accepted + 1, num_drafted)):  # the rest were not reached
            record.add(place < num_accepted)
            self._places[place].add(place < num_accepted)

    def observe(self, batch: Batch, seconds: float) -> None:
        self._costs.observe(batch.num_tokens, seconds)

    def clear(self) -> None:
        self._drafter.clear()


# ---- lookup ----

MAX_PLACES = 16  # the most recent places that a lookup compares
SEPARATOR = -1  # between answers


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


INDEXED_AT_ONCE = 1_000  # tokens of a request that are indexed at once, so that others hardly wait
MAX_ANSWER_TOKENS = 400_000  # of all answers that are kept


class Lookup:
    """Implements `Drafter`: text that stood before, in the request itself or in earlier answers, is continued alike.

    Where the last tokens stood before, the draft follows the most frequent continuation, and it is longer the more
    tokens match. Answers are looked up only by requests that may share cached prefixes with them.
    """

    def __init__(self, config: SpeculationConfig) -> None:
        own_text_only = config.method == "ngram"  # only the request's own tokens
        self._min_match = config.prompt_lookup_min if own_text_only else 2
        self._depth = config.prompt_lookup_max if own_text_only else config.suffix_decoding_max_tree_depth
        self._factor = math.inf if own_text_only else config.suffix_decoding_max_spec_factor
        self._min_probability = config.suffix_decoding_min_token_prob
        self._max_answers = 0 if own_text_only else config.suffix_decoding_max_cached_requests
        # Answers by cache key. When there are many, the older ones are dropped as a whole.
        self._answers: dict[str, TokenIndex] = {}
        self._older: dict[str, TokenIndex] = {}
        self._num_answers = self._num_answer_tokens = 0  # not counting the older ones

    def propose(self, request: Request, most: int) -> Guess:
        record = _record(request)
        index = record.index = record.index or TokenIndex(self._min_match)
        tokens, num_indexed = request.token_ids, len(index.tokens)
        if num_indexed < len(tokens):
            index.extend(tokens[num_indexed : num_indexed + INDEXED_AT_ONCE])
            if len(index.tokens) < len(tokens):
                return NO_GUESS
        key = request.spec.cache_key
        indices = index, self._answers.get(key), self._older.get(key)
        guesses = [self._continue(known, tokens, most) for known in indices if known is not None]
        return max(guesses, key=_expected_length)  # of equal ones, the request's own

    def _continue(self, index: TokenIndex, tail: Sequence[int], most: int) -> Guess:
        """Return the longest draft, by the number of its tokens that are expected to be right."""
        matches = index.lookup(tail, self._depth)
        best = NO_GUESS
        for match in sorted({match for match, _ in matches}, reverse=True):
            limit = int(min(most, match * self._factor))
            draft = self._walk(index.tokens, [place for other, place in matches if other >= match], limit)
            best = max(best, draft, key=_expected_length)
        return best

    def _walk(self, tokens: list[int], places: list[int], limit: int) -> Guess:
        """Follow the most frequent continuation of these places."""
        token_ids: list[int] = []
        probabilities: list[float] = []
        reached = 1.0
        while places and len(token_ids) < limit:
            counts: dict[int, int] = {}
            for place in places:
                if place < len(tokens):
                    counts[tokens[place]] = counts.get(tokens[place], 0) + 1
            if not counts:
                break
            token_id = max(
                reversed(counts), key=counts.__getitem__
            )  # of equally frequent ones, the most recent
            share = counts[token_id] / sum(counts.values())
            reached *= share
            if token_id == SEPARATOR or reached < self._min_probability:
                break
            token_ids.append(token_id)
            probabilities.append(share)
            places = [place + 1 for place in places if place < len(tokens) and tokens[place] == token_id]
        return Guess(token_ids, probabilities)

    def ended(self, request: Request) -> None:
        answer = request.token_ids[request.num_prompt_tokens :]
        if len(answer) <= self._min_match or not self._max_answers:
            return
        index = self._answers.setdefault(request.spec.cache_key, TokenIndex(self._min_match))
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


def _expected_length(guess: Guess) -> float:
    """Return how many tokens are expected to be right."""
    return float(sum(accumulate(guess.probabilities, mul)))


def make_speculation(options: Mapping[str, Any] | None) -> Speculation:
    """Return what `speculative_config` asks for."""
    if options is None:
        return NoSpeculation()
    config = SpeculationConfig.from_options(options)
    return AdaptiveSpeculation(Lookup(config), config.num_speculative_tokens)
