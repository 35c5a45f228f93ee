"""Constrained answers from prompt to text, alone and in batches with other requests."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from inflight import LLM, AsyncEngine, RequestOutput, SamplingParams, StructuredOutputs
from inflight.errors import EngineError, ParameterError
from tests.e2e.policies import GREEDY_CONTINUOUS

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PLAIN = SamplingParams(temperature=1.0, seed=4, max_tokens=40)
JSON = replace(PLAIN, structured_outputs=StructuredOutputs(json=PERSON))
YES_OR_NO = replace(PLAIN, structured_outputs=StructuredOutputs(choice=["yes", "no"]))
PROMPTS = ["Tell me about a cat.", "Once upon a time there was"]
MIXED = [
    JSON,
    PLAIN,
    YES_OR_NO,
    replace(PLAIN, structured_outputs=StructuredOutputs(regex="[a-z]{3}-\\d{2}"), temperature=0),
    replace(PLAIN, structured_outputs=StructuredOutputs(grammar='start: "(" start* ")"')),
    replace(PLAIN, top_p=0.8, presence_penalty=0.5),
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(show_progress=False) as llm:
        yield llm


def run(llm: LLM, prompts: Any, params: Any) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def answers(llm: LLM, params: list[SamplingParams], prompts: list[str] = PROMPTS) -> list[Any]:
    """Return the tokens and finish reason of every prompt with each of the parameters."""
    pairs = [(prompt, each) for prompt in prompts for each in params]
    outputs = run(llm, [prompt for prompt, _ in pairs], [each for _, each in pairs])
    return [(output.outputs[0].token_ids, output.outputs[0].finish_reason) for output in outputs]


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[Any]:
    """The answers when every request runs alone."""
    return [answers(llm, [each], [prompt])[0] for prompt in PROMPTS for each in MIXED]


def test_every_kind_of_constraint_is_followed(llm: LLM) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"regex": "[a-c]{3}-\\d{2}"}, "[a-c]{3}-\\d{2}"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'start: "x" ",y"~3'}, "x(,y){3}"),
        ({"grammar": 'root ::= "a" [0-9]{2,3} "b"'}, "a\\d{2,3}b"),
        ({"json": {"type": "boolean"}}, "true|false"),
    ]
    params = [replace(PLAIN, structured_outputs=StructuredOutputs(**fields)) for fields, _ in cases]
    for (_, pattern), output in zip(cases, run(llm, [PROMPTS[0]] * len(cases), params), strict=True):
        assert output.outputs[0].finish_reason == "stop"
        assert re.fullmatch(pattern, output.outputs[0].text)


@pytest.mark.parametrize(
    "more", [{}, {"temperature": 0}, {"top_p": 0.9, "top_k": 20}, {"frequency_penalty": 1.0}]
)
def test_schema_is_followed_with_any_sampling_parameters(llm: LLM, more: dict[str, Any]) -> None:
    outputs = run(llm, PROMPTS, replace(JSON, n=2, logprobs=2, max_tokens=300, **more))
    for output in outputs:
        for answer in output.outputs:
            jsonschema.validate(json.loads(answer.text), PERSON)
            assert answer.finish_reason == "stop"
            assert answer.logprobs is not None
            assert len(answer.logprobs) == len(answer.token_ids)


SCARCE: dict[str, Any] = {"num_blocks": 24, "policy": GREEDY_CONTINUOUS}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 7, "max_num_seqs": 5},
        {"pipeline_depth": 2},
        SCARCE,
        SCARCE | {"pipeline_depth": 2, "max_num_batched_tokens": 9, "max_num_seqs": 8},
    ],
)
def test_tokens_do_not_depend_on_the_batch(expected: list[Any], options: dict[str, Any]) -> None:
    """Constrained or not, batched, chunked, preempted and replayed, with prefix cache hits."""
    with LLM(show_progress=False, block_size=4, **options) as crowded:
        assert answers(crowded, MIXED) == expected
        assert answers(crowded, MIXED) == expected
        assert crowded.stats().num_prefix_hits > 0
        assert (crowded.stats().num_preemptions > 0) == ("num_blocks" in options)


def test_torch_sampler_samples_the_same_tokens(expected: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from inflight.execution import runner
    from inflight.execution.sampling.sampler import Sampler, SamplingRows

    monkeypatch.setattr(runner, "cpu_sampler", lambda rows, size: Sampler(SamplingRows(rows, size)))
    with LLM(show_progress=False) as other:
        assert answers(other, MIXED) == expected


def test_masks_combine_with_bias_bad_words_and_allowed_tokens(llm: LLM) -> None:
    no = llm.get_tokenizer().encode("no", add_special_tokens=False)
    for more in (
        {"logit_bias": {no[0]: 100.0}},
        {"bad_words": ["y", "ye", "yes"]},
        {"allowed_token_ids": [*no, 2]},
    ):
        for seed in range(4):
            (output,) = run(llm, PROMPTS[0], replace(YES_OR_NO, seed=seed, **more))
            assert output.outputs[0].text == "no"
    (output,) = run(llm, PROMPTS[0], replace(JSON, stop=['"age"'], include_stop_str_in_output=True))
    assert output.outputs[0].text.endswith('"age"')


def test_request_without_any_allowed_token_fails_alone(llm: LLM) -> None:
    impossible = replace(YES_OR_NO, min_tokens=30)
    failed, unaffected = run(llm, PROMPTS[:2], [impossible, PLAIN])
    assert failed.outputs[0].finish_reason == "error"
    assert failed.outputs[0].error == "the sampling parameters allow no token"
    assert unaffected.outputs[0].error is None
    with pytest.raises(EngineError, match="the sampling parameters allow no token"):
        run(llm, PROMPTS[0], replace(YES_OR_NO, bad_words=["yes", "ye", "y", "no", "n"]))


def test_grammar_at_its_limits_fails_only_its_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from inflight.constraints.matcher import Matcher

    alone = run(llm, PROMPTS[1], PLAIN)[0].outputs[0]
    monkeypatch.setattr(Matcher, "error", property(lambda _: "too many states"))
    failed, unaffected = run(llm, PROMPTS[:2], [YES_OR_NO, PLAIN])
    assert failed.outputs[0].error is not None
    assert failed.outputs[0].error.endswith("cannot be followed any further: too many states")
    assert unaffected.outputs[0] == alone


def test_ignore_eos_repeats_the_end_token_up_to_max_tokens(llm: LLM) -> None:
    (output,) = run(llm, PROMPTS[0], replace(YES_OR_NO, ignore_eos=True, max_tokens=8))
    assert output.outputs[0].text in ("yes", "no")
    assert len(output.outputs[0].token_ids) == 8


def test_invalid_constraint_is_rejected_before_any_step(llm: LLM) -> None:
    before = llm.stats().num_steps
    unsupported = StructuredOutputs(json={"items": {"uniqueItems": True}})
    with pytest.raises(ParameterError, match="the keyword 'uniqueItems', at #/items, is not supported"):
        run(llm, PROMPTS[:2], [PLAIN, replace(PLAIN, structured_outputs=unsupported)])
    assert llm.stats().num_steps == before


def test_row_forgets_its_constraint(llm: LLM) -> None:
    """The next request in a row, and steps without constraints, see nothing of an earlier one."""
    (first,) = run(llm, PROMPTS[1], PLAIN)
    run(llm, PROMPTS[1], YES_OR_NO)
    (again,) = run(llm, PROMPTS[1], PLAIN)
    assert first.outputs == again.outputs


async def test_async_engine_gives_the_same_answers(llm: LLM) -> None:
    """test_process.py tests an engine in its own process."""
    async with await AsyncEngine.start(in_process=True) as engine:
        for params in (JSON, YES_OR_NO):
            (output,) = [o async for o in engine.generate(PROMPTS[0], params, output_kind="final")]
            assert output.outputs == run(llm, PROMPTS[0], params)[0].outputs
        invalid = replace(PLAIN, structured_outputs=StructuredOutputs(regex="["))
        with pytest.raises(ParameterError, match="unclosed character class"):
            await anext(engine.generate(PROMPTS[0], invalid))
