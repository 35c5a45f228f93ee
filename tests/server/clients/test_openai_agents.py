"""Agents of openai-agents, over both of OpenAI's APIs."""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.server.clients.task import KEY, QUESTION, REPORT, Report, Served, Toolbox, knowing_model


@pytest.fixture(scope="module")
def agents() -> Any:
    """The package, which takes seconds to import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import agents
    return agents


@pytest.fixture(params=["chat", "responses"])
async def model(agents: Any, request: pytest.FixtureRequest, served: Served) -> AsyncIterator[Any]:
    agents.set_tracing_disabled(True)  # nothing leaves this machine
    kind: Any = agents.OpenAIChatCompletionsModel if request.param == "chat" else agents.OpenAIResponsesModel
    async with openai.AsyncOpenAI(base_url=served.base_url, api_key=KEY, max_retries=0) as client:
        yield kind(model=served.model, openai_client=client)


def agent_of(agents: Any, model: Any, toolbox: Toolbox) -> Any:
    tools = [agents.function_tool(function) for function in toolbox.functions()]
    return agents.Agent(name="helper", instructions="Use the tools.", model=model, tools=tools)


async def test_agent_completes_the_task(agents: Any, model: Any, toolbox: Toolbox) -> None:
    result = await agents.Runner.run(agent_of(agents, model, toolbox), QUESTION)
    toolbox.check(result.final_output)


async def test_streaming_agent_completes_the_task(agents: Any, model: Any, toolbox: Toolbox) -> None:
    result = agents.Runner.run_streamed(agent_of(agents, model, toolbox), QUESTION)
    kinds = {event.type async for event in result.stream_events()}
    assert {"raw_response_event", "run_item_stream_event"} <= kinds
    toolbox.check(result.final_output)


@knowing_model
async def test_object_is_parsed(agents: Any, model: Any) -> None:
    agent: Any = agents.Agent(name="helper", model=model, output_type=Report)
    assert (await agents.Runner.run(agent, QUESTION)).final_output == REPORT
