"""Drafters, and how many drafts a step verifies."""

from __future__ import annotations

from array import array
from random import Random
from typing import Any

import pytest

from inflight.config import SchedulerConfig, SpeculationConfig
from inflight.errors import ConfigError
from inflight.kv.layout import KVLayout
from inflight.loading.engine import make_speculation
from inflight.request import Request
from inflight.scheduling.batch import Batch
from inflight.scheduling.drafts import AdaptiveSpeculation, Guess, record_of
from inflight.scheduling.lookup import SEPARATOR, Lookup, Predictions, TokenIndex
from inflight.scheduling.scheduler import NoSpeculation
from inflight.scheduling.step_costs import StepCosts
from tests.constraints.walking import compiler
from tests.scheduling.guessing import FreeSteps, Guesser
from tests.support.fake_runner import PLAIN, expected_tokens
from tests.support.requests import FakeEngine, make_request

SUFFIX = SpeculationConfig("suffix")


def proposed(lookup: Lookup, tokens: list[int], most: int = 16, **fields: Any) -> Guess:
    return lookup.propose(make_request(tokens, 50, **fields), [], most)


# ---- lookups ----


def test_text_that_stood_before_is_continued() -> None:
    assert proposed(Lookup(SUFFIX), [1, 2, 3, 4, 5, 9, 1, 2, 3]).token_ids == [4, 5, 9]
    assert proposed(Lookup(SUFFIX), [1, 2, 3, 4, 5, 9, 1, 2, 3], most=1).token_ids == [4]


def test_what_never_stood_before_has_no_draft() -> None:
    assert proposed(Lookup(SUFFIX), [1, 2, 3, 4, 5]).token_ids == []
    assert proposed(Lookup(SUFFIX), [1]).token_ids == []


def test_longer_match_makes_a_longer_draft() -> None:
    text = [*range(10), 99, *range(20, 40), 7, *range(20, 28)]
    assert proposed(Lookup(SUFFIX), text).token_ids == [*range(28, 36)], "eight tokens match"
    twice = SpeculationConfig("suffix", suffix_decoding_max_spec_factor=0.5)
    assert proposed(Lookup(twice), text).token_ids == [*range(28, 32)]


def test_most_frequent_continuation_is_followed() -> None:
    text = [1, 2, 7, 10, 1, 2, 8, 11, 1, 2, 8, 12, 1, 2]
    draft = proposed(Lookup(SUFFIX), text, most=1)
    assert (draft.token_ids, draft.probabilities) == ([8], [2 / 3])


def test_unlikely_continuations_are_left_out() -> None:
    text = [token for end in range(10, 20) for token in (1, 2, end, 0)] + [1, 2]
    careful = SpeculationConfig("suffix", suffix_decoding_min_token_prob=0.5)
    assert proposed(Lookup(careful), text).token_ids == []


def test_index_grows_with_the_request() -> None:
    lookup, request = Lookup(SUFFIX), make_request([1, 2, 3], 50)
    assert lookup.propose(request, [], 4).token_ids == []
    request.token_ids += [4, 1, 2]
    assert lookup.propose(request, [], 4).token_ids == [3, 4]


def ended(lookup: Lookup, prompt: list[int], answer: list[int], **fields: Any) -> None:
    request: Request = make_request(prompt, 50, **fields)
    request.token_ids += answer
    lookup.ended(request)


def test_earlier_answers_are_looked_up_but_not_their_prompts() -> None:
    lookup = Lookup(SUFFIX)
    ended(lookup, [50, 51, 52], [1, 2, 3, 4, 5])
    assert proposed(lookup, [9, 1, 2]).token_ids == [3, 4]
    assert proposed(lookup, [9, 50, 51]).token_ids == []
    assert proposed(lookup, [9, 4, 5]).token_ids == [], "nothing follows the end of an answer"


def test_answers_are_seen_only_by_those_who_share_prefixes_with_them() -> None:
    lookup = Lookup(SUFFIX)
    ended(lookup, [9], [1, 2, 3, 4], cache_salt="a")
    assert proposed(lookup, [8, 1, 2], cache_salt="a").token_ids == [3, 4]
    assert proposed(lookup, [8, 1, 2], cache_salt="b").token_ids == []
    lookup.clear()
    assert proposed(lookup, [8, 1, 2], cache_salt="a").token_ids == []


def test_old_answers_are_forgotten() -> None:
    lookup = Lookup(SpeculationConfig("suffix", suffix_decoding_max_cached_requests=4))
    for number in range(9):
        ended(lookup, [9], [number, 10, 11 + number, 12])
        indices = [*lookup._answers.values(), *lookup._older.values()]
        assert sum(index.tokens.count(SEPARATOR) for index in indices) <= 4
    assert proposed(lookup, [8, 0, 10]).token_ids == []
    assert proposed(lookup, [8, 8, 10]).token_ids == [19, 12]


def test_long_answers_make_room_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inflight.scheduling.lookup.MAX_ANSWER_TOKENS", 1000)
    lookup = Lookup(SUFFIX)
    for number in range(50):
        ended(lookup, [9], [number, *range(1000, 1099)])
    assert sum(len(index.tokens) for index in (*lookup._answers.values(), *lookup._older.values())) < 1300
    assert proposed(lookup, [8, 49, 1000]).token_ids == [1001, 1002]


def test_long_prompts_are_indexed_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inflight.scheduling.lookup.INDEXED_AT_ONCE", 10)
    lookup, request = Lookup(SUFFIX), make_request([*range(20), 0, 1, 2], 50)
    assert [lookup.propose(request, [], 4).token_ids for _ in range(3)] == [[], [], [3, 4, 5]]


def predicting(prediction: list[int], outputs: list[int], most: int = 16) -> list[int]:
    request = make_request([7, 7, 1, 2], 50, prediction_ids=array("q", prediction))
    request.token_ids += outputs
    return Predictions(SUFFIX).propose(request, [], most).token_ids


def test_prediction_is_followed_from_its_beginning() -> None:
    assert predicting([1, 2, 3, 4, 5], []) == [1, 2, 3, 4, 5], "prompts play no role"
    assert predicting([1, 2, 3, 4, 5], [1]) == [2, 3, 4, 5]
    assert predicting([1, 2, 3, 4, 5], [1, 2, 3], most=1) == [4]
    assert predicting([1, 2, 3], [1, 2, 3]) == []
    assert predicting([], [1, 2, 3]) == []


def test_prediction_resumes_where_the_last_tokens_stand_in_it() -> None:
    assert predicting([1, 2, 3, 4, 5, 6, 7], [1, 9]) == []
    assert predicting([1, 2, 3, 4, 5, 6, 7], [1, 9, 4, 5]) == [6, 7]
    assert predicting([1, 2, 3, 1, 2, 8], [5, 3, 1, 2]) == [8]


def test_long_predictions_are_indexed_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inflight.scheduling.lookup.INDEXED_AT_ONCE", 10)
    drafter, prediction = Predictions(SUFFIX), [*range(25)]
    request = make_request([7], 50, prediction_ids=array("q", prediction))
    request.token_ids += [20, 21]
    assert [drafter.propose(request, [], 2).token_ids for _ in range(3)] == [[], [], [22, 23]]


def test_ngram_looks_at_the_requests_own_text_only() -> None:
    lookup = Lookup(SpeculationConfig("ngram", prompt_lookup_min=3, prompt_lookup_max=4))
    ended(lookup, [9], [1, 2, 3, 4, 5])
    assert proposed(lookup, [8, 1, 2, 3]).token_ids == []
    assert proposed(lookup, [1, 2, 3, 4, 5, 6, 7, 2, 3]).token_ids == [], "two tokens match"
    assert proposed(lookup, [1, 2, 3, 4, 5, 6, 7, 1, 2, 3], most=4).token_ids == [4, 5, 6, 7]


def test_lookup_stays_fast_where_everything_matches() -> None:
    lookup, request = Lookup(SUFFIX), make_request([5] * 20_000, 50)
    while not (guess := lookup.propose(request, [], 16)).token_ids:
        pass
    assert guess.token_ids == [5] * 16
    (places,) = record_of(request).kept(lookup, lambda: TokenIndex(2))._places.values()
    assert len(places) < 100


# ---- what a step costs ----


def test_costs_are_interpolated_between_observed_sizes() -> None:
    costs = StepCosts()
    for _ in range(2):
        costs.observe(2, 0.010)
        costs.observe(6, 0.014)
    sizes = (1, 2, 4, 6, 8)
    assert [costs.estimate(size) for size in sizes] == pytest.approx([0.009, 0.010, 0.012, 0.014, 0.016])
    assert costs.knows(6)
    assert not costs.knows(4)
    assert costs.reach == 7, "little is risked on sizes that nobody has seen"


def test_costs_follow_the_machine() -> None:
    costs = StepCosts()
    for _ in range(50):
        costs.observe(1, 0.010)
        costs.observe(4, 0.012)
    for _ in range(100):
        costs.observe(1, 0.020)  # it is shared now
    assert costs.estimate(1) == pytest.approx(0.020, rel=0.1)
    assert costs.estimate(4) > 0.018, "it is taken to be slower as well, without having been observed"


def test_slow_first_step_is_forgotten() -> None:
    costs = StepCosts()
    for seconds in (0.500, 0.011, 0.010, 0.010):
        costs.observe(2, seconds)
    assert costs.estimate(2) == pytest.approx(0.010)


def test_size_that_was_slow_at_first_is_tried_again() -> None:
    costs = StepCosts()
    for _ in range(4):
        costs.observe(1, 0.010)
    costs.observe(2, 0.050)
    assert costs.estimate(2) < 0.012
    assert costs.reach == 2
    costs.observe(2, 0.011)
    assert costs.estimate(2) == pytest.approx(0.011)
    assert costs.reach == 3


def test_costs_of_a_size_change_by_themselves() -> None:
    costs = StepCosts()
    for _ in range(400):
        costs.observe(1, 0.010)
        costs.observe(4, 0.012 if costs._counts.get(4, 0) > 4 else 0.030)
    assert costs.estimate(1) == pytest.approx(0.010, rel=0.05)
    assert costs.estimate(4) == pytest.approx(0.012, rel=0.05)


# ---- how many ----


class Machine(AdaptiveSpeculation):
    """Learns from steps that take so many seconds for so many tokens."""

    def __init__(self, odds: float, base: float, per_token: float) -> None:
        super().__init__([Guesser(odds, PLAIN, seed=1, full=True)], 3)
        self._line = base, per_token
        self.seconds = 0.0

    def observe(self, batch: Batch, seconds: float, waited: float = 0.0) -> None:  # noqa: ARG002
        base, per_token = self._line
        took = base + per_token * batch.num_tokens
        self.seconds += took
        super().observe(batch, took)


def seconds_for(machine: Machine, num_requests: int, max_tokens: int = 150) -> float:
    engine = FakeEngine(num_blocks=4000, max_num_seqs=64, speculation=machine)
    prompts = [[index, 1, 2] for index in range(num_requests)]
    for index, prompt in enumerate(prompts):
        engine.add(make_request(prompt, max_tokens, f"r{index}"))
    engine.run()
    assert engine.outputs["r0"] == expected_tokens(prompts[0], max_tokens)
    return machine.seconds


def ratio(odds: float, num_requests: int, base: float, per_token: float) -> float:
    """How many times as fast the engine is with drafts."""
    none = base * 150 + per_token * (150 * num_requests + 2 * num_requests)
    return none / seconds_for(Machine(odds, base, per_token), num_requests)


def test_drafts_that_are_right_speed_up_where_steps_hardly_cost_more() -> None:
    assert ratio(1.0, 1, base=1.0, per_token=0.02) > 3
    assert ratio(0.8, 1, base=1.0, per_token=0.02) > 2
    assert ratio(0.8, 8, base=1.0, per_token=0.02) > 1.5


@pytest.mark.parametrize("num_requests", [1, 8])
def test_drafts_that_are_wrong_cost_next_to_nothing(num_requests: int) -> None:
    assert ratio(0.0, num_requests, base=1.0, per_token=0.05) > 0.97


@pytest.mark.parametrize("odds", [0.0, 0.8, 1.0])
def test_drafts_stop_where_every_token_costs_as_much(odds: float) -> None:
    """As with many requests on any machine: then a draft costs as much as a token of another request."""
    assert ratio(odds, 16, base=0.0, per_token=1.0) > 0.97


def test_wrong_drafts_end_where_larger_steps_seem_faster() -> None:
    """As they may on a busy machine."""
    machine = Machine(0.0, base=1.0, per_token=-0.05)
    seconds_for(machine, 1)
    assert machine.stats.num_drafted < 40


def test_refused_requests_do_not_stop_others() -> None:
    right, wrong = Guesser(1.0, PLAIN, seed=1, full=True), Guesser(0.0, PLAIN, seed=2, full=True)

    class Mixed:
        def propose(self, request: Request, ahead: list[int], most: int) -> Guess:
            return (right if request.request_id == "right" else wrong).propose(request, ahead, most)

        def ended(self, request: Request) -> None:
            pass

        def clear(self) -> None:
            pass

    drafting = AdaptiveSpeculation([Mixed()], 3)
    engine = FakeEngine(num_blocks=400, speculation=drafting)
    requests = [engine.add(make_request([1, 2], 120, name)) for name in ("right", "wrong")]
    while engine.core.has_work:
        engine.step()
        drafting._costs = StepCosts()  # instead of the fake engine's clock
        for size in [*range(1, 10)] * 2:
            drafting._costs.observe(size, 1.0 + 0.1 * size)
    accepted, refused = (request.record for request in requests)
    assert accepted.num_accepted_tokens > 80
    assert refused.num_drafted_tokens < 40


def test_drafter_that_is_right_is_preferred_to_one_that_is_not() -> None:
    drafters = [Guesser(odds, PLAIN, seed=3, full=True) for odds in (0.0, 1.0, 0.5)]
    drafting = AdaptiveSpeculation(drafters, 3)
    drafting._costs = FreeSteps()
    engine = FakeEngine(num_blocks=400, speculation=drafting)
    request = engine.add(make_request([1, 2], 150))
    engine.run()
    assert request.record.num_accepted_tokens > 0.9 * request.record.num_drafted_tokens > 90
    assert all(drafter.num_ended == 1 for drafter in drafters)


def test_drafts_never_exceed_the_room_of_a_step() -> None:
    rng = Random(0)
    for _ in range(30):
        limit = rng.randint(4, 12)
        layout = KVLayout(4)
        engine = FakeEngine(
            num_blocks=rng.randint(12, 40),
            max_num_seqs=4,
            max_num_batched_tokens=limit,
            max_kv_tokens=rng.randint(30, 60),
            speculation=AdaptiveSpeculation([Guesser(0.7, layout, seed=rng.randrange(99), full=True)], 6),
        )
        for number in range(5):
            engine.add(make_request([number, 1], 20, f"r{number}"))
        engine.run()
        assert all(sum(slot.num_tokens for slot in record.slots) <= limit for record in engine.records)
        assert all(engine.outputs[f"r{n}"] == expected_tokens([n, 1], 20) for n in range(5))


# ---- options ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "method is None: it must be one of auto, mtp, eagle3, draft_model, suffix, ngram, grammar"),
        ({"method": "eagle"}, "method is 'eagle'"),
        ({"method": "eagle3"}, "model is None: with method eagle3, it must name a checkpoint"),
        ({"method": "eagle3", "model": 3}, "model is 3: with method eagle3, it must name a checkpoint"),
        ({"method": "mtp", "model": "a"}, "model is 'a': with method mtp, it must be left out"),
        ({"method": "suffix", "tokens": 3}, "speculative_config has tokens: allowed are method, "),
        (
            {"method": "suffix", "num_speculative_tokens": 0},
            "num_speculative_tokens is 0: it must be an integer",
        ),
        ({"method": "suffix", "num_speculative_tokens": 2.5}, "num_speculative_tokens is 2.5"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 2}, "it must be a number from 0 to 1"),
        (
            {"method": "ngram", "prompt_lookup_min": 6},
            "prompt_lookup_min is 6: it must be at most prompt_lookup_max",
        ),
    ],
)
def test_wrong_options_are_rejected_in_one_line(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        SpeculationConfig.from_options(options)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_without_the_option_nothing_is_drafted() -> None:
    assert isinstance(make_speculation(SchedulerConfig(), compiler()), NoSpeculation)
    options = SchedulerConfig(speculative_config={"method": "auto"})
    assert isinstance(make_speculation(options, compiler()), AdaptiveSpeculation)
