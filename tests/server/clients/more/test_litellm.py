"""litellm against a live server, and an agent loop with it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from inflight import LLM, SamplingParams
from tests.server.clients.task import (
    CHAT_TOOLS,
    KEY,
    MESSAGES,
    REPORT,
    Report,
    Served,
    Toolbox,
    knowing_model,
)
from tests.server.clients.task import QUESTION as TASK
from tests.server.live import Live

MAX_TURNS = 5


pytestmark = pytest.mark.usefixtures("leave_nothing_open")


@pytest.fixture(scope="module")
def litellm() -> Iterator[ModuleType]:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it asks the network for prices
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own making
        import litellm
    litellm.telemetry = False
    litellm.suppress_debug_info = True
    yield litellm
    cache: Any = litellm.in_memory_llm_clients_cache
    cache.flush_cache()


@pytest.fixture
def chat(builtin: Served) -> dict[str, Any]:
    return to(builtin) | {"messages": MESSAGES, "temperature": 0, "max_tokens": 24}


def to(served: Served, api: str = "openai") -> dict[str, Any]:
    """Arguments of litellm's functions: whom to ask."""
    address = {"api_base": served.base_url, "api_key": KEY, "max_retries": 0}
    return address | {"model": f"{api}/{served.model}"}


its_own = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning", "ignore::ResourceWarning"
)


@its_own
def test_chat_returns_text_and_usage(litellm: ModuleType, chat: dict[str, Any], text: str) -> None:
    answer = litellm.completion(**chat)
    assert answer.choices[0].message.content == text
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    chunks = list(litellm.completion(**chat, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens


@its_own
async def test_async_chat_streams(litellm: ModuleType, chat: dict[str, Any], text: str) -> None:
    answer = await litellm.acompletion(**chat)
    assert answer.choices[0].message.content == text
    streamed = ""
    async for chunk in await litellm.acompletion(**chat, stream=True):
        streamed += chunk.choices[0].delta.content or ""
    assert streamed == text


@its_own
def test_completions_match_an_offline_run(litellm: ModuleType, builtin: Served, llm: LLM) -> None:
    whole = llm.generate("A fox", SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text
    body = to(builtin, "text-completion-openai") | {"prompt": "A fox", "temperature": 0, "max_tokens": 8}
    assert litellm.text_completion(**body).choices[0].text == whole


@its_own
def test_errors_have_their_own_exception_classes(
    litellm: ModuleType, chat: dict[str, Any], server: Live
) -> None:
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**{**chat, "api_key": "wrong"})
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**chat, "model": "openai/other"})
    with pytest.raises(litellm.BadRequestError, match="top_p is 7"):
        litellm.completion(**chat, top_p=7)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**{**chat, "messages": [{"role": "user", "content": "word " * 9000}]})
    server.state.draining = True
    try:
        with pytest.raises(litellm.ServiceUnavailableError):
            litellm.completion(**chat)
    finally:
        server.state.draining = False


# ---- agents ----


@its_own
@pytest.mark.parametrize("streamed", [False, True])
def test_loop_completes_the_task(
    litellm: ModuleType, served: Served, toolbox: Toolbox, streamed: bool
) -> None:
    messages: Any = [{"role": "user", "content": TASK}]
    for _ in range(MAX_TURNS):
        answer = litellm.completion(
            messages=messages,
            tools=CHAT_TOOLS,
            stream=streamed,
            **to(served),
        )
        if streamed:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        message = answer.choices[0].message
        if not message.tool_calls:
            break
        assert answer.choices[0].finish_reason == "tool_calls"
        assert getattr(message, "reasoning_content", None) == served.thought
        messages.append(message)
        for call in message.tool_calls:
            result = toolbox.run(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    toolbox.check(message.content)


@its_own
def test_responses_loop_completes_the_task(litellm: ModuleType, served: Served, toolbox: Toolbox) -> None:
    tools = [{"type": "function", **tool["function"]} for tool in CHAT_TOOLS]
    items: Any = TASK
    before = None
    for _ in range(MAX_TURNS):
        response = litellm.responses(
            input=items,
            tools=tools,
            previous_response_id=before,
            **to(served),
        )
        before = response.id
        items = [
            {
                "type": "function_call_output",
                "call_id": item.call_id,
                "output": toolbox.run(item.name, item.arguments),
            }
            for item in response.output
            if item.type == "function_call"
        ]
        if not items:
            break
    toolbox.check(response.output[-1].content[0].text)


@its_own
@knowing_model
def test_object_is_parsed(litellm: ModuleType, served: Served) -> None:
    answer = litellm.completion(
        messages=[{"role": "user", "content": TASK}],
        response_format=Report,
        **to(served),
    )
    assert Report.model_validate_json(answer.choices[0].message.content) == REPORT
