"""Drafters that know what the fake model will say, and lie as often as they are asked to."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from inflight.constraints.drafts import GrammarDrafts
from inflight.kv.layout import KVLayout
from inflight.request import Request
from inflight.scheduling.batch import ScheduledStep
from inflight.scheduling.drafts import AdaptiveSpeculation, Constraints, Drafter, Guess
from inflight.scheduling.model_drafts import ModelDrafter, ModelSpeculation
from inflight.scheduling.step_costs import StepCosts
from tests.support.fake_runner import PLAIN, expected_tokens


class Guesser:
    """Implements `Drafter`: each token is right with a probability, independently. Drafts have any length, or all."""

    def __init__(self, odds: float, layout: KVLayout, seed: int, full: bool) -> None:
        self._odds = odds
        self._full = full
        self._layout = layout
        self._random = Random(seed)
        self.num_ended = 0

    def propose(self, request: Request, ahead: list[int], most: int) -> Guess:
        assert len(request.token_ids) == request.num_tokens - 1, "all tokens but the next are known"
        known = [*request.token_ids, *ahead]
        count = most if self._full else self._random.randint(0, most)
        right = expected_tokens(known, count, layout=self._layout)
        ids = [token if self._random.random() < self._odds else self._random.randrange(50) for token in right]
        return Guess(ids, [1.0] * len(ids))

    def ended(self, request: Request) -> None:  # noqa: ARG002
        self.num_ended += 1

    def clear(self) -> None:
        pass


class FreeSteps(StepCosts):
    """All steps take the same time."""

    reach = 1 << 30

    num_observed = 1 << 30

    def knows(self, num_tokens: int, num_steps: int = 1) -> bool:  # noqa: ARG002
        return True

    def estimate(self, num_tokens: int) -> float:  # noqa: ARG002
        return 1.0


class Eager(AdaptiveSpeculation):
    """Verifies all drafts that there is room for, however often they are wrong."""

    def __init__(
        self, drafters: Sequence[Drafter], most: int, constraints: Constraints | None = None
    ) -> None:
        super().__init__(drafters, most, constraints)
        self._costs = FreeSteps()

    def _learn(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        pass


class EagerModel(ModelSpeculation):
    """Wants a model's guesses in every step, as many as it is asked to, and verifies all that there is room for."""

    def __init__(
        self,
        most: int,
        model: ModelDrafter | None = None,
        random: Random | None = None,
        grammars: GrammarDrafts | None = None,
    ) -> None:
        super().__init__(model or ModelDrafter(), most, [grammars] if grammars else [], grammars)
        self._by_number = [FreeSteps() for _ in range(most + 1)]
        self._random = random  # wants any number, or none, from step to step

    def num_wanted(self, step: ScheduledStep) -> int:
        super().num_wanted(step)
        return self._most if self._random is None else self._random.randint(0, self._most)

    def _learn(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        pass


def guessing(
    odds: float, layout: KVLayout = PLAIN, most: int = 3, seed: int = 0, full: bool = False
) -> AdaptiveSpeculation:
    return Eager([Guesser(odds, layout, seed, full)], most)
