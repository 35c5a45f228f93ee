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
from typing import Any, NamedTuple, Protocol

from inflight.config import Speculative
from inflight.request import Request
from inflight.scheduling.batch import Batch, Sampled, ScheduledStep
from inflight.scheduling.scheduler import NoSpeculation, Speculation, SpeculationStats


class Guess(NamedTuple):
    """Guessed tokens. Each is right with its probability, given that those before it are."""

    token_ids: list[int]
    odds: list[float]


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

FEW = 4  # steps
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
        if count <= FEW:  # first steps are often slow
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
class Share:
    """How often something lately was so, beside what was expected before."""

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
FIRST_ODDS = 0.5  # of drafts, before any was verified
RECOVERY = 0.002  # share of the record of drafts that is forgotten with every token without drafts


@dataclass(slots=True)
class DraftRecord:
    """What speculation keeps of a request."""

    drafts: Share = field(default_factory=lambda: Share(30.0))  # how often its drafts were right
    index: TokenIndex | None = None  # of its own tokens, for lookups


def _record(request: Request) -> DraftRecord:
    if request.speculation is None:
        request.speculation = DraftRecord()
    record: DraftRecord = request.speculation
    return record


class Drafting:
    """Implements `Speculation` with a drafter."""

    def __init__(self, drafter: Drafter, most: int) -> None:
        self._drafter = drafter
        self._most = most  # drafts of a request in a step
        self._costs = StepCosts()
        self._places = [Share(200.0) for _ in range(most)]  # by place in the draft, of all requests lately
        self.stats = SpeculationStats()

    def choose(self, step: ScheduledStep, room: int) -> Iterator[tuple[int, list[int]]]:
        """Add drafts, the likeliest first, as long as the step yields more tokens per second with them."""
        batch = step.batch
        num_tokens = batch.num_tokens
        if room <= 0 or not batch.num_decodes:
            return
        if not self._costs.knows(num_tokens):
            return  # to see what it costs without drafts
        room = min(room, self._costs.reach - num_tokens)
        seconds = self._costs.estimate(num_tokens)
        # The tokens that all requests together get for one more in the step must outweigh its time.
        worth = batch.num_decodes * (self._costs.estimate(num_tokens + 1) / seconds - 1)
        expected_odds = [place.estimate(FIRST_ODDS) for place in self._places]
        drafts: dict[int, list[int]] = {}
        slots: list[tuple[float, int]] = []
        for entry in range(batch.num_decodes):
            request = step.requests[entry]
            most = min(self._most, request.max_total - request.num_tokens, room)
            begins = request.num_computed <= request.num_prompt_tokens  # the first output says where it goes
            if begins or request.num_in_flight > 1 or most <= 0:
                continue
            record = _record(request).drafts
            if record.estimate(expected_odds[0]) <= worth:
                record.fade(RECOVERY)
                self._places[0].fade(RECOVERY / batch.num_decodes)
                continue
            token_ids, odds = self._drafter.propose(request, most)
            if not token_ids:
                continue
            drafts[entry] = token_ids
            reached = 1.0
            for share, place_odds in zip(odds, expected_odds, strict=False):
                reached *= min(1.0, share * record.estimate(place_odds))
                slots.append((-reached, entry))
        slots.sort()  # a draft's tokens stay in order: each is reached less often than the one before
        del slots[max(0, room) :]
        expected, best, num_drafts = float(batch.num_decodes), batch.num_decodes / seconds, 0
        for number, (reached, _) in enumerate(slots, 1):
            expected -= reached
            rate = expected / self._costs.estimate(num_tokens + number)
            if rate > best:
                best, num_drafts = rate, number
        lengths = Counter(entry for _, entry in slots[:num_drafts])
        for entry, length in lengths.items():
            yield entry, drafts[entry][:length]

    def settle(self, step: ScheduledStep, sampled: Sampled) -> None:
        for entry, draft in step.batch.drafts.items():
            num_accepted = max(0, len(sampled.token_ids[entry]) - 1)
            self.stats.num_drafts += 1
            self.stats.num_drafted += len(draft)
            self.stats.num_accepted += num_accepted
            request = step.requests[entry]
            request.record.num_drafted_tokens += len(draft)
            request.record.num_accepted_tokens += num_accepted
            self._learn(request, len(draft), num_accepted)
        for request in step.requests:
            if request.record.finish_reason in ("stop", "length"):
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


PIECE = 1_000  # tokens of a request that are indexed at once, so that others hardly wait
MAX_ANSWER_TOKENS = 400_000  # of all answers that are kept


class Lookup:
    """Implements `Drafter`: text that stood before, in the request itself or in earlier answers, is continued alike.

    Where the last tokens stood before, the draft follows the most frequent continuation, and it is longer the more
    tokens match. Answers are looked up only by requests that may share cached prefixes with them.
    """

    def __init__(self, config: Speculative) -> None:
        is_own = config.method == "ngram"  # only the request's own tokens
        self._min_match = config.prompt_lookup_min if is_own else 2
        self._depth = config.prompt_lookup_max if is_own else config.suffix_decoding_max_tree_depth
        self._factor = math.inf if is_own else config.suffix_decoding_max_spec_factor
        self._min_odds = config.suffix_decoding_min_token_prob
        self._max_answers = 0 if is_own else config.suffix_decoding_max_cached_requests
        # Answers by cache key. When there are many, the older ones are dropped as a whole.
        self._answers: dict[str, TokenIndex] = {}
        self._older: dict[str, TokenIndex] = {}
        self._num_answers = self._num_answer_tokens = 0  # not counting the older ones

    def propose(self, request: Request, most: int) -> Guess:
        record = _record(request)
        index = record.index = record.index or TokenIndex(self._min_match)
        tokens, num_indexed = request.token_ids, len(index.tokens)
        if num_indexed < len(tokens):
            index.extend(tokens[num_indexed : num_indexed + PIECE])
            if len(index.tokens) < len(tokens):
                return NO_GUESS
        key = request.spec.cache_key
        indices = index, self._answers.get(key), self._older.get(key)
        guesses = [self._continue(known, tokens, most) for known in indices if known is not None]
        return max(guesses, key=lambda guess: sum(guess.odds))  # of equal ones, the request's own

    def _continue(self, index: TokenIndex, tail: Sequence[int], most: int) -> Guess:
        """Return the best draft: the sum of the probabilities of its tokens is the largest."""
        matches = index.lookup(tail, self._depth)
        best, score = NO_GUESS, 0.0
        for match in sorted({match for match, _ in matches}, reverse=True):
            limit = int(min(most, match * self._factor))
            draft = self._walk(index.tokens, [place for other, place in matches if other >= match], limit)
            reached, total = 1.0, 0.0
            for share in draft.odds:
                reached *= share
                total += reached
            if total > score:
                best, score = draft, total
        return best

    def _walk(self, tokens: list[int], places: list[int], limit: int) -> Guess:
        """Follow the most frequent continuation of these places."""
        token_ids: list[int] = []
        odds: list[float] = []
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
            if token_id == SEPARATOR or reached < self._min_odds:
                break
            token_ids.append(token_id)
            odds.append(share)
            places = [place + 1 for place in places if place < len(tokens) and tokens[place] == token_id]
        return Guess(token_ids, odds)

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


def make_speculation(options: Mapping[str, Any] | None) -> Speculation:
    """Return what `speculative_config` asks for."""
    if options is None:
        return NoSpeculation()
    config = Speculative.from_options(options)
    return Drafting(Lookup(config), config.num_speculative_tokens)
