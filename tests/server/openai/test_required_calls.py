"""Calls that must be: whatever the weights, and whichever API asks, they are valid."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
import tokenizers

from inflight.checkpoint.builtin import checkpoint_folder
from tests.server.calling import PLAIN_TEMPLATE
from tests.server.live import Backend, Live, live_server
from tests.server.scripted import write_folder

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
QUESTION: Any = {"role": "user", "content": "Will it rain?"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server with random weights."""
    folder = write_folder(tmp_path_factory.mktemp("model"), PLAIN_TEMPLATE)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = json.loads((checkpoint_folder() / "config.json").read_text())
    config |= {"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": tokenizer.token_to_id("<|im_end|>")}
    (folder / "config.json").write_text(json.dumps(config))
    backend = Backend(model=str(folder), load_format="dummy", num_blocks=64)
    with live_server(backend, served_model_name=("m",)) as live:
        yield live
    backend.close()


def by_chat(url: str) -> tuple[str, Any]:
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        answer = client.chat.completions.create(
            model="m",
            messages=[QUESTION],
            tools=[tool],
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=400,
            seed=1,
        )
    assert answer.choices[0].finish_reason == "tool_calls"
    calls: Any = answer.choices[0].message.tool_calls
    (called,) = calls
    return called.function.name, json.loads(called.function.arguments)


def by_responses(url: str) -> tuple[str, Any]:
    tool: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        answer = client.responses.create(
            model="m",
            input=[QUESTION],
            tools=[tool],
            tool_choice={"type": "function", "name": "weather"},
            parallel_tool_calls=False,
            max_output_tokens=400,
            extra_body={"seed": 1},
        )
    (called,) = answer.output
    assert called.type == "function_call"
    return called.name, json.loads(called.arguments)


def by_messages(url: str) -> tuple[str, Any]:
    import anthropic  # which takes seconds

    tool: Any = {"name": "weather", "input_schema": SCHEMA}
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    with anthropic.Anthropic(base_url=url, api_key="any", max_retries=0) as client:
        answer = client.messages.create(
            model="m",
            messages=[QUESTION],
            tools=[tool],
            tool_choice=choice,
            max_tokens=400,
            extra_body={"seed": 1},
        )
    assert answer.stop_reason == "tool_use"
    (called,) = answer.content
    assert called.type == "tool_use"
    return called.name, called.input


@pytest.mark.parametrize("ask", [by_chat, by_responses, by_messages])
def test_required_call_matches_its_schema_in_every_api(ask: Any, server: Live) -> None:
    name, arguments = ask(server.url)
    assert name == "weather"
    jsonschema.validate(arguments, SCHEMA)


GRAMMARS: dict[str, tuple[str, str]] = {
    "lark": (
        'start: "run" LF line{1,2}\nline: "+" /[^\\n]{0,4}/ LF\n%import common.LF\n',
        r"run\n(\+.{0,4}\n){1,2}",
    ),
    "regex": (r'^set [a-z]{1,3}="[^"]{0,4}"$', r'set [a-z]{1,3}="[^"]{0,4}"'),
}


@pytest.mark.parametrize("syntax", GRAMMARS)
def test_custom_tool_input_matches_its_grammar(server: Live, syntax: str) -> None:
    definition, pattern = GRAMMARS[syntax]
    input_format = {"type": "grammar", "syntax": syntax, "definition": definition}
    tool: Any = {"type": "custom", "name": "edit", "format": input_format}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        for seed in range(3):
            answer = client.responses.create(
                model="m",
                input=[QUESTION],
                tools=[tool],
                tool_choice={"type": "custom", "name": "edit"},
                parallel_tool_calls=False,
                extra_body={"seed": seed},
            )
            (called,) = answer.output
            assert called.type == "custom_tool_call"
            assert re.fullmatch(pattern, called.input), called.input
