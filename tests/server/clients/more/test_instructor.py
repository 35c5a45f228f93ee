"""Objects by instructor, and a loop with tools of it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.server.clients.task import (
    CHAT_TOOLS,
    KEY,
    QUESTION,
    REPORT,
    Report,
    Served,
    Toolbox,
    knowing_model,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import instructor

MESSAGES = [{"role": "user", "content": QUESTION}]
MAX_TURNS = 3


class get_weather(BaseModel):  # noqa: N801 (the tool's name)
    """The weather in a city."""

    city: str


class multiply(BaseModel):  # noqa: N801
    """The product of two numbers."""

    a: int
    b: int


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.base_url, api_key=KEY, max_retries=0) as client:
        yield client


@knowing_model
@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_object_is_parsed(client: openai.OpenAI, served: Served, mode: str) -> None:
    patched: Any = instructor.from_openai(client, mode=instructor.Mode[mode])
    arguments = {"model": served.model, "messages": MESSAGES, "max_retries": 0}
    whole = patched.chat.completions.create(response_model=Report, **arguments)  # of its own class
    *_, last = patched.chat.completions.create_partial(response_model=Report, **arguments)
    assert whole.model_dump() == last.model_dump() == REPORT.model_dump()


def test_agent_completes_the_task(client: openai.OpenAI, served: Served, toolbox: Toolbox) -> None:
    asking: Any = instructor.from_openai(client, mode=instructor.Mode.PARALLEL_TOOLS)
    messages: Any = list(MESSAGES)
    for _ in range(MAX_TURNS):
        calls = asking.chat.completions.create(
            model=served.model,
            messages=messages,
            response_model=Iterable[get_weather | multiply],
            max_retries=0,
        )
        for number, call in enumerate(calls or (), len(messages)):
            name, arguments = type(call).__name__, call.model_dump()
            function = {"name": name, "arguments": json.dumps(arguments)}
            made = {"id": f"call_{number}", "type": "function", "function": function}
            messages += [
                {"role": "assistant", "content": None, "tool_calls": [made]},
                {"role": "tool", "tool_call_id": made["id"], "content": toolbox.run(name, arguments)},
            ]
        if len(toolbox.calls) == 2:
            break
    said: Any = client.chat.completions.create(model=served.model, messages=messages, tools=CHAT_TOOLS)
    toolbox.check(said.choices[0].message.content)
