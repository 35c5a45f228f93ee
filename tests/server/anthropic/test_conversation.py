"""Messages of Anthropic's API become the conversation that a chat would have."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inflight.frontend.agents.answer_grammar import NamedTool
from inflight.frontend.chat import ChatRequest
from inflight.request import MAX_TENANT_LENGTH
from inflight.server.anthropic.conversation import chat_of, check, text_constraint, user_of
from inflight.server.anthropic.schemas import MessagesBody
from inflight.server.errors import ApiError
from inflight.server.http.bodies import parse_body
from inflight.server.schemas import IMAGE_NOTE

USER = {"role": "user", "content": "1 + 2?"}
TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}}
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}


def body_of(*, replace_images: bool = False, **fields: Any) -> MessagesBody:
    whole = {"max_tokens": 16, "messages": [USER], **fields}
    return parse_body(MessagesBody, json.dumps(whole).encode(), replace_images=replace_images)


def converted(**fields: Any) -> ChatRequest:
    """Return the conversation after all checks that the route makes."""
    body = body_of(**fields)
    check(body)
    return chat_of(body)


def messages(*fields: Any, **more: Any) -> Any:
    return chat_of(body_of(messages=list(fields) or [USER], **more)).messages


def test_system_prompt_may_be_a_text_or_blocks() -> None:
    system = {"role": "system", "content": "Be short.\n\nBe kind."}
    blocks = [{"type": "text", "text": "Be short.", **EPHEMERAL}, {"type": "text", "text": "Be kind."}]
    assert messages(system="Be short.\n\nBe kind.") == messages(system=blocks) == [system, USER]


@pytest.mark.parametrize("number", ["1", "2"])
def test_billing_line_is_not_part_of_the_prompt(number: str) -> None:
    """It differs in every request, so the prefix cache would never hit."""
    line = f"x-anthropic-billing-header: cc_version=2.1.{number}; cch={number};"
    blocks = [{"type": "text", "text": line}, {"type": "text", "text": "Be short.", **EPHEMERAL}]
    assert messages(system=blocks) == messages(system="Be short.")
    assert messages(system=f"{line}\nBe short.") == messages(system="Be short.")
    assert messages(system=line) == [USER]


def test_blocks_of_a_turn_become_one_message() -> None:
    from anthropic.types import ToolUseBlock  # which takes seconds to import

    call = ToolUseBlock.model_validate(CALL).model_dump()
    turn = [
        {"type": "thinking", "thinking": "Hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "Let me add.", "citations": None},
        call,
    ]
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "3"}]}
    chat = messages(
        USER,
        {"role": "assistant", "content": turn},
        {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]},
        {"role": "user", "content": "Go on."},
    )
    function = {"name": "add", "arguments": {"a": 1}}
    assert chat == [
        USER,
        {
            "role": "assistant",
            "reasoning_content": "Hm",
            "content": "Let me add.",
            "tool_calls": [{"id": "toolu_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "name": "add", "content": "3"},
        {"role": "user", "content": "Well?\n\nGo on."},
    ]


def test_error_result_starts_with_error() -> None:
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "no such file", "is_error": True}
    chat = messages({"role": "assistant", "content": [CALL]}, {"role": "user", "content": [result]})
    assert chat[-1]["content"] == "Error: no such file"


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}


def result_text(*content: Any, **more: Any) -> str:
    """Return what the model reads of a tool result with this content."""
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": list(content)}
    turns = {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [result]}
    text: str = messages(*turns, **more)[-1]["content"]
    return text


def test_images_are_replaced_by_a_note_on_request() -> None:
    content = [IMAGE, {"type": "text", "text": "What is this?"}]
    (message,) = messages({"role": "user", "content": content}, replace_images=True)
    assert message["content"] == f"{IMAGE_NOTE}\n\nWhat is this?"
    assert result_text(IMAGE, replace_images=True) == IMAGE_NOTE
    with pytest.raises(ApiError, match="--replace-images") as refused:
        result_text(IMAGE)
    assert refused.value.param == "messages[1].content[0].content[0]"


DOCUMENT = {
    "type": "document",
    "source": {"type": "text", "media_type": "text/plain", "data": "Rain is water."},
    "title": "Weather",
    "context": "From a book.",
    "citations": {"enabled": True},
    **EPHEMERAL,
}
PARTS = {
    "type": "content",
    "content": [{"type": "text", "text": "Rain"}, {"type": "text", "text": "is water."}],
}
SEARCH_RESULT = {
    "type": "search_result",
    "source": "https://rain.example",
    "title": "Rain",
    "content": [{"type": "text", "text": "It is wet."}],
    "citations": {"enabled": True},
}


def test_documents_and_search_results_are_read_as_text() -> None:
    document = "<document>\ntitle: Weather\ncontext: From a book.\nRain is water.\n</document>"
    search_result = "<search_result>\ntitle: Rain\nsource: https://rain.example\nIt is wet.\n</search_result>"
    (message,) = messages({"role": "user", "content": [DOCUMENT, SEARCH_RESULT]})
    assert message["content"] == f"{document}\n\n{search_result}"
    assert result_text(DOCUMENT, SEARCH_RESULT) == message["content"]
    parts = {"type": "document", "source": PARTS}
    assert result_text(parts) == "<document>\nRain\n\nis water.\n</document>"
    assert result_text({**parts, "source": {"type": "content", "content": "Wet."}}) == (
        "<document>\nWet.\n</document>"
    )


def test_deferred_tools_are_left_out_until_a_result_refers_to_them() -> None:
    tools = [TOOL, *({**TOOL, "name": name, "defer_loading": True} for name in ("find", "drop"))]
    reference = {"type": "tool_reference", "tool_name": "find"}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [reference]}
    turns = [USER, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [result]}]

    def names(**fields: Any) -> list[str]:
        return [tool["function"]["name"] for tool in converted(tools=tools, **fields).tools]

    assert names() == ["add"]
    assert names(messages=turns) == ["add", "find"]
    assert names(tool_choice={"type": "tool", "name": "drop"}) == ["add", "drop"]
    assert "find" in result_text(reference)


def test_later_system_messages_become_part_of_the_user_s_turn() -> None:
    """Most templates allow system messages only at the start; Claude Code sends one after the question."""
    note = {"role": "system", "content": [{"type": "text", "text": "It is Monday."}]}
    assert messages(USER, note) == [{"role": "user", "content": "1 + 2?\n\nIt is Monday."}]
    assert messages(note, USER, system="Be short.") == [
        {"role": "system", "content": "Be short.\n\nIt is Monday."},
        USER,
    ]


def test_tools_become_chat_functions() -> None:
    chat = chat_of(body_of(tools=[{**TOOL, **EPHEMERAL}]))
    function = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    assert chat.tools == [{"type": "function", "function": function}]
    assert (chat.tool_choice, chat.parallel_tool_calls) == ("auto", True)


@pytest.mark.parametrize(
    ("fields", "choice"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "add"}, NamedTool("add")),
    ],
)
def test_tool_choice_is_translated(fields: dict[str, Any], choice: Any) -> None:
    chat = chat_of(body_of(tools=[TOOL], tool_choice={**fields, "disable_parallel_tool_use": True}))
    assert (chat.tool_choice, chat.parallel_tool_calls) == (choice, False)


def test_thinking_becomes_effort_and_budget() -> None:
    enabled = chat_of(body_of(thinking={"type": "enabled", "budget_tokens": 8}))
    assert (enabled.reasoning_effort, enabled.max_reasoning_tokens) == ("medium", 8)
    disabled = chat_of(body_of(thinking={"type": "disabled"}))
    assert (disabled.reasoning_effort, disabled.max_reasoning_tokens) == ("none", None)
    adaptive = chat_of(body_of(thinking={"type": "adaptive"}))
    assert (adaptive.reasoning_effort, adaptive.max_reasoning_tokens) == ("medium", None)
    assert chat_of(body_of(output_config={"effort": "max"})).reasoning_effort == "max"
    assert chat_of(body_of()).reasoning_effort is None


def test_output_format_becomes_a_json_constraint() -> None:
    schema = {"type": "object", "properties": {}}
    constraint = text_constraint(body_of(output_config={"format": {"type": "json_schema", "schema": schema}}))
    assert constraint is not None
    assert (constraint.kind, constraint.value) == ("json", schema)
    assert text_constraint(body_of()) is None


def test_long_user_ids_are_hashed() -> None:
    assert user_of(body_of(metadata={"user_id": "u"})) == "u"
    assert user_of(body_of(user="u")) == "u"
    longest = {user_of(body_of(metadata={"user_id": "u" * 1000 + end})) for end in "ab"}
    assert len(longest) == 2
    assert all(user and len(user) <= MAX_TENANT_LENGTH for user in longest)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0]",
            "images are not supported.*--replace-images",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}]},
            "messages[0].content[0].source",
            "only documents of text are supported",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0]", "web_search.*runs none"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing parameter"),
        ({"max_tokens": None}, "max_tokens", "valid integer"),
        ({"mcp_servers": [{}]}, "mcp_servers", "call them yourself"),
        ({"thread": {"type": "create"}}, "thread", "send all messages"),
        ({"nonsense": 1}, "nonsense", "unknown parameter"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens", "it is required"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 16}},
            "thinking.budget_tokens",
            "less than max_tokens",
        ),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "it is required"),
        (
            {"messages": [{"role": "user", "content": [CALL]}]},
            "messages[0].content[0]",
            "tool_use is not allowed in a message with the role user",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]}]},
            "messages[0].content[0].tool_use_id",
            "no earlier call",
        ),
    ],
)
def test_invalid_parameters_are_rejected_by_name(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(ApiError, match=message) as refused:
        converted(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)
