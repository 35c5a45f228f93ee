"""gpt-oss over HTTP: reasoning, calls and answers on channels, and how they return to the model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.live import Live, stream
from tests.server.openai.test_tools import PATH, USER, added_up, ask, tool
from tests.server.scripted import ScriptedClient, scripted_server, write_folder

# With the markers of gpt-oss: one call in a message, with reasoning or with content, and results by name.
TEMPLATE = """\
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- if tools %}
    {{- '<|start|>developer<|message|># Tools\\n' }}
    {%- for tool in tools %}{{ 'type ' + tool.function.name + '\\n' }}{% endfor %}{{ '<|end|>' }}
{%- endif %}
{%- set called = namespace(name=none) %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {%- if message.content and message.thinking %}
            {{- raise_exception('content and thinking') }}
        {%- elif message.thinking or message.content %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' }}
            {{- (message.thinking or message.content) + '<|end|>' }}
        {%- endif %}
        {%- set called.name = message.tool_calls[0].function.name %}
        {{- '<|start|>assistant to=functions.' + called.name + '<|channel|>commentary json<|message|>' }}
        {{- message.tool_calls[0].function.arguments | tojson + '<|call|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>functions.' + called.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content | tojson + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
"""
SPECIALS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
ANALYSIS = "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": 2}'
FINAL = "<|channel|>final<|message|>It is 3."
OUTPUTS = {
    "answer": (FINAL, "It is 3.", "", 0),
    "reasoning and answer": (ANALYSIS + FINAL, "It is 3.", "I add.", 0),
    "reasoning and call": (ANALYSIS + CALL, "", "I add.", 1),
    "reasoning, words and call": (ANALYSIS + PREAMBLE + CALL, "Let me see.", "I add.", 1),
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Live, ScriptedClient]]:
    folder = write_folder(tmp_path_factory.mktemp("harmony"), TEMPLATE, SPECIALS)
    with scripted_server(folder) as served:
        yield served


@pytest.mark.parametrize("name", OUTPUTS)
def test_channels_become_reasoning_calls_and_content(served: tuple[Live, ScriptedClient], name: str) -> None:
    live, model = served
    model.script, content, reasoning, num_calls = OUTPUTS[name]
    body = {"messages": [USER], "tools": [tool()]}
    (choice,) = ask(live, **body)["choices"]
    message = choice["message"]
    assert (message["content"] or "", message.get("reasoning_content") or "") == (content, reasoning)
    calls = message.get("tool_calls") or []
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"a": 1, "b": 2}] * num_calls
    assert choice["finish_reason"] == ("tool_calls" if num_calls else "stop")
    for model.piece in (1, 5, 1000):
        streamed = added_up(stream(live, PATH, body))
        assert (streamed["content"], streamed["reasoning_content"]) == (content, reasoning)
        assert [(call["name"], json.loads(call["arguments"])) for call in streamed["tool_calls"]] == [
            ("add", {"a": 1, "b": 2})
        ] * num_calls


@pytest.mark.parametrize("name", ["reasoning and call", "reasoning, words and call"])
def test_turns_return_to_the_model_as_it_wrote_them(served: tuple[Live, ScriptedClient], name: str) -> None:
    """The template accepts reasoning or content beside a call, not both."""
    live, model = served
    model.script, content, reasoning, _ = OUTPUTS[name]
    message = ask(live, tools=[tool()])["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"}
    model.script = FINAL
    body: dict[str, Any] = {
        "messages": [USER, message, result],
        "tools": [tool()],
        "reasoning_effort": "high",
    }
    assert ask(live, **body)["choices"][0]["message"]["content"] == "It is 3."
    tokenizer = live.backend.engine.frontend.tokenizer
    assert tokenizer is not None
    prompt = tokenizer.decode(model.requests[-1].token_ids, skip_special_tokens=False)
    said = "\n".join(filter(None, (reasoning, content)))
    assert f"<|start|>assistant<|channel|>analysis<|message|>{said}<|end|>" in prompt
    assert (
        '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": 2}<|call|>'
        in prompt
    )
    assert '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"3"<|end|>' in prompt
    assert "Reasoning: high" in prompt
    assert prompt.endswith("<|start|>assistant")
