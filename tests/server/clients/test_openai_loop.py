"""The openai package: an agent loop over each of its two APIs, and what its helpers make of answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.clients.task import (
    CHAT_TOOLS,
    KEY,
    QUESTION,
    REPORT,
    SCHEMAS,
    Report,
    Served,
    Toolbox,
    knowing_model,
)

MAX_TURNS = 5
RESPONSE_TOOLS: Any = [
    {"type": "function", "name": name, "parameters": schema, "strict": True}
    for name, schema in SCHEMAS.items()
]


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.base_url, api_key=KEY, max_retries=0) as client:
        yield client


@pytest.mark.parametrize("streamed", [False, True])
def test_chat_loop_completes_the_task(
    client: openai.OpenAI, served: Served, toolbox: Toolbox, streamed: bool
) -> None:
    messages: Any = [{"role": "user", "content": QUESTION}]
    for _ in range(MAX_TURNS):
        body: Any = {"model": served.model, "messages": messages, "tools": CHAT_TOOLS}
        if streamed:
            with client.chat.completions.stream(**body) as stream:
                kinds = {event.type for event in stream}
                choice: Any = stream.get_final_completion().choices[0]
            called = {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"}
            assert bool(called & kinds) == bool(choice.message.tool_calls)
        else:
            choice = client.chat.completions.parse(**body).choices[0]
        if choice.finish_reason == "stop":
            break
        assert choice.finish_reason == "tool_calls"
        messages.append(choice.message)
        for call in choice.message.tool_calls:
            assert call.function.parsed_arguments is not None  # the helpers read arguments of strict tools
            result = toolbox.run(call.function.name, call.function.parsed_arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    toolbox.check(choice.message.content)


@pytest.mark.parametrize("streamed", [False, True])
def test_responses_loop_completes_the_task(
    client: openai.OpenAI, served: Served, toolbox: Toolbox, streamed: bool
) -> None:
    items: Any = QUESTION
    before = None
    for _ in range(MAX_TURNS):
        body: Any = {"model": served.model, "input": items, "tools": RESPONSE_TOOLS}
        if before:
            body["previous_response_id"] = before
        if streamed:
            with client.responses.stream(**body) as stream:
                kinds = [event.type for event in stream]
                response: Any = stream.get_final_response()
            assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
        else:
            response = client.responses.parse(**body)
        before = response.id
        items = []
        for item in response.output:
            if item.type == "function_call":
                result = toolbox.run(item.name, item.parsed_arguments)
                items.append({"type": "function_call_output", "call_id": item.call_id, "output": result})
        if not items:
            break
    toolbox.check(response.output_text)


@knowing_model
def test_chats_and_responses_are_parsed(client: openai.OpenAI, served: Served) -> None:
    body: Any = {"model": served.model, "messages": [{"role": "user", "content": QUESTION}]}
    completion = client.chat.completions.parse(**body, response_format=Report)
    assert completion.choices[0].message.parsed == REPORT
    with client.chat.completions.stream(**body, response_format=Report) as chat_stream:
        assert chat_stream.get_final_completion().choices[0].message.parsed == REPORT
    body = {"model": served.model, "input": QUESTION, "text_format": Report}
    assert client.responses.parse(**body).output_parsed == REPORT
    with client.responses.stream(**body) as stream:
        assert stream.get_final_response().output_parsed == REPORT


@knowing_model
def test_class_is_a_tool(client: openai.OpenAI, served: Served) -> None:
    messages: Any = [{"role": "user", "content": QUESTION}]
    tools: Any = [openai.pydantic_function_tool(Report)]
    completion = client.chat.completions.parse(
        model=served.model, messages=messages, tools=tools, tool_choice="required"
    )
    (call,) = completion.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == REPORT
