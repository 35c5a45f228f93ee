"""Speculation: which tokens decodes verify beside their own, and how many.

A drafter guesses the tokens that follow a request's last one. A step computes these drafts together with it, samples
after each as it would have without drafts, and keeps what it sampled as far as the drafts before were right. So drafts
never change a token. They pay where a step of some more tokens takes hardly longer, and where they are often right:
both are measured all the time, and a draft is made only where it pays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter, mul
from typing import Any, NamedTuple, Protocol, TypeVar

from inflight.request import Request
from inflight.scheduling.batch import Batch, Sampled, ScheduledStep
from inflight.scheduling.scheduler import SpeculationStats
from inflight.scheduling.step_costs import StepCosts

Kept = TypeVar("Kept")


class Guess(NamedTuple):
    """Guessed tokens. Each is right with its probability, given that those before it are."""

    token_ids: list[int]
    probabilities: list[float]


NO_GUESS = Guess([], [])


class Drafter(Protocol):
    """Guesses what follows."""

    def propose(self, request: Request, ahead: list[int], most: int) -> Guess:
        """Guess the at most `most` tokens that follow all tokens of a request, which are known, and those `ahead`."""

    def ended(self, request: Request) -> None:
        """Note that a request has all its tokens."""

    def clear(self) -> None:
        """Forget all requests that have ended."""


class Constraints(Protocol):
    """The grammars of constrained requests."""

    def num_allowed(self, request: Request, token_ids: list[int]) -> int:
        """Return how many of these tokens may follow all tokens of a request, which are known."""


# ---- how many ----

PRIOR = 4.0  # how many observations an expectation is worth


@dataclass(slots=True)
class HitRate:
    """How often guesses were right recently, compared with how often that was expected, with a prior."""

    memory: float  # how many observations count, about
    hits: float = 0.0
    tries: float = 0.0

    def add(self, is_hit: bool, expected: float = 1.0) -> None:
        keep = 1 - 1 / self.memory
        self.hits, self.tries = self.hits * keep + is_hit, self.tries * keep + expected

    def fade(self, share: float) -> None:
        """Forget a share of all observations."""
        self.hits -= self.hits * share
        self.tries -= self.tries * share

    def estimate(self, expected: float, prior: float = PRIOR) -> float:
        return (self.hits + prior * expected) / (self.tries + prior)


# While steps have drafts, each waits for the results of the one before it, which drafts continue. After some steps
# without, they no longer wait, but for one of many: maybe drafts pay again.
PATIENCE, PROBE_INTERVAL = 4, 32
POSSIBLE = 0.25  # tokens that are drafted then even if they do not seem to pay: perhaps something was wrong
WAIT_WEIGHT = 0.1  # of the last wait
FIRST_PROBABILITY, FIRST_PRIOR = 0.7, 6.0  # of drafts, before any was verified
WORTH_A_GUESS = 0.5  # of the probability from which tokens pay
# Guessing takes time, too, which small models notice. Requests whose guesses gain less are asked now and then.
MIN_GAIN = 1.04  # how many times as fast a step with drafts must seem
GUESS_SECONDS = 25e-6
ASK_INTERVAL = 8
WORTH_MEMORY = 50.0  # guesses
MIN_PROBABILITY = 0.05  # of a drafted token, however little it seems to cost: on a busy machine, times vary
RECOVERY = 0.002  # share of the record of a drafter that is forgotten with every token that it does not draft


class _Part(NamedTuple):
    """The tokens that one drafter adds to a draft."""

    drafter: int
    guess: Guess


class DraftRecord:
    """The state of speculation for one request."""

    def __init__(self, num_drafters: int = 0) -> None:
        self.rates = [HitRate(30.0) for _ in range(num_drafters)]  # how often each drafter was right
        self.parts: list[_Part] = []  # of the draft that is being verified
        self.has_ended = False
        self.worth: float | None = None  # about how many tokens a guess gains; None: as for others
        self.num_unasked = 0  # steps without a guess that could have had one
        self._kept: dict[Any, Any] = {}

    def kept(self, drafter: object, create: Callable[[], Kept]) -> Kept:
        """Return what a drafter keeps of the request, created at first."""
        if drafter not in self._kept:
            self._kept[drafter] = create()
        kept: Kept = self._kept[drafter]
        return kept


def record_of(request: Request, num_drafters: int = 0) -> DraftRecord:
    if request.draft_record is None:
        request.draft_record = DraftRecord(num_drafters)
    record: DraftRecord = request.draft_record
    return record


class _Draft(NamedTuple):
    token_ids: list[int]
    probabilities: list[float]  # of each being returned
    parts: list[_Part]


class AdaptiveSpeculation:
    """Implements `Speculation` with drafters."""

    read_ahead = 0

    def __init__(
        self,
        drafters: Sequence[Drafter],
        most: int,
        constraints: Constraints | None = None,
        predictions: Drafter | None = None,
    ) -> None:
        """Without `constraints`, no request is constrained. `predictions`: a further drafter, whose drafts are counted
        for the client."""
        drafters = [*drafters, *([] if predictions is None else [predictions])]
        self._drafters = drafters
        self._predictions = -1 if predictions is None else len(drafters) - 1
        self._constraints = constraints
        whole: Sequence[object] = drafters
        self._is_allowed = [drafter is constraints for drafter in whole]  # whether a grammar made its guesses
        self._waited = 0.0  # about how many seconds steps with drafts wait for those before them
        self._num_plain = 0  # steps since the last one with drafts
        self._guess_worth = 1.0  # about how many tokens a guess gains, of all requests
        self._most = most  # drafts of a request in a step
        self._costs = StepCosts()
        # Of all requests lately: by drafter, and by place in what it proposed.
        self._places = [[HitRate(200.0) for _ in range(most)] for _ in drafters]
        self.stats = SpeculationStats()

    @property
    def waits(self) -> bool:
        return self._num_plain < PATIENCE or self._num_plain % PROBE_INTERVAL == 0

    def num_wanted(self, step: ScheduledStep) -> int:  # noqa: ARG002
        return 0

    def choose(self, step: ScheduledStep, room: int) -> Iterator[tuple[int, list[int]]]:
        """Yield drafts, the likeliest tokens first, as long as the step yields more tokens per second with them."""
        self._num_plain += 1
        num_tokens, num_decodes, costs = step.batch.num_tokens, step.batch.num_decodes, self._costs
        room = min(room, costs.reach - num_tokens)
        # See first what the step costs without drafts.
        if room <= 0 or not num_decodes or not costs.knows(num_tokens):
            return
        seconds = costs.estimate(num_tokens)
        # How likely a token must be: it makes the step this much longer for all of them. One for each is less uncertain
        # than a single one.
        break_even = max(MIN_PROBABILITY, costs.estimate(num_tokens + num_decodes) / seconds - 1)
        tries = self._num_plain % PROBE_INTERVAL == 0  # whether drafts still cost and gain what they did
        if tries:
            break_even = min(break_even, POSSIBLE)
        if break_even >= 1:
            return
        drafts: dict[int, _Draft] = {}
        slots: list[tuple[float, int]] = []  # how likely a drafted token is returned, and its entry
        gain_needed = GUESS_SECONDS * num_decodes / seconds
        for entry, draft in self._drafts(step, room, break_even, gain_needed):
            drafts[entry] = draft
            slots += [(probability, entry) for probability in draft.probabilities]
        slots = [slot for slot in slots if slot[0] >= MIN_PROBABILITY]
        slots.sort(key=itemgetter(0), reverse=True)  # those of a draft stay in order: each is less likely
        returned, best, num_drafted = float(num_decodes), MIN_GAIN * num_decodes / seconds, 0
        for number, (probability, _) in enumerate(slots[:room], 1):
            returned += probability
            # Fewer tokens are never slower.
            rate = returned / (max(seconds, costs.estimate(num_tokens + number)) + self._waited)
            if rate > best:
                best, num_drafted = rate, number
        if tries and not num_drafted:
            num_drafted = sum(probability >= POSSIBLE for probability, _ in slots[:room])
        self._num_plain *= not num_drafted
        lengths = Counter(entry for _, entry in slots[:num_drafted])
        for entry, draft in drafts.items():
            record, length = record_of(step.requests[entry]), lengths[entry]
            gain = sum(draft.probabilities[:length]) - length * break_even
            worth = self._guess_worth if record.worth is None else record.worth
            record.worth = worth + (gain - worth) / ASK_INTERVAL
            self._guess_worth += (gain - self._guess_worth) / WORTH_MEMORY
            if length:
                record.parts = draft.parts
                yield entry, draft.token_ids[:length]

    def _drafts(
        self, step: ScheduledStep, room: int, break_even: float, gain_needed: float
    ) -> Iterator[tuple[int, _Draft]]:
        """Yield the drafts of entries for which one may pay."""
        firsts = [places[0].estimate(FIRST_PROBABILITY, FIRST_PRIOR) for places in self._places]
        places: list[list[float]] = []  # as far as each drafter's tokens may pay
        for entry in range(step.batch.num_decodes):
            request = step.requests[entry]
            most = min(self._most, request.max_total - request.num_tokens, room)
            has_outputs = request.num_computed > request.num_prompt_tokens
            if not has_outputs or request.num_in_flight > 1 or most <= 0:
                continue
            record = record_of(request, len(firsts))
            if (self._guess_worth if record.worth is None else record.worth) < gain_needed:
                record.num_unasked += 1
                if record.num_unasked % ASK_INTERVAL:
                    continue
            paying = []  # drafters
            for drafter, rate in enumerate(record.rates):
                if rate.estimate(firsts[drafter]) > break_even:
                    paying.append(drafter)
                else:
                    rate.fade(RECOVERY)
                    self._places[drafter][0].fade(RECOVERY / step.batch.num_decodes)
            if not paying:
                continue
            places = places or [self._estimates(drafter, break_even) for drafter in range(len(firsts))]
            yield entry, self._draft(request, most, places, paying, WORTH_A_GUESS * break_even)

    def _estimates(self, drafter: int, break_even: float) -> list[float]:
        """Return how often a drafter's tokens are right by their place, up to that from which none is likely to pay."""
        estimates, reached = [], 1.0
        for place in self._places[drafter]:
            estimates.append(place.estimate(FIRST_PROBABILITY, FIRST_PRIOR))
            reached *= min(1.0, estimates[-1])
            if reached < WORTH_A_GUESS * break_even:
                break
        return estimates

    def _draft(
        self, request: Request, most: int, places: list[list[float]], paying: list[int], least: float
    ) -> _Draft:
        """Let that drafter begin which is expected to be right for most tokens.

        Where a grammar refuses its next token, or where nothing is left of its guess, others may know how to go on.
        """
        draft, rates = _Draft([], [], []), record_of(request).rates
        is_constrained = request.params.structured_outputs is not None
        reached = 1.0
        while (room := most - len(draft.token_ids)) > 0 and reached >= least:
            best, best_length = None, 0.0
            probabilities: list[float] = []
            for drafter in paying:
                if draft.parts and draft.parts[-1].drafter == drafter:
                    continue  # it had no more to say
                count = min(room, len(places[drafter]))
                guess = self._drafters[drafter].propose(request, draft.token_ids, count)
                if is_constrained and guess.token_ids and not self._is_allowed[drafter]:
                    guess = self._cut(request, draft.token_ids, guess)
                estimates = map(rates[drafter].estimate, places[drafter])
                each = [
                    min(1.0, share * rate)
                    for share, rate in zip(guess.probabilities, estimates, strict=False)
                ]
                if (length := sum(accumulate(each, mul))) > best_length:
                    best, best_length, probabilities = _Part(drafter, guess), length, each
            if best is None:
                break
            draft.token_ids.extend(best.guess.token_ids)
            for probability in probabilities:
                reached *= probability
                draft.probabilities.append(reached)
            draft.parts.append(best)
            if not is_constrained:
                break
        return draft

    def _cut(self, request: Request, ahead: list[int], guess: Guess) -> Guess:
        """Return what the request's grammar allows of a guess."""
        if self._constraints is None:
            return NO_GUESS
        count = self._constraints.num_allowed(request, ahead + guess.token_ids) - len(ahead)
        return Guess(guess.token_ids[:count], guess.probabilities[:count]) if count > 0 else NO_GUESS

    def settle(self, step: ScheduledStep, sampled: Sampled) -> None:
        for entry, draft in step.batch.drafts.items():
            request, num_accepted = step.requests[entry], max(0, len(sampled.token_ids[entry]) - 1)
            self.stats.num_drafts += 1
            self.stats.num_drafted += len(draft)
            self.stats.num_accepted += num_accepted
            request.record.num_drafted_tokens += len(draft)
            request.record.num_accepted_tokens += num_accepted
            if request.spec.prediction_ids:
                self._count_predicted(request, len(draft), num_accepted)
            if request.record.finish_reason is None:  # otherwise it is not known how far the draft was right
                self._learn(request, len(draft), num_accepted)
        for request in step.requests:
            if request.record.finish_reason in ("stop", "length"):
                record = record_of(request, len(self._drafters))
                if not record.has_ended:
                    record.has_ended = True
                    self._count_predicted(request, 0, 0)
                    for drafter in self._drafters:
                        drafter.ended(request)

    def _count_predicted(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Count the drafts that come from the client's prediction."""
        if self._predictions < 0 or not request.spec.prediction_ids:
            return
        first = accepted = drafted = 0
        for drafter, guess in record_of(request).parts if num_drafted else ():
            size = len(guess.token_ids)
            if drafter == self._predictions:
                drafted += min(size, max(0, num_drafted - first))
                accepted += min(size, max(0, num_accepted - first))
            first += size
        record = request.record
        record.num_accepted_prediction_tokens = (record.num_accepted_prediction_tokens or 0) + accepted
        record.num_rejected_prediction_tokens += drafted - accepted

    def _learn(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        record, first = record_of(request), 0
        num_reached = min(num_accepted + 1, num_drafted)  # the rest were not compared
        for drafter, guess in record.parts:
            for place, expected in enumerate(guess.probabilities[: max(0, num_reached - first)]):
                is_right = first + place < num_accepted
                record.rates[drafter].add(is_right, expected)
                self._places[drafter][place].add(is_right, expected)
            first += len(guess.token_ids)

    def observe(self, batch: Batch, seconds: float, waited: float = 0.0) -> None:
        self._costs.observe(batch.num_tokens, seconds)
        if waited:
            self._note_wait(waited)

    def _note_wait(self, waited: float) -> None:
        self._waited += WAIT_WEIGHT * (waited - self._waited)

    def clear(self) -> None:
        for drafter in self._drafters:
            drafter.clear()


def expected_length(guess: Guess) -> float:
    """Return how many tokens are expected to be right."""
    return float(sum(accumulate(guess.probabilities, mul)))
