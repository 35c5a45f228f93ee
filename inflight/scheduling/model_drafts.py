"""Drafts by the model itself: a predictor guesses in every step what the next one verifies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from inflight.request import Request
from inflight.scheduling.batch import Batch, Sampled, ScheduledStep
from inflight.scheduling.drafts import (
    FIRST_PROBABILITY,
    MIN_PROBABILITY,
    NO_GUESS,
    PROBE_INTERVAL,
    RECOVERY,
    AdaptiveSpeculation,
    Constraints,
    Drafter,
    Guess,
    record_of,
)
from inflight.scheduling.step_costs import NUM_FIRST_STEPS, StepCosts

TRIAL_INTERVAL = 128  # steps until another number of guesses is tried
TRIAL_WEIGHT = 0.5  # of such a step


@dataclass(slots=True)
class _Predicted:
    """The guesses of a step for one request."""

    num_tokens: int = 0  # of the request, which the guesses follow
    token_ids: list[int] = field(default_factory=list)


class ModelDrafter:
    """Implements `Drafter` with what the last step of each request guessed."""

    def receive(self, request: Request, token_ids: list[int]) -> None:
        """Take what a step guessed to follow all tokens of a request."""
        predicted = record_of(request).kept(self, _Predicted)
        predicted.num_tokens, predicted.token_ids = len(request.token_ids), token_ids

    def propose(self, request: Request, ahead: list[int], most: int) -> Guess:
        predicted, num_ahead = record_of(request).kept(self, _Predicted), len(ahead)
        if predicted.num_tokens != len(request.token_ids) or predicted.token_ids[:num_ahead] != ahead:
            return NO_GUESS
        token_ids = predicted.token_ids[num_ahead : num_ahead + most]
        return Guess(token_ids, [1.0] * len(token_ids))

    def ended(self, request: Request) -> None:
        pass

    def clear(self) -> None:
        pass


class ModelSpeculation(AdaptiveSpeculation):
    """Implements `Speculation` with a model's guesses, which cost time in each step that makes them.

    How many tokens the model guesses, if any, is the number that yields most tokens per second. What steps cost with
    each number is measured: first a few times, then now and then, as it may turn out to be more or less.
    """

    def __init__(
        self,
        model: ModelDrafter,
        most: int,
        others: Sequence[Drafter] = (),
        constraints: Constraints | None = None,
        predictions: Drafter | None = None,
        read_ahead: int = 0,
    ) -> None:
        super().__init__([model, *others], most, constraints, predictions)
        self.read_ahead = read_ahead
        self._model = model
        self._num_wanted = most
        self._by_number = [StepCosts() for _ in range(most + 1)]  # of guesses
        self._num_steps = 0  # with decodes

    def num_wanted(self, step: ScheduledStep) -> int:
        number = self._num_wanted
        if step.batch.num_decodes:
            self._num_steps += 1
            worth = self._worth(step.batch.num_decodes)
            number = self._num_wanted = max(range(len(worth)), key=worth.__getitem__, default=0)
            turn, rest = divmod(self._num_steps, TRIAL_INTERVAL)
            if not rest and turn % (self._most + 1) < len(worth):
                number = turn % (self._most + 1)
            if rest and self._num_plain > PROBE_INTERVAL:  # whatever the model guesses, it is not verified
                number = self._num_wanted = 0
        self._costs = self._by_number[number]
        return number

    def _worth(self, num_decodes: int) -> list[float]:
        """Return the tokens per second with each number of guesses that may pay. Numbers that were hardly tried are
        expected to cost nothing."""
        without = self._by_number[0]
        if not without.knows(num_decodes, NUM_FIRST_STEPS):
            return []
        worth = [num_decodes / without.estimate(num_decodes)]
        returned = reached = 1.0
        for number, place in enumerate(self._places[0], 1):
            reached *= place.estimate(FIRST_PROBABILITY)
            if reached < MIN_PROBABILITY:  # it would not be verified
                break
            returned += reached
            costs = self._by_number[number]
            costs = costs if costs.num_observed >= NUM_FIRST_STEPS else without
            worth.append(num_decodes * returned / costs.estimate(num_decodes * (1 + number)))
        if max(worth) == worth[0]:
            for place in self._places[0]:
                place.fade(RECOVERY)
        return worth

    def settle(self, step: ScheduledStep, sampled: Sampled) -> None:
        super().settle(step, sampled)
        for entry, token_ids in sampled.drafts.items():
            record_of(step.requests[entry], len(self._drafters))
            self._model.receive(step.requests[entry], token_ids)

    def observe(self, batch: Batch, seconds: float, waited: float = 0.0) -> None:
        number = max(batch.wanted_drafts, default=0)
        if batch.wanted_drafts and not number:  # the predictor read parts of prompts, and guessed nothing
            return
        if waited:
            self._note_wait(waited)
        if number != self._num_wanted:  # tried, or at the end of all requests
            self._by_number[number].observe(batch.num_tokens, seconds, TRIAL_WEIGHT)
            return
        factor = self._by_number[number].observe(batch.num_tokens, seconds)
        for other, costs in enumerate(self._by_number):
            if other != number:  # contexts and the machine's load change these, too
                costs.scale(1 + (factor - 1) / 2)
