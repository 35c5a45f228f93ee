"""How many tokens a model guesses, and where its guesses are used."""

from __future__ import annotations

from random import Random

import pytest

from inflight.config import SchedulerConfig
from inflight.errors import ConfigError
from inflight.kv.layout import KVLayout
from inflight.loading.engine import make_speculation
from inflight.scheduling.batch import Batch, ScheduledStep
from inflight.scheduling.model_drafts import ModelDrafter, ModelSpeculation
from tests.constraints.walking import compiler
from tests.scheduling.guessing import EagerModel
from tests.support.fake_runner import expected_tokens
from tests.support.requests import FakeEngine, make_request


def test_guesses_are_used_only_behind_the_tokens_that_they_follow() -> None:
    drafter, request = ModelDrafter(), make_request([1, 2, 3], 9)
    drafter.receive(request, [4, 5, 6])
    assert drafter.propose(request, [], 2).token_ids == [4, 5]
    assert drafter.propose(request, [4], 5).token_ids == [5, 6]
    assert drafter.propose(request, [7], 5).token_ids == []
    request.token_ids.append(4)
    assert drafter.propose(request, [], 3).token_ids == []


def step_of(num_decodes: int) -> ScheduledStep:
    return ScheduledStep(Batch(0, num_decodes=num_decodes))


def observe(speculation: ModelSpeculation, seconds_of_guess: float, seconds_of_token: float = 0.0) -> None:
    """Let it see what steps cost, with each number of guesses."""
    for number in 4 * [*range(4)]:
        for num_tokens in range(1, 65):
            batch = Batch(0, num_tokens=num_tokens, wanted_drafts=[number] if number else [])
            speculation.observe(batch, 1.0 + seconds_of_guess * number + seconds_of_token * num_tokens)


def learn(speculation: ModelSpeculation, rates: tuple[float, ...]) -> None:
    rng = Random(0)
    for _ in range(300):
        for place, rate in zip(speculation._places[0], rates, strict=True):
            place.add(rng.random() < rate)


@pytest.mark.parametrize(
    ("guess", "token", "rates", "expected"),
    [
        (0.05, 0.0, (0.9, 0.9, 0.9), 3),
        (0.05, 0.0, (0.9, 0.9, 0.01), 2),
        (0.05, 0.0, (0.0, 0.9, 0.9), 0),  # never right
        (1.5, 0.0, (0.9, 0.9, 0.9), 0),  # too slow
        (0.05, 1.0, (0.5, 0.5, 0.5), 0),  # steps as long as their tokens: under load
    ],
)
def test_model_guesses_as_many_tokens_as_pay(
    guess: float, token: float, rates: tuple[float, ...], expected: int
) -> None:
    speculation = ModelSpeculation(ModelDrafter(), 3)
    assert (
        speculation.num_wanted(step_of(0)) == 3
    )  # prompts run through the predictor before anything is known
    assert speculation.num_wanted(step_of(4)) == 0  # what does it cost without?
    observe(speculation, guess, token)
    learn(speculation, rates)
    assert speculation.num_wanted(step_of(4)) == expected
    assert speculation.num_wanted(step_of(0)) == expected  # prompts follow the last decision


def test_costs_that_were_wrong_are_found_out() -> None:
    speculation = ModelSpeculation(ModelDrafter(), 3)
    observe(speculation, 5.0)  # on a busy machine
    learn(speculation, (0.9, 0.9, 0.9))
    assert speculation.num_wanted(step_of(4)) == 0
    numbers = []
    for _ in range(40 * 128):
        numbers.append(number := speculation.num_wanted(step_of(4)))
        batch = Batch(0, num_tokens=4 * (1 + number), wanted_drafts=[number] if number else [])
        speculation.observe(batch, 1.0 + 0.05 * number)
    assert numbers[-100:].count(3) > 90


def test_model_that_was_wrong_is_tried_again() -> None:
    speculation = ModelSpeculation(ModelDrafter(), 3)
    observe(speculation, 0.01)
    learn(speculation, (0.0, 0.0, 0.0))
    steps = 0
    while not speculation.num_wanted(step_of(4)):
        steps += 1
    assert 100 < steps < 20_000


def test_guesses_get_only_blocks_that_nobody_else_needs() -> None:
    rng = Random(0)
    for _ in range(30):
        snapshots = rng.choice((0, 0, 2))
        engine = FakeEngine(
            num_blocks=rng.randint(12, 40),
            max_num_seqs=4,
            block_size=rng.choice((1, 2, 4)),
            snapshot_blocks=snapshots,
            max_num_batched_tokens=rng.randint(4, 12),
            speculation=EagerModel(rng.randint(1, 6), random=rng),
        )
        layout = KVLayout(4, snapshot_blocks=snapshots)
        for number in range(5):
            engine.add(make_request([number, 1], 8, f"r{number}"))
        engine.run()
        for number in range(5):
            assert engine.outputs[f"r{number}"] == expected_tokens([number, 1], 8, layout=layout)


def test_right_guesses_of_a_model_are_accepted() -> None:
    engine = FakeEngine(num_blocks=400, speculation=EagerModel(3))
    request = engine.add(make_request([1, 2], 150))
    engine.run()
    assert request.record.num_accepted_tokens > 60


class Counting(ModelSpeculation):
    """Counts the steps in which the model guesses."""

    num_steps = num_guessing = 0

    def observe(self, batch: Batch, seconds: float, waited: float = 0.0) -> None:
        super().observe(batch, seconds, waited)
        self.num_steps += 1
        self.num_guessing += bool(batch.wanted_drafts)


def test_model_stops_guessing_what_is_never_verified() -> None:
    """Steps have no room for drafts."""
    speculation = Counting(ModelDrafter(), 3)
    engine = FakeEngine(num_blocks=400, max_num_batched_tokens=1, speculation=speculation)
    engine.add(make_request([1], 600))
    engine.run()
    assert 0 < speculation.num_guessing < 100 < speculation.num_steps


def test_method_decides_who_drafts() -> None:
    def of(method: str, predicts: bool) -> object:
        return make_speculation(
            SchedulerConfig(speculative_config={"method": method}), compiler(), 0 if predicts else None
        )

    assert isinstance(of("mtp", True), ModelSpeculation)
    assert isinstance(of("auto", True), ModelSpeculation)
    assert not isinstance(of("auto", False), ModelSpeculation)
    assert not isinstance(of("suffix", True), ModelSpeculation)
    with pytest.raises(ConfigError, match="method is mtp, but the model was loaded without"):
        of("mtp", False)
