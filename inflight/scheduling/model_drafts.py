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
    RECOVERY,
    AdaptiveSpeculation,
    Constraints,
    Drafter,
    Guess,
    StepCosts,
    record_of,
)


@dataclass(slots=True)
class _Predicted:
    """What a step guessed."""

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

    How many tokens the model guesses, if any, is the number that yields most tokens per second: costs of steps are
    known for each number, and how often guesses were right by their place.
    """

    def __init__(
        self,
        model: ModelDrafter,
        most: int,
        others: Sequence[Drafter] = (),
        constraints: Constraints | None = None,
    ) -> None:
        super().__init__([model, *others], most, constraints)
        self._model = model
        self._num_wanted = most
        self._by_number = [StepCosts() for _ in range(most + 1)]  # of guesses

    def num_wanted(self, step: ScheduledStep) -> int:
        if step.batch.num_decodes:
            self._num_wanted = self._best_number(step.batch.num_decodes)
        self._costs = self._by_number[self._num_wanted]
        return self._num_wanted

    def _best_number(self, num_decodes: int) -> int:
        """Return how many guesses pay for this many decodes. Numbers that were never tried are expected to be cheap."""
        without = self._by_number[0]
        if not without.knows(num_decodes):
            return 0
        best, rate = 0, num_decodes / without.estimate(num_decodes)
        returned = reached = 1.0
        for number, place in enumerate(self._places[0], 1):
            reached *= place.estimate(FIRST_PROBABILITY)
            if reached < MIN_PROBABILITY:  # it would not be verified
                break
            returned += reached
            costs = self._by_number[number]
            seconds = (costs if costs.reach else without).estimate(num_decodes * (1 + number))
            if num_decodes * returned / seconds > rate:
                best, rate = number, num_decodes * returned / seconds
        if not best:
            for place in self._places[0]:
                place.fade(RECOVERY)
        return best

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
        factor = self._by_number[number].observe(batch.num_tokens, seconds)
        for costs in self._by_number:
            if costs is not self._by_number[number]:
                costs.scale(factor)
