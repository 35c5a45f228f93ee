"""Requests and settings drawn at random: in any company, every request gets what it gets alone."""

from __future__ import annotations

import random
from typing import Any

import pytest

from inflight import LLM, SamplingParams
from tests.e2e.conftest import Folder
from tests.e2e.policies import GREEDY_CONTINUOUS, GREEDY_FAIR, GREEDY_PRIORITY
from tests.scheduling.policies import NAMES
from tests.support.checkpoints import VOCAB_SIZE

POLICIES = (*NAMES, GREEDY_CONTINUOUS, GREEDY_PRIORITY, GREEDY_FAIR)
LONGEST = 80  # tokens of the longest request, outputs included: what memory must hold at least


def draw_requests(rng: random.Random) -> tuple[list[list[int]], list[SamplingParams]]:
    def ids(count: int) -> list[int]:
        return [rng.randrange(VOCAB_SIZE) for _ in range(count)]

    shared = ids(30)
    prompts = [
        shared[: rng.choice((0, rng.randint(1, 30)))] + ids(rng.randint(1, 20))
        for _ in range(rng.randint(2, 10))
    ]
    params = [
        SamplingParams(
            n=rng.choice((1, 1, 1, 2)),
            temperature=rng.choice((0, 0, 1.0)),
            top_p=rng.choice((1, 0.8)),
            repetition_penalty=rng.choice((1, 1.2)),
            seed=rng.randrange(100),
            max_tokens=rng.randint(1, 30),
            min_tokens=rng.choice((0, 1)),
            stop=rng.choice((None, "e", ["a", "th"])),
            stop_token_ids=rng.choice((None, [5, 9, 100, 200])),
            logprobs=rng.choice((None, 1)),
            prompt_logprobs=rng.choice((None, 1)),
        )
        for _ in prompts
    ]
    return prompts, params


def draw_options(rng: random.Random) -> dict[str, Any]:
    block_size = rng.choice((1, 2, 4, 8))
    return {
        "policy": rng.choice(POLICIES),
        "pipeline_depth": rng.choice((1, 2)),
        "block_size": block_size,
        "num_blocks": -(-rng.randint(LONGEST, 2 * LONGEST) // block_size),
        "max_num_batched_tokens": rng.choice((1, 2, 3, 5, 8, 30)),
        "max_num_seqs": rng.choice((1, 2, 3, 8)),
        "enable_prefix_caching": rng.random() < 0.8,
    }


@pytest.fixture(scope="module")
def alone(folder: Folder) -> LLM:
    return LLM(folder("qwen3"))


@pytest.mark.parametrize("seed", range(14))
def test_batch_and_settings_do_not_change_tokens(seed: int, folder: Folder, alone: LLM) -> None:
    rng = random.Random(seed)
    prompts, params = draw_requests(rng)
    llm = LLM(folder("qwen3"), **draw_options(rng))
    expected = [alone.generate([prompt], chosen)[0] for prompt, chosen in zip(prompts, params, strict=True)]
    for _ in range(2):  # with a cold cache, then with a warm one
        outputs = llm.generate(
            prompts,
            params,
            priority=[rng.randrange(3) for _ in prompts],
            tenant=[rng.choice("ab") for _ in prompts],
        )
        for output, whole in zip(outputs, expected, strict=True):
            for ours, theirs in zip(output.outputs, whole.outputs, strict=True):
                assert (ours.text, ours.token_ids) == (theirs.text, theirs.token_ids)
                assert (ours.finish_reason, ours.stop_reason) == (theirs.finish_reason, theirs.stop_reason)
                assert (ours.logprobs is None) == (theirs.logprobs is None)
                assert ours.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-3)
            assert (output.prompt_logprobs is None) == (whole.prompt_logprobs is None)
            assert len(output.prompt_logprobs or ()) == len(whole.prompt_logprobs or ())
        assert llm.stats().kv.num_used == 0
        llm._engine.core.scheduler.pool.check()
