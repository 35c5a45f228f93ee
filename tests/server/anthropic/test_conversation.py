"""Messages of Anthropic's API become the conversation that a chat would have."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inflight.frontend.chat import ChatRequest, NamedTool
from inflight.frontend.input_processor import MAX_TENANT_LENGTH
from inflight.server.anthropic.conversation import chat_of, check, text_constraint, user_of
from inflight.server.anthropic.schemas import MessagesBody
from inflight.server.errors import ApiError
from inflight.server.http.bodies import parse_body

USER = {"role": "user", "content": "1 + 2?"}
TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}}
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}


def body_of(**fields: Any) -> MessagesBody:
    whole = {"max_tokens": 16, "messages": [USER], **fields}
    return parse_body(MessagesBody, json.dumps(whole).encode())


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
            "image.*no images or documents",
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
