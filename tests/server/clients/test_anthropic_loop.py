"""The anthropic package: a loop written by hand, and its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.server.clients.task import KEY, QUESTION, REPORT, SCHEMAS, Report, Served, Toolbox, knowing_model

if TYPE_CHECKING:  # it takes seconds to import: only who runs these tests does
    import anthropic

MAX_TURNS = 5
TOOLS: Any = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
USER: Any = {"role": "user", "content": QUESTION}


@pytest.fixture
def client(served: Served) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(base_url=served.url, api_key=KEY, max_retries=0) as client:
        yield client


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


@pytest.mark.parametrize("streamed", [False, True])
def test_loop_completes_the_task(
    client: anthropic.Anthropic, served: Served, toolbox: Toolbox, streamed: bool
) -> None:
    messages: Any = [USER]
    num_tokens = 0
    for _ in range(MAX_TURNS):
        body: Any = {"model": served.model, "messages": messages, "tools": TOOLS}
        before, num_tokens = num_tokens, client.messages.count_tokens(**body).input_tokens
        assert num_tokens > before
        if streamed:
            with client.messages.stream(**body, max_tokens=500) as stream:
                message: Any = stream.get_final_message()
        else:
            message = client.messages.create(**body, max_tokens=500)
        if message.stop_reason == "end_turn":
            break
        assert message.stop_reason == "tool_use"
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": toolbox.run(block.name, block.input)}
            for block in message.content
            if block.type == "tool_use"
        ]
        messages += [message.to_param(), {"role": "user", "content": results}]
    toolbox.check(text_of(message))


@pytest.mark.parametrize("streamed", [False, True])
def test_tool_runner_completes_the_task(
    client: anthropic.Anthropic, served: Served, toolbox: Toolbox, streamed: bool
) -> None:
    import anthropic

    get_weather, multiply = toolbox.functions()

    def product(a: int, b: int) -> str:  # results are texts there
        """The product of two numbers."""
        return str(multiply(a, b))

    tools: Any = [anthropic.beta_tool(get_weather), anthropic.beta_tool(product, name="multiply")]
    body: Any = {"model": served.model, "messages": [USER], "tools": tools, "max_tokens": 500}
    runner = client.beta.messages.tool_runner(**body, stream=streamed)
    toolbox.check(text_of(runner.until_done()))


@knowing_model
def test_object_is_parsed(client: anthropic.Anthropic, served: Served) -> None:
    message = client.messages.parse(model=served.model, messages=[USER], max_tokens=500, output_format=Report)
    assert message.parsed_output == REPORT
