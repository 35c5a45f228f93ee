"""Several ranks on one GPU give the tokens of one. They take turns on it, so every sum takes milliseconds."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any, NamedTuple

import pytest

from inflight import LLM, SamplingParams
from inflight.errors import ConfigError, DeviceLostError
from inflight.execution.gpu.device import StepGraphs
from inflight.execution.gpu.runner import GpuRunner
from inflight.execution.parallel.rank_processes import RankProcess
from inflight.execution.parallel.runner import MirroredRunner
from tests.support.steps import observe

PROMPTS = [[i * 7 % 500 + 1 for i in range(length)] for length in (3, 17, 60, 33, 9, 21, 5)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.9, top_k=20, seed=7, repetition_penalty=1.2, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1.2, top_p=0.8, seed=3, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, prompt_logprobs=1),
    SamplingParams(temperature=0.7, seed=1, logit_bias={5: 3.0}, max_tokens=24, ignore_eos=True),
    SamplingParams(
        temperature=1.1,
        top_k=40,
        top_p=0.9,
        min_p=0.02,
        presence_penalty=0.5,
        seed=5,
        logprobs=3,
        allowed_token_ids=list(range(3, 250)),
        max_tokens=24,
        ignore_eos=True,
    ),
    SamplingParams(temperature=1.5, seed=9, logprobs=0, bad_words=["the"], max_tokens=24, ignore_eos=True),
]


SCARCE: dict[str, Any] = {"num_blocks": 16, "max_model_len": 128, "max_num_batched_tokens": 24}
CASES: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel_size": 2},
    "tensor-depth-1": {"tensor_parallel_size": 2, "pipeline_depth": 1},
    "tensor-scarce": {"tensor_parallel_size": 2, **SCARCE},
    "stages": {"pipeline_parallel_size": 2},
    "stages-scarce": {"pipeline_parallel_size": 2, **SCARCE},
    "tensor-and-stages": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}


class RankAnswer(NamedTuple):
    token_ids: list[int]
    logprobs: list[float]  # of all reported tokens
    ranks: list[int]


def answers(**options: Any) -> list[RankAnswer]:
    sizes: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 16, "max_num_batched_tokens": 64}
    with LLM(show_progress=False, **sizes | {"num_blocks": 400} | options) as llm:
        outputs = llm.generate(PROMPTS * 2, PARAMS * 2, use_tqdm=False)
        runner = llm._engine.core.runner
        if isinstance(runner, MirroredRunner):
            assert isinstance(runner._runner, GpuRunner)
            assert isinstance(runner._runner.steps, StepGraphs)  # with the sums inside
    actual = []
    for output in outputs:
        (sequence,) = output.outputs
        logprobs = [each for position in sequence.logprobs or () for each in position.values()]
        actual.append(
            RankAnswer(sequence.token_ids, [t.logprob for t in logprobs], [t.rank for t in logprobs])
        )
    return actual


@pytest.fixture(scope="module")
def expected() -> list[RankAnswer]:
    return answers()


@pytest.mark.parametrize("case", CASES)
def test_several_ranks_on_one_device_give_the_tokens_of_one(expected: list[RankAnswer], case: str) -> None:
    actual = answers(**CASES[case])
    # A sum that rounds differently may change one sample in thousands; the rest of that answer then differs.
    same = [(a, b) for a, b in zip(actual, expected, strict=True) if a.token_ids == b.token_ids]
    assert len(same) >= len(expected) - 1
    for one, other in same:
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)
        assert sum(a != b for a, b in zip(one.ranks, other.ranks, strict=True)) <= len(one.ranks) // 20


def test_ranks_that_share_a_device_need_num_blocks() -> None:
    with pytest.raises(ConfigError, match="need num_blocks"):
        LLM(show_progress=False, tensor_parallel_size=8, pipeline_parallel_size=8)


def test_killed_rank_ends_the_step_in_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank's device waits for it in the middle of a step."""
    made: list[RankProcess] = []
    create = RankProcess.__init__

    def remember(self: RankProcess, *args: Any) -> None:
        create(self, *args)
        made.append(self)

    monkeypatch.setattr(RankProcess, "__init__", remember)
    llm = LLM(
        show_progress=False,
        num_blocks=400,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        tensor_parallel_size=2,
    )
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    llm.generate([PROMPTS[0]], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    (rank,) = made
    assert rank.process_id is not None
    process_id = rank.process_id

    def kill(_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGKILL)

    observe(llm._engine.core, kill)
    with pytest.raises(DeviceLostError, match=r"rank 1 of 2 \(process \d+\) ended by SIGKILL"):
        llm.generate([PROMPTS[0]], params, use_tqdm=False)
    llm.close()
