"""Agents of pydantic-ai."""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.server.clients.task import KEY, QUESTION, REPORT, Report, Served, Toolbox, knowing_model


@pytest.fixture(params=["chat", "responses"])
async def model(request: pytest.FixtureRequest, served: Served) -> AsyncIterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
        from pydantic_ai.providers.openai import OpenAIProvider
    provider = OpenAIProvider(base_url=served.base_url, api_key=KEY)
    kind: Any = OpenAIChatModel if request.param == "chat" else OpenAIResponsesModel
    yield kind(served.model, provider=provider)
    await provider.client.close()


async def test_agent_completes_the_task(model: Any, toolbox: Toolbox) -> None:
    from pydantic_ai import Agent

    result = await Agent(model, tools=list(toolbox.functions())).run(QUESTION)
    toolbox.check(result.output)


async def test_streaming_agent_completes_the_task(model: Any, toolbox: Toolbox) -> None:
    from pydantic_ai import Agent

    async with Agent(model, tools=list(toolbox.functions())).run_stream(QUESTION) as result:
        said = [text async for text in result.stream_text(debounce_by=None)]
    assert len(said) > 1
    toolbox.check(said[-1])


@knowing_model
async def test_object_is_parsed(model: Any) -> None:
    """By a tool, and by a schema."""
    from pydantic_ai import Agent, NativeOutput

    for output_type in (Report, NativeOutput(Report)):
        assert (await Agent(model, output_type=output_type).run(QUESTION)).output == REPORT
