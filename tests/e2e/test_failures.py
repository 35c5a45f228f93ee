"""A step that fails ends no request but the one that made it fail; a request that fails, fails alone."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from inflight import LLM, RequestOutput, SamplingParams
from inflight.errors import EngineError
from inflight.models.decoders.decoder import Decoder
from tests.e2e.breaking import BreakingRunner, PoisonedRunner, begins_with
from tests.e2e.conftest import Folder
from tests.e2e.policies import GREEDY_CONTINUOUS

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[i] * length for i, length in ((5, 3), (6, 25), (7, 9), (8, 40), (9, 2), (10, 17))]

# Few rows, or few tokens a step, so that some requests are not in the step that fails.
OPTIONS: dict[str, dict[str, Any]] = {
    "rows": {"max_num_seqs": 2},
    "chunks": {"max_num_batched_tokens": 10, "block_size": 4},
    "scarce": {"num_blocks": 14, "block_size": 4, "policy": GREEDY_CONTINUOUS},
    "static": {"policy": "static", "max_num_seqs": 3},
    "fair": {"policy": "fair", "max_num_seqs": 3, "block_size": 4},
}


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


def answers(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def check_balance(llm: LLM) -> None:
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv.num_used) == (0, 0, 0)
    assert stats.kv.num_empty + stats.kv.num_cached == stats.kv.num_blocks
    llm._engine.core.scheduler.pool.check()


@pytest.fixture(scope="module")
def expected(folder: Folder) -> list[list[int]]:
    """The answers where nothing fails."""
    return answers(LLM(folder()).generate(PROMPTS, GREEDY))


@pytest.fixture(scope="module")
def rich(folder: Folder) -> list[RequestOutput]:
    """The answers with all optional outputs where nothing fails."""
    return LLM(folder()).generate(PROMPTS, RICH)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("method", ["launch", "collect"])
@pytest.mark.parametrize("at", [1, 2, 6])
def test_step_that_fails_once_loses_no_answer(
    name: str, depth: int, method: str, at: int, folder: Folder, expected: list[list[int]]
) -> None:
    llm = LLM(folder(), pipeline_depth=depth, **OPTIONS[name])
    BreakingRunner(llm._engine.core, method, at)
    assert answers(llm.generate(PROMPTS, GREEDY)) == expected
    check_balance(llm)
    assert answers(llm.generate(PROMPTS, GREEDY)) == expected
    check_balance(llm)


# All that a request may ask for and that a fresh start could spoil.
RICH = [
    replace(GREEDY, logprobs=3, prompt_logprobs=2),
    replace(GREEDY, temperature=1.0, seed=7, n=3, logprobs=0),
    replace(GREEDY, temperature=0.8, seed=8, top_p=0.9, top_k=40, min_p=0.01),
    replace(GREEDY, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5),
    replace(GREEDY, temperature=1.2, seed=9, logit_bias={3: 5.0}, repetition_penalty=1.1, prompt_logprobs=0),
    replace(GREEDY, min_tokens=4, n=2, temperature=1.0, seed=1),
]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("method", ["launch", "collect"])
def test_request_that_breaks_its_steps_fails_alone(
    name: str, depth: int, method: str, folder: Folder, rich: list[RequestOutput]
) -> None:
    llm = LLM(folder(), pipeline_depth=depth, **OPTIONS[name])
    PoisonedRunner(llm._engine.core, begins_with(50), method)
    prompts = [*PROMPTS[:2], [50, 3], *PROMPTS[2:], [50] * 20]
    for _ in range(2):
        outputs = llm.generate(prompts, [*RICH[:2], GREEDY, *RICH[2:], GREEDY])
        for bad in (outputs.pop(), outputs.pop(2)):
            assert bad.outputs[0].finish_reason == "error"
            assert "RuntimeError" in str(bad.outputs[0].error)
        for output, whole in zip(outputs, rich, strict=True):
            assert output.outputs == whole.outputs
            assert output.prompt_logprobs == whole.prompt_logprobs
        check_balance(llm)


@pytest.mark.parametrize("depth", [1, 2])
def test_error_is_raised_when_all_requests_fail(depth: int, folder: Folder) -> None:
    llm = LLM(folder(), pipeline_depth=depth)
    runner = PoisonedRunner(llm._engine.core, lambda batch: batch.step >= 3)
    with pytest.raises(EngineError, match="all 2 requests failed; the first with: RuntimeError"):
        llm.generate(PROMPTS[:2], GREEDY)
    check_balance(llm)
    llm._engine.core.runner = runner.real
    assert len(llm.generate(PROMPTS, GREEDY)) == len(PROMPTS)


@pytest.mark.parametrize("depth", [1, 2])
def test_prompt_logprobs_survive_a_failed_step(depth: int, folder: Folder) -> None:
    params = replace(GREEDY, prompt_logprobs=1)
    options: dict[str, Any] = {"max_num_batched_tokens": 10, "block_size": 4, "pipeline_depth": depth}
    expected = LLM(folder(), **options).generate(PROMPTS, params)
    llm = LLM(folder(), **options)
    BreakingRunner(llm._engine.core, "collect", 4)
    for output, whole in zip(llm.generate(PROMPTS, params), expected, strict=True):
        assert output.prompt_logprobs == whole.prompt_logprobs


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_fail_one_request(depth: int, temperature: float, folder: Folder) -> None:
    # So little memory that the others must use the blocks in which the bad request left its NaNs.
    llm = LLM(folder(), num_blocks=24, block_size=4, pipeline_depth=depth)
    params = replace(GREEDY, temperature=temperature, seed=3)
    expected = answers(llm.generate(PROMPTS, params))
    decoder = llm._engine.model
    assert isinstance(decoder, Decoder)
    embedding = decoder.embedding
    assert embedding is not None
    unused = set(range(20, 320)).difference(*expected).pop()
    embedding[unused] = torch.nan
    prompts = [*PROMPTS[:3], [unused] * 30, *PROMPTS[3:]]
    for _ in range(2):
        outputs = llm.generate(prompts, params)
        bad = outputs.pop(3).outputs[0]
        assert bad.finish_reason == "error"
        assert "not finite" in str(bad.error)
        assert bad.token_ids == []
        assert answers(outputs) == expected
        check_balance(llm)


def test_no_token_left_to_choose_fails_one_request(folder: Folder) -> None:
    llm = LLM(folder())
    impossible = replace(GREEDY, allowed_token_ids=[40], bad_words=[llm.get_tokenizer().decode([40])])
    outputs = llm.generate([PROMPTS[0], PROMPTS[1]], [impossible, GREEDY])
    assert outputs[0].outputs[0].finish_reason == "error"
    assert outputs[0].outputs[0].error == "the sampling parameters allow no token"
    assert answers(outputs[1:]) == answers(LLM(folder()).generate([PROMPTS[1]], GREEDY))
    check_balance(llm)
