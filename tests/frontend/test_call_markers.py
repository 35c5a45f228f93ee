"""A model that is offered no tools starts no call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from inflight import LLM, SamplingParams, StructuredOutputs
from inflight.config import ModelConfig
from inflight.errors import ParameterError
from inflight.frontend.chat import ChatFormats, ChatRequest

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
QUESTION = [{"role": "user", "content": "What is the weather in Berlin?"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("inflight-builtin", max_model_len=512) as llm:
        yield llm


def forbidden(llm: LLM, params: SamplingParams, **chat: Any) -> set[str]:
    """Return the forbidden tokens of a chat request."""
    frontend = llm._frontend
    assert frontend.tokenizer is not None
    processor = frontend.prepare_chat("1", ChatRequest.from_messages(QUESTION, **chat), params)
    (answer,) = processor.answers
    return {frontend.tokenizer.decode(ids) for ids in answer.request.spec.bad_word_ids}


def marker_id(llm: LLM) -> int:
    assert llm._frontend.tokenizer is not None
    marker = llm._frontend.tokenizer.token_id("<tool_call>")
    assert marker is not None
    return marker


def test_call_marker_is_forbidden_without_tools(llm: LLM) -> None:
    assert forbidden(llm, SamplingParams()) == {"<tool_call>"}
    assert forbidden(llm, SamplingParams(), tools=[TOOL], tool_choice="none") == {"<tool_call>"}
    assert forbidden(llm, SamplingParams(), tools=[TOOL]) == set()


def test_call_marker_is_allowed_where_the_request_names_it(llm: LLM) -> None:
    assert forbidden(llm, SamplingParams(logit_bias={marker_id(llm): 5})) == set()
    assert forbidden(llm, SamplingParams(allowed_token_ids=[marker_id(llm), 5])) == set()
    assert forbidden(llm, SamplingParams(structured_outputs=StructuredOutputs(regex="<tool_call>"))) == set()


def test_answer_without_tools_has_no_call(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=24, seed=seed) for seed in range(12)]
    for output in llm.chat([QUESTION] * len(params), params):
        assert marker_id(llm) not in output.outputs[0].token_ids


def test_text_completion_may_contain_the_marker(llm: LLM) -> None:
    params = SamplingParams(max_tokens=1, allowed_token_ids=[marker_id(llm)])
    assert list(llm.generate("Berlin", params)[0].outputs[0].token_ids) == [marker_id(llm)]
    (answer,) = llm._frontend.prepare("1", "Berlin", SamplingParams()).answers
    assert answer.request.spec.bad_word_ids == ()


def test_forbidden_tokens_do_not_count_against_the_limit_of_listed_tokens(llm: LLM) -> None:
    processor = llm._frontend.input_processor
    processor.check_listed(SamplingParams(stop_token_ids=[1]), 1, 1)
    with pytest.raises(ParameterError):
        processor.check_listed(SamplingParams(stop_token_ids=[1, 2]), 1, 1)


def test_names_of_vllm_are_resolved_when_formats_are_detected(llm: LLM) -> None:
    frontend = llm._frontend
    config = ModelConfig(tool_call_parser="granite4", reasoning_parser="deepseek_v4")
    formats = ChatFormats.from_config(config, frontend.chat_template, frontend.tokenizer)
    assert (formats.tools, formats.reasoning) == ("hermes", "think")
    assert formats.call_marker_ids == {marker_id(llm)}
