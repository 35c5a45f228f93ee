"""A result does not depend on the neighbours, nor on how the request was scheduled: to the last bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inflight import LLM, SamplingParams
from inflight.frontend.input_processor import InputProcessor
from inflight.layers.native.library import native_library
from inflight.layers.native_kernels import NativeKernels
from inflight.models.decoders.decoder import Decoder
from inflight.outputs import RequestOutput
from tests.e2e.conftest import Folder
from tests.e2e.policies import GREEDY_CONTINUOUS
from tests.e2e.reference import PROMPTS

NUM_TOKENS = 40
PARAMS = {
    "greedy": SamplingParams(temperature=0),
    "seeded": SamplingParams(temperature=0.9, seed=7),
    "nucleus": SamplingParams(temperature=1.3, top_p=0.8, min_p=0.01, seed=-3),
    "top-k-penalties": SamplingParams(
        temperature=1.1,
        top_k=50,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        seed=2**63,
    ),
    "greedy-penalties": SamplingParams(temperature=0, repetition_penalty=1.3, frequency_penalty=0.5),
    "biased": SamplingParams(
        temperature=0.7, seed=1, logit_bias={5: 3.0, 9: -100}, allowed_token_ids=range(4, 200)
    ),
}
PARAMS = {
    name: replace(params, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3)
    for name, params in PARAMS.items()
}

# The crowd that the request under test is one of: others' lengths and parameters of every kind.
CROWD = [(prompt, replace(params, seed=99)) for prompt in PROMPTS for params in PARAMS.values()]

SCARCE: dict[str, Any] = {"num_blocks": 40, "block_size": 4, "policy": GREEDY_CONTINUOUS}
SCENES: dict[str, dict[str, Any]] = {
    "crowd": {},
    "crowd-chunked": {"max_num_batched_tokens": 13},
    "crowd-scarce": SCARCE,
    "crowd-depth-2": {"pipeline_depth": 2},
    "crowd-scarce-depth-2-chunked": SCARCE | {"pipeline_depth": 2, "max_num_batched_tokens": 9},
    "crowd-static": {"policy": "static", "max_num_seqs": 4},
}


def answer(output: RequestOutput) -> tuple[list[int], list[dict[int, float]]]:
    """Tokens, and the logprobs of all candidates reported."""
    (only,) = output.outputs
    assert only.logprobs is not None
    return only.token_ids, [{i: candidate.logprob for i, candidate in at.items()} for at in only.logprobs]


def check_same(
    llm: LLM,
    together: tuple[list[int], list[dict[int, float]]],
    alone: tuple[list[int], list[dict[int, float]]],
) -> None:
    assert together[0] == alone[0]
    decoder = llm._engine.model
    assert isinstance(decoder, Decoder)
    if isinstance(decoder.kernels, NativeKernels):
        assert together[1] == alone[1]
    else:  # plain torch adds up in an order that depends on the shape of the batch
        for ours, theirs in zip(together[1], alone[1], strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.fixture(scope="module")
def alone(folder: Folder) -> dict[str, tuple[list[int], list[dict[int, float]]]]:
    """Every request by itself, in its own engine."""
    return {
        name: answer(LLM(folder("qwen3")).generate(PROMPTS[3], params)[0]) for name, params in PARAMS.items()
    }


def test_sample_requests_have_different_answers(alone: dict[str, Any]) -> None:
    assert len({tuple(tokens) for tokens, _ in alone.values()}) == len(PARAMS)


@pytest.mark.parametrize("scene", SCENES)
def test_other_requests_do_not_change_an_answer(scene: str, folder: Folder, alone: dict[str, Any]) -> None:
    llm = LLM(folder("qwen3"), **SCENES[scene])
    jobs: list[tuple[list[int], SamplingParams]] = []
    for index, params in enumerate(PARAMS.values()):
        jobs += [(PROMPTS[3], params), *CROWD[index * 5 : index * 5 + 5]]
    outputs = llm.generate([prompt for prompt, _ in jobs], [params for _, params in jobs])
    for output, name in zip(outputs[::6], PARAMS, strict=True):
        check_same(llm, answer(output), alone[name])
    if "scarce" in scene:
        assert any(output.metrics.num_preemptions for output in outputs[::6])


@pytest.mark.parametrize("scene", ["crowd", "crowd-scarce-depth-2-chunked"])
@pytest.mark.parametrize(
    "family", ["qwen3-moe", "glm4-moe", "gpt-oss", "gemma2", "gemma4-small", "gemma4-moe", "qwen3.5-moe"]
)
def test_other_requests_do_not_change_an_answer_of_other_families(
    family: str, scene: str, folder: Folder
) -> None:
    params = PARAMS["seeded"]
    expected = answer(LLM(folder(family)).generate(PROMPTS[3], params)[0])
    llm = LLM(folder(family), **SCENES[scene])
    prompts, crowd = zip(*CROWD, strict=True)
    outputs = llm.generate([*prompts, PROMPTS[3]], [*crowd, params])
    check_same(llm, answer(outputs[-1]), expected)


@pytest.mark.parametrize(
    ("family", "skipped"),
    [("qwen3", ()), ("gemma2", ("sliding_window",)), ("gpt-oss", ("0",)), ("qwen3.5", ())],
)
def test_int8_kv_cache_does_not_make_answers_depend_on_others(
    family: str, skipped: tuple[str, ...], folder: Folder
) -> None:
    if native_library() is None:
        pytest.skip("in plain torch, a key that is rounded otherwise may get the neighbouring code")
    options: dict[str, Any] = {"kv_cache_dtype": "int8", "kv_cache_dtype_skip_layers": skipped}
    params = PARAMS["seeded"]
    expected = answer(LLM(folder(family), **options).generate(PROMPTS[3], params)[0])
    assert expected[1] != answer(LLM(folder(family)).generate(PROMPTS[3], params)[0])[1]
    llm = LLM(folder(family), **options, **SCENES["crowd-scarce-depth-2-chunked"])
    prompts, crowd = zip(*CROWD, strict=True)
    outputs = llm.generate([*prompts, PROMPTS[3]], [*crowd, params])
    check_same(llm, answer(outputs[-1]), expected)
    llm = LLM(folder(family), **options, block_size=4, max_num_batched_tokens=5)
    llm.generate(PROMPTS[3], params)
    (warm,) = llm.generate(PROMPTS[3], params)
    assert warm.num_cached_tokens > 0
    check_same(llm, answer(warm), expected)


@pytest.mark.parametrize("name", PARAMS)
def test_preemption_chunking_and_prefix_hits_change_nothing(
    name: str, folder: Folder, alone: dict[str, Any]
) -> None:
    llm = LLM(folder("qwen3"), block_size=4, max_num_batched_tokens=5)
    cold = llm.generate(PROMPTS[3], PARAMS[name])[0]
    warm = llm.generate(PROMPTS[3], PARAMS[name])[0]
    assert cold.num_cached_tokens == 0
    assert warm.num_cached_tokens > 0
    check_same(llm, answer(cold), alone[name])
    check_same(llm, answer(warm), alone[name])


def test_salt_separates_caches_and_keeps_tokens(folder: Folder, alone: dict[str, Any]) -> None:
    llm = LLM(folder("qwen3"))
    for salt, num_cached in (("", 0), ("a", 0), ("b", 0), ("a", 48)):
        prompt = {"prompt_token_ids": PROMPTS[3], "cache_salt": salt}
        (output,) = llm.generate(prompt, PARAMS["seeded"])
        assert output.num_cached_tokens == num_cached
        check_same(llm, answer(output), alone["seeded"])


# ---- several answers ----


def several(folder: Path, **fields: Any) -> list[RequestOutput]:
    params = SamplingParams(n=4, temperature=1.0, max_tokens=12, ignore_eos=True, **fields)
    return LLM(folder, seed=5).generate(PROMPTS[:2], params)


def token_ids(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


@pytest.mark.parametrize("seed", [11, None])
def test_answers_are_distinct_and_reproducible(seed: int | None, folder: Folder) -> None:
    first_run = token_ids(several(folder("qwen3"), seed=seed))
    for answers in first_run:
        assert len({tuple(answer) for answer in answers}) == 4
    assert token_ids(several(folder("qwen3"), seed=seed)) == first_run


def test_answer_depends_only_on_its_seed(folder: Folder) -> None:
    outputs = several(folder("qwen3"), seed=11)
    input_processor: InputProcessor = LLM(folder("qwen3"))._engine.frontend.input_processor
    params = SamplingParams(n=4, max_tokens=12, seed=11)
    _, requests = input_processor.requests("x", PROMPTS[0], params)
    assert requests[0].spec.seed == 11
    for index, request in enumerate(requests):
        one = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=request.spec.seed)
        (alone,) = LLM(folder("qwen3")).generate(PROMPTS[0], one)
        assert outputs[0].outputs[index].index == index
        assert outputs[0].outputs[index].token_ids == alone.outputs[0].token_ids


def test_without_a_seed_the_engines_seed_decides(folder: Folder) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    first, second, other = (
        [
            output.outputs[0].token_ids
            for output in LLM(folder("qwen3"), seed=seed).generate([[1], [1]], params)
        ]
        for seed in (3, 3, 4)
    )
    assert first == second
    assert first != other
    assert first[0] != first[1]
