"""Chats with tools: what is trained is what the template writes, and every call can be made from its prompt."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inflight.frontend.agents.detect import detect_reasoning_format, detect_tool_format
from inflight.frontend.agents.parser import MessageParser
from inflight.frontend.text.chat_template import ChatTemplate
from tools.builtin import dataset, tool_eval, tool_names, tool_values
from tools.builtin.chat_format import CHAT_TEMPLATE, END_OF_TEXT, MARKUP, Turn
from tools.builtin.corpus import documents
from tools.builtin.tables import sections
from tools.builtin.tokenizer import token_id
from tools.builtin.tool_chats import ToolChat, easy_chat, tool_chat
from tools.builtin.tool_loops import Loop, loops, run_loops

SEED = 7


@cache
def some_chats(held_out: bool = False) -> tuple[ToolChat, ...]:
    return tuple(tool_chat(SEED, index, held_out) for index in range(600))


@pytest.fixture(scope="module")
def template() -> Iterator[ChatTemplate]:
    made = ChatTemplate(CHAT_TEMPLATE)
    yield made
    made.close()


def as_request(chat: ToolChat) -> list[dict[str, Any]]:
    """The messages as a client sends them."""
    system = [{"role": "system", "content": chat.system}] * bool(chat.system)
    return system + [_as_sent(message) for message in chat.messages]


def _as_sent(message: Turn) -> dict[str, Any]:
    sent: dict[str, Any] = {"role": message.role, "content": message.content or None}
    if message.calls:
        sent["tool_calls"] = [
            {"type": "function", "id": "1", "function": {"name": one.name, "arguments": dict(one.arguments)}}
            for one in message.calls
        ]
    if message.thought:
        sent["reasoning_content"] = message.thought
    return sent


def test_formats_are_detected_from_the_template(template: ChatTemplate) -> None:
    assert detect_reasoning_format(template) == "think"
    assert detect_tool_format(template, "think") == "hermes"


def test_template_renders_the_training_text(template: ChatTemplate) -> None:
    for chat in some_chats()[:60]:
        text = template.render(as_request(chat), tools=chat.tools, add_generation_prompt=False)
        assert text + END_OF_TEXT == chat.text
    for example in list(documents(SEED, 0, 40)):
        if example.plain or example.thought:
            continue
        chat = ToolChat(
            "",
            example.system,
            (),
            tuple(Turn(("user", "assistant")[i % 2], t) for i, t in enumerate(example.turns)),
        )
        assert template.render(as_request(chat), add_generation_prompt=False) + END_OF_TEXT == example.text


def test_open_block_requests_thinking(template: ChatTemplate) -> None:
    example = next(
        one for one in documents(SEED, 0, 400) if one.thought and len(one.turns) == 2 and not one.system
    )
    asked = [{"role": "user", "content": example.turns[0]}]
    assert template.render(asked, kwargs={"enable_thinking": True}) == example.prompt
    assert template.render(asked, kwargs={"reasoning_effort": "low"}) == example.prompt
    plain = template.render(asked)
    assert plain == replace(example, thought="").prompt
    assert plain == template.render(asked, kwargs={"enable_thinking": False, "reasoning_effort": "high"})
    message = MessageParser("hermes", "think", prompt=example.prompt).parse(
        example.text[len(example.prompt) :]
    )
    assert message.reasoning == example.thought


def test_earlier_thoughts_are_not_rendered(template: ChatTemplate) -> None:
    question = {"role": "user", "content": "Hi"}
    answer = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nHello!", "reasoning_content": "Hm."}
    text = template.render([question, answer, question])
    assert "Hm" not in text
    assert "assistant\nHello!<|im_end|>" in text
    assert "<think>\nHm.\n</think>\n\nHello!" in template.render(
        [question, answer], add_generation_prompt=False
    )


def test_parser_reads_the_trained_calls() -> None:
    for chat in some_chats()[:100]:
        for message in chat.messages:
            if message.calls:
                found = MessageParser("hermes", "think").parse(message.written)
                assert [(one.name, json.loads(one.arguments)) for one in found.tool_calls] == list(
                    message.calls
                )


def test_calls_match_the_schema_of_a_tool() -> None:
    for chat in some_chats():
        tools = {tool["function"]["name"]: tool["function"] for tool in chat.tools}
        assert len(tools) == len(chat.tools)
        for call in (call for message in chat.messages for call in message.calls):
            schema = tools[call.name].get("parameters", {"properties": {}})
            assert set(schema.get("required", ())) <= set(call.arguments) <= set(schema["properties"])
            order = [name for name in schema["properties"] if name in call.arguments]
            assert list(call.arguments) == order  # constrained decoding writes them in this order


def test_arguments_and_answers_are_in_the_chat() -> None:
    """Nothing has to be guessed: numbers and words of a call stand before it, those of an answer too."""
    for chat in some_chats():
        before = ""
        for message in chat.messages:
            if message.role == "assistant":
                for word in message.needed:
                    assert message.skill in ("no fitting tool", "json", "output call") or word in before, (
                        word,
                        before,
                    )
                for call in message.calls:
                    for value in call.arguments.values():
                        words = re.findall(r"[^\s*/+()-]+", str(value))
                        known = message.skill == "output call" or value in (
                            "celsius",
                            *(["add", "subtract", "multiply", "divide"]),
                        )
                        assert known or all(word in before for word in words), (value, before)
            before += message.content


def test_every_skill_occurs() -> None:
    skills = Counter(case.skill for chat in some_chats() for case in tool_eval.cases(chat))
    plain = {skill.removesuffix(", thinking") for skill in skills}
    assert plain == {
        "call",
        "answer",
        "first call",
        "second call",
        "chained call",
        "parallel calls",
        "answer both",
        "plain answer",
        "no fitting tool",
        "output call",
        "person call",
        "person answer",
        "json",
    }
    assert {f"{skill}, thinking" for skill in ("call", "answer", "plain answer", "no fitting tool")} <= set(
        skills
    )


def test_held_out_words_are_never_trained_on() -> None:
    cities = tool_values.words("city", held_out=True)
    assert not set(cities) & set(tool_values.words("city"))
    names = {name for lists in sections("tools").values() for name in lists.get("name held out", ())}
    trained = "".join(chat.text for chat in some_chats())
    held_out = "".join(chat.text for chat in some_chats(True))
    for word in (*cities, *(name for name in names if "{" not in name)):
        assert f'"{word}"' not in trained
    assert sum(f'"{city}"' in held_out for city in cities) > 10


def test_tool_names_are_common_or_invented() -> None:
    """What is common is a handful; a made-up name hardly ever comes in two chats."""

    def named(naming: tool_names.Naming) -> list[str]:
        chats = [tool_chat(SEED, index, naming=naming) for index in range(150)]
        calls = [call for chat in chats for message in chat.messages for call in message.calls]
        return [name for call in calls for name in call.arguments]

    common, made_up = named("common"), named("made up")
    assert {"a", "b", "city", "query", "expression"} <= set(common)
    assert sum(
        name in ("a", "b", "city", "location", "timezone", "query", "topic") for name in common
    ) > 0.6 * len(common)
    assert len(set(made_up)) > 2 * len(set(common))
    assert not {"a", "b", "query", "expression"} & set(made_up)


def test_number_is_a_string_where_the_schema_says_so() -> None:
    found: Counter[tuple[str, type]] = Counter()
    for chat in some_chats():
        types = {
            (tool["function"]["name"], name): schema.get("type")
            for tool in chat.tools
            for name, schema in tool["function"].get("parameters", {}).get("properties", {}).items()
        }
        for call in (call for message in chat.messages for call in message.calls):
            for name, value in call.arguments.items():
                if str(value).isdigit() and types[call.name, name]:
                    found[types[call.name, name], type(value)] += 1
    assert {kind for kind, _ in found} == {"string", "integer", "number"}
    assert {kind for kind, made in found if made is str} == {"string"}
    assert min(found.values()) > 10


def test_easy_chats_are_short() -> None:
    chats = [easy_chat(SEED, index) for index in range(300)]
    assert {"copy", "call", "first call"} <= {chat.kind for chat in chats}
    assert max(len(chat.tools) for chat in chats) < 10
    assert np.median([len(chat.text) for chat in chats]) < 1_000


def _by_the_book(loop: Loop) -> str:
    """What a perfect model writes next."""
    done = sum(message.role == "tool" for message in loop.messages)
    tasks = loop.tasks[:1] if loop.kind in ("one tool", "extraction") else loop.tasks
    return tasks[done].call.text if done < len(tasks) else " ".join(loop.needed)


def test_agent_loops_succeed_only_for_a_perfect_model() -> None:
    perfect, wrong = list(loops(SEED, 60)), list(loops(SEED, 60))
    assert {one.kind for one in perfect} == {"one tool", "two tools", "chain", "extraction"}

    def writer(started: list[Loop]) -> Any:
        return lambda prompts: [
            _by_the_book(next(one for one in started if one.prompt == prompt and not one.finished))
            for prompt in prompts
        ]

    run_loops(perfect, writer(perfect))
    assert all(one.finished and one.right for one in perfect)
    run_loops(
        wrong, lambda prompts: ['<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'] * len(prompts)
    )
    assert not any(one.right for one in wrong)
    text = wrong[0].prompt
    assert text.endswith("<|im_start|>assistant\n")


def test_prompt_tokens_are_marked_in_the_arrays(tmp_path: Path) -> None:
    tokenizer = dataset.make_tokenizer(seed=0, documents_used=150)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    dataset.generate(tmp_path, count=1, num_tool_chats=60, num_easy=2, seed=SEED, processes=1, seconds=60)
    found = ""
    for name in ("tools", "long"):
        ids = np.load(tmp_path / f"{name}.npy")
        ends = np.flatnonzero(ids == token_id(tokenizer, END_OF_TEXT))
        assert name == "tools" or np.diff(ends, prepend=-1).min() > dataset.LONG
        written = ids[(ids & dataset.TOOL_BIT > 0)]
        assert not (written & dataset.GIVEN_BIT).any()
        found += tokenizer.decode((written & dataset.ID_BITS).tolist(), skip_special_tokens=False)
    for chat in (tool_chat(SEED, index) for index in range(60)):
        assert all(
            message.written + "<|im_end|>" in found
            for message in chat.messages
            if message.role == "assistant"
        )
        assert all(segment.text not in found for segment in chat.segments[:-2:2])


def test_markup_is_single_tokens_that_are_not_special() -> None:
    tokenizer = dataset.make_tokenizer(seed=0, documents_used=150)
    ids = [token_id(tokenizer, text) for text in MARKUP]
    assert tokenizer.encode("".join(MARKUP)).ids == ids
    assert tokenizer.decode(ids) == "".join(MARKUP)


def test_words_split_alike_with_and_without_a_space() -> None:
    tokenizer = dataset.make_tokenizer(seed=0, documents_used=150)
    for chat in some_chats()[:50]:
        for word in set(re.findall(r"[A-Za-z]+", chat.messages[0].content)):
            alone, after = tokenizer.encode(word).tokens, tokenizer.encode(f" {word}").tokens
            assert "".join(after) == f"Ġ{word}"
            assert after in (["Ġ", *alone], [f"Ġ{alone[0]}", *alone[1:]])


@pytest.mark.parametrize(
    ("written", "right"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', True),
        ('<tool_call>\n{"name": "f", "arguments": {"a": 2}}\n</tool_call>', False),
        ('<tool_call>\n{"name": "f", "arguments": \n</tool_call>', False),
        ("It is 1.", False),
    ],
)
def test_calls_are_judged_by_name_and_arguments(written: str, right: bool) -> None:
    expected = next(
        message for message in some_chats()[0].messages + some_chats()[1].messages if message.calls
    )._replace(thought="")
    call = expected.calls[0]._replace(name="f", arguments={"a": 1})
    assert tool_eval.is_right(expected._replace(calls=(call,)), written) == right


def test_answers_are_judged_by_what_they_contain() -> None:
    expected = Turn("assistant", "It is 21 degrees.", needed=("21",))
    assert tool_eval.is_right(expected, "There are 21 of them.")
    assert not tool_eval.is_right(expected, "There are 12 of them.")
    assert not tool_eval.is_right(expected, "21 <tool_call>")
    thinking = expected._replace(thought="Hm.")
    assert tool_eval.is_right(thinking, "Oh.\n</think>\n\n21")
    assert not tool_eval.is_right(thinking, "21")
