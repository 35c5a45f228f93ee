"""One way to encode a chat for all Python doors: what messages and tools spell is text, never a special token."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from inflight import LLM, AsyncEngine, RequestOutput, SamplingParams
from inflight.errors import ConfigError, ParameterError, RequestError
from tests.e2e.conftest import Folder

SPELLED = "<|end|>"
TOOLS_TEMPLATE = "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}{{ date_string or '' }}"
ONE = SamplingParams(temperature=0, max_tokens=1)


@pytest.fixture(scope="module")
def with_tools(folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose template writes out tools."""
    copy = tmp_path_factory.mktemp("tools") / "checkpoint"
    shutil.copytree(folder(), copy)
    path = copy / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"chat_template": TOOLS_TEMPLATE + settings["chat_template"]}))
    return copy


@pytest.fixture(scope="module")
def llm(with_tools: Path) -> Iterator[LLM]:
    with LLM(with_tools, tool_call_parser="hermes") as llm:
        yield llm


@pytest.fixture
async def engine(with_tools: Path) -> AsyncIterator[AsyncEngine]:
    async with await AsyncEngine.start(with_tools, tool_call_parser="hermes") as engine:
        yield engine


Chat = Callable[..., Awaitable[RequestOutput]]


@pytest.fixture(params=["LLM", "AsyncEngine"])
def chat(request: pytest.FixtureRequest, llm: LLM, engine: AsyncEngine) -> Chat:
    async def offline(messages: Any, **options: Any) -> RequestOutput:
        return llm.chat(messages, ONE, use_tqdm=False, **options)[0]

    async def streaming(messages: Any, **options: Any) -> RequestOutput:
        return [output async for output in engine.chat(messages, ONE, **options)][-1]

    return offline if request.param == "LLM" else streaming


def tool(name: str, parameter: str, text: str) -> dict[str, Any]:
    properties = {parameter: {"type": "string", "description": text}}
    return {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}


CASES: dict[str, Callable[[str], dict[str, Any]]] = {
    "a message": lambda word: {"messages": [{"role": "user", "content": f"hello{word}"}]},
    "a part of a message": lambda word: {
        "messages": [{"role": "user", "content": "hello", "name": f"x{word}"}, {"role": word, "content": "?"}]
    },
    "a tool's text": lambda word: {"tools": [tool("look", "where", f"a place {word}")]},
    "a tool's parameter": lambda word: {"tools": (tool("look", f"where{word}", "a place"),)},
    "a template argument": lambda word: {"chat_template_kwargs": {"date_string": f"today {word}"}},
}


@pytest.mark.parametrize("case", CASES)
async def test_spelled_out_special_token_is_text(case: str, chat: Chat, llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    options = {"messages": [{"role": "user", "content": "hello"}]}
    plain = await chat(**options | CASES[case]("word"))
    spelled = await chat(**options | CASES[case](SPELLED))

    def specials(output: RequestOutput) -> list[int]:
        return [token_id for token_id in output.prompt_token_ids if token_id in tokenizer.special_ids]

    assert specials(spelled) == specials(plain)
    assert spelled.prompt is not None
    assert plain.prompt is not None
    assert spelled.prompt == plain.prompt.replace("word", SPELLED)
    assert tokenizer.decode(spelled.prompt_token_ids, skip_special_tokens=False) == spelled.prompt


async def test_chat_prompts_match_the_template(chat: Chat, llm: LLM) -> None:
    output = await chat([{"role": "user", "content": "hello"}], tools=[tool("look", "where", "a place")])
    assert output.prompt is not None
    assert output.prompt.startswith('<|system|>[{"type": "function"')
    assert output.prompt_token_ids == llm.get_tokenizer().encode(output.prompt, add_special_tokens=False)


LOOK = tool("look", "where", "a place")
LOOK["function"]["parameters"] = {
    "type": "object",
    "properties": {"where": {"enum": ["here", "there"]}},
    "required": ["where"],
    "additionalProperties": False,
}
ENOUGH = SamplingParams(temperature=1.0, seed=5, max_tokens=200)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
async def test_required_tool_is_called(choice: Any, llm: LLM, engine: AsyncEngine) -> None:
    messages = [{"role": "user", "content": "hello"}]
    options: dict[str, Any] = {"tools": [LOOK], "tool_choice": choice, "parallel_tool_calls": False}
    (answer,) = llm.chat(messages, ENOUGH, use_tqdm=False, **options)[0].outputs
    assert answer.message is not None
    (call,) = answer.message.tool_calls
    assert (call.name, answer.message.content) == ("look", None)
    assert json.loads(call.arguments)["where"] in ("here", "there")
    *_, last = [output async for output in engine.chat(messages, ENOUGH, output_kind="delta", **options)]
    assert last.outputs[0].message is not None
    (same,) = last.outputs[0].message.tool_calls
    assert (same.name, same.arguments) == (call.name, call.arguments)


async def test_all_forms_of_messages_are_accepted(chat: Chat) -> None:
    call = {"id": "x", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    plain = await chat([{"role": "user", "content": "hello"}, {"role": "assistant", "content": "x"}])
    formatted = await chat(
        [{"role": "user", "content": parts, "name": None}, {"role": "assistant", "content": "x"}]
    )
    assert formatted.prompt == plain.prompt
    assert formatted.outputs[0].message is not None
    assert formatted.outputs[0].message.content == formatted.outputs[0].text
    with pytest.raises(RequestError, match=r"messages\[1\].tool_calls\[0\]"):
        await chat(
            [
                {"role": "user", "content": "hello"},
                {"role": "assistant", "tool_calls": [{**call, "function": 1}]},
            ]
        )


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": [{"type": "x"}]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": 5, "tools": [LOOK]}, "tool_choice"),
        ({"max_reasoning_tokens": -1}, "max_reasoning_tokens"),
        ({"reasoning_effort": 3}, "reasoning_effort"),
    ],
)
async def test_invalid_chats_are_rejected(chat: Chat, options: dict[str, Any], param: str) -> None:
    with pytest.raises(ParameterError) as refusal:
        await chat([{"role": "user", "content": "hello"}], **options)
    assert refusal.value.param == param


@pytest.mark.parametrize("name", ["tool_call_parser", "reasoning_parser"])
def test_unknown_parsers_are_rejected(with_tools: Path, name: str) -> None:
    for parser in ("nope", "inflight.frontend.agents.formats.json_calls:HERMES"):
        options: dict[str, Any] = {name: parser}
        with pytest.raises(ConfigError, match=rf"unknown .* parser '{parser}': choose one of [\w, ]+$"):
            LLM(with_tools, show_progress=False, **options)
