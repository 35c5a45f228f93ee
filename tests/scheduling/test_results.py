"""Ends and results of requests by kind, several tokens per step, and prompts that cannot be split."""

from __future__ import annotations

from array import array

import pytest

from inflight.errors import RequestError
from inflight.events import TokenLogprob, pack_logprobs, unpack_logprobs
from inflight.sampling_params import SamplingParams
from inflight.scheduling.batch import Batch, Sampled
from tests.scheduling.guessing import guessing
from tests.support.fake_runner import FakeRunner, expected_scores, expected_tokens, expected_vector
from tests.support.requests import FakeEngine, make_request

SCORES = SamplingParams(prompt_logprobs=0, temperature=0)
GREEDY = SamplingParams(temperature=0)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", ["continuous", "static"])
@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_scored_prompt_ends_when_it_is_computed(depth: int, policy: str, chunk: int) -> None:
    engine = FakeEngine(policy, pipeline_depth=depth, max_num_batched_tokens=chunk)
    prompts = [[1, 2, 3, 4, 5], [7], [1, 2, 3, 4, 9, 9]]
    scored = [
        engine.add(make_request(prompt, 0, params=SCORES, task="prompt_logprobs")) for prompt in prompts
    ]
    other = engine.add(make_request([8, 8], 6))
    engine.run()
    for request, prompt in zip(scored, prompts, strict=True):
        name = request.request_id
        assert engine.scores[name] == expected_scores(prompt)
        assert engine.outputs[name] == []
        assert engine.finished[name].finish_reason == "length"
    assert engine.outputs[other.request_id] == expected_tokens([8, 8], 6)
    slots = [slot for record in engine.records for slot in record.slots]
    computed = [slot for slot in slots if slot.request_id != other.request_id]
    assert sum(slot.num_tokens for slot in computed) == sum(map(len, prompts)), "and not a token more"
    assert not any(slot.samples for slot in computed)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("splittable", [True, False])
def test_pooled_texts_return_vectors_while_another_request_generates(depth: int, splittable: bool) -> None:
    engine = FakeEngine("continuous", pipeline_depth=depth, max_num_batched_tokens=7)
    texts = [[1, 2, 3, 4, 5], [7], [1, 2, 3, 4, 9, 9], [1, 2, 3, 4, 5]]
    pooled = [
        engine.add(make_request(text, 0, params=GREEDY, task="pool", splittable=splittable)) for text in texts
    ]
    other = engine.add(make_request([8, 8], 6))
    engine.run()
    for request, text in zip(pooled, texts, strict=True):
        name = request.request_id
        assert array("f", engine.vectors[name]).tolist() == expected_vector(text)
        assert engine.outputs[name] == []
        assert engine.finished[name].finish_reason == "stop"
    assert engine.outputs[other.request_id] == expected_tokens([8, 8], 6)


def test_scored_prompt_without_scores_is_only_computed() -> None:
    engine = FakeEngine()
    request = engine.add(make_request([1, 2, 3], 0, params=SamplingParams(), task="prompt_logprobs"))
    engine.run()
    assert engine.finished[request.request_id].prompt_logprobs is None


def test_runner_may_return_several_tokens_per_step() -> None:
    engine = FakeEngine(speculation=guessing(1.0, most=2, full=True), num_blocks=64)
    prompts = {name: [number] * 5 for number, name in enumerate("abc")}
    answers = {name: expected_tokens(prompt, 10) for name, prompt in prompts.items()}
    stop = answers["b"][4]
    engine.add(make_request(prompts["a"], 10, "a"))
    engine.add(make_request(prompts["b"], 10, "b", stop_ids=frozenset({stop})))
    waits = SamplingParams(temperature=0, min_tokens=7, max_tokens=10)
    engine.add(make_request(prompts["c"], 10, "c", stop_ids=frozenset(answers["c"][:9]), params=waits))
    engine.run()
    assert engine.outputs["a"] == answers["a"], "it has at most max_tokens"
    assert engine.outputs["b"] == answers["b"][: answers["b"].index(stop) + 1], (
        "what follows a stop is dropped"
    )
    assert engine.outputs["c"] == answers["c"][:8], "stops that come too early are none"
    assert engine.finished["b"].stop_token_id == stop
    assert len(engine.records) == 4, "ten tokens, three a step"


def test_several_tokens_have_as_many_logprobs() -> None:
    class Scored(FakeRunner):
        def launch(self, batch: Batch) -> Sampled:
            sampled = super().launch(batch)
            sampled.logprobs = {
                entry: [pack_logprobs([TokenLogprob(token_id, -1.0, 1)]) for token_id in token_ids]
                for entry, token_ids in enumerate(sampled.token_ids)
                if token_ids
            }
            return sampled

    engine = FakeEngine(make_runner=Scored, speculation=guessing(1.0, most=2, full=True))
    engine.add(make_request([1, 2], 5))
    deltas = [delta for _ in range(3) for delta in engine.core.step()]
    assert [len(delta.token_ids) for delta in deltas] == [1, 3, 1]
    for delta in deltas:
        assert delta.logprobs is not None
        assert [unpack_logprobs(position)[0].token_id for position in delta.logprobs] == delta.token_ids


def test_request_without_a_sampled_token_ends_with_an_error() -> None:
    engine = FakeEngine()
    unlucky, other = engine.add(make_request([1], 4)), engine.add(make_request([2], 4))
    launch = engine.runner.launch

    def forgetful(batch: Batch) -> Sampled:
        sampled = launch(batch)
        if len(batch) == 2:
            sampled.token_ids[0] = []
        return sampled

    engine.runner.launch = forgetful  # type: ignore[method-assign]
    engine.run()
    assert engine.finished[unlucky.request_id].error == "the step returned no token for this request"
    assert engine.outputs[other.request_id] == expected_tokens([2], 4)


@pytest.mark.parametrize("depth", [1, 2])
def test_unsplittable_prompt_waits_for_a_step_that_holds_it(depth: int) -> None:
    engine = FakeEngine(max_num_batched_tokens=16, num_blocks=64, pipeline_depth=depth)
    first = engine.add(make_request([1] * 30, 8))
    whole = engine.add(make_request([2] * 14, 3, splittable=False))
    engine.run()
    parts = [s.num_tokens for r in engine.records for s in r.slots if s.request_id == whole.request_id]
    assert parts == [14, 1, 1]
    assert engine.outputs[first.request_id] == expected_tokens([1] * 30, 8)
    assert engine.outputs[whole.request_id] == expected_tokens([2] * 14, 3)


def test_unsplittable_prompt_shares_no_blocks() -> None:
    engine = FakeEngine(num_blocks=64)
    for _ in range(2):
        engine.add(make_request([1] * 12, 2, splittable=False))
        engine.add(make_request([1] * 12, 2))
        engine.run()
    assert [
        record.num_cached_tokens for record in (d.record for d in engine.finished.values()) if record
    ] == [
        0,
        0,
        0,
        8,
    ]


def test_request_that_can_never_fit_is_rejected() -> None:
    engine = FakeEngine(max_num_batched_tokens=16)
    with pytest.raises(RequestError, match="has 17 tokens and cannot be split: a step has at most 16"):
        engine.core.add(make_request([1] * 10, 8, splittable=False))
    engine.add(make_request([1] * 10, 7, splittable=False))
    engine.add(make_request([1] * 16, 0, splittable=False, task="prompt_logprobs", params=SCORES))
    with pytest.raises(RequestError, match="already has all of its 2 output tokens"):
        engine.core.add(make_request([1, 2, 3], 2, num_prompt_tokens=1))
    engine.run()
