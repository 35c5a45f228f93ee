"""Items of /v1/responses become the conversation that a chat would have."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import (
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseReasoningItem,
)

from inflight.frontend.agents.answer_grammar import NamedTool
from inflight.frontend.agents.grammar_writer import InputGrammar
from inflight.server.errors import ApiError
from inflight.server.http.bodies import parse_body
from inflight.server.openai.responses.conversation import chat_of, input_items, text_constraint
from inflight.server.openai.responses.schemas import ResponsesBody
from inflight.server.openai.responses.store import StoredItem

TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}
CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "3"}
ANSWER = ResponseOutputMessage(
    id="msg_1",
    type="message",
    role="assistant",
    status="completed",
    content=[ResponseOutputText(type="output_text", text="Let me add.", annotations=[])],
)
THOUGHT = ResponseReasoningItem.model_validate(
    {"id": "rs_1", "type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]}
)


def body_of(**fields: Any) -> ResponsesBody:
    return parse_body(ResponsesBody, json.dumps(fields).encode())


def chat(**fields: Any) -> Any:
    body = body_of(**fields)
    return chat_of(body, [StoredItem.of_input(item).read() for item in input_items(body)])


def test_text_input_is_a_user_message() -> None:
    assert chat(input="Hello", instructions="Be short.").messages == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hello"},
    ]


def test_instructions_and_developer_messages_are_one_system_message() -> None:
    items = [
        {"role": "developer", "content": "Be short."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
    ]
    assert chat(input=items, instructions="You add.").messages == [
        {"role": "system", "content": "You add.\n\nBe short."},
        {"role": "user", "content": "Hello"},
    ]


def test_answer_can_be_sent_back_unchanged() -> None:
    call = ResponseFunctionToolCall.model_validate({**CALL, "id": "fc_1", "status": "completed"})
    sent = [item.model_dump(by_alias=True) for item in (THOUGHT, ANSWER, call)]
    messages = chat(input=[{"role": "user", "content": "1 + 2?"}, *sent, RESULT]).messages
    arguments = {"name": "add", "arguments": '{"a": 1}'}
    assert messages[1:] == [
        {
            "role": "assistant",
            "reasoning_content": "Hm",
            "content": "Let me add.",
            "tool_calls": [{"id": "c1", "type": "function", "function": arguments}],
        },
        {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "3"},
    ]


def test_consecutive_calls_share_a_message() -> None:
    second = {**CALL, "call_id": "c2"}
    items = [CALL, second, ANSWER.model_dump(), RESULT]
    first, answer, result = chat(input=items).messages
    assert [call["id"] for call in first["tool_calls"]] == ["c1", "c2"]
    assert answer == {"role": "assistant", "content": "Let me add."}
    assert result["role"] == "tool"


def test_result_without_a_call_is_rejected() -> None:
    with pytest.raises(ApiError, match="'c1': no earlier call has this id"):
        chat(input=[RESULT, CALL])


def test_tools_get_the_format_of_chats() -> None:
    request = chat(input="x", tools=[TOOL], parallel_tool_calls=False)
    function = {"name": "add", "parameters": {"type": "object"}, "strict": True}
    assert request.tools == [{"type": "function", "function": function}]
    assert (request.tool_choice, request.parallel_tool_calls) == ("auto", False)
    named = chat(input="x", tools=[TOOL], tool_choice={"type": "function", "name": "add"})
    assert named.tool_choice == NamedTool("add")


def test_only_allowed_tools_are_offered() -> None:
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]}
    request = chat(input="x", tools=[TOOL, {"type": "function", "name": "sub"}], tool_choice=choice)
    assert [tool["function"]["name"] for tool in request.tools] == ["add"]
    assert request.tool_choice == "required"
    with pytest.raises(ApiError, match="tool_choice names add"):
        chat(input="x", tool_choice=choice)


PATCH: dict[str, Any] = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "d",
    "tools": [TOOL, {**PATCH, "name": "edit"}],
}


def test_namespaces_are_flattened_into_functions() -> None:
    request = chat(input="x", tools=[AGENTS, TOOL])
    assert [tool["function"]["name"] for tool in request.tools] == ["agents__add", "agents__edit", "add"]
    call = {**CALL, "namespace": "agents"}
    assistant, result = chat(input=[call, RESULT], tools=[AGENTS]).messages
    assert assistant["tool_calls"][0]["function"]["name"] == result["name"] == "agents__add"


def test_custom_tools_are_functions_with_an_input() -> None:
    request = chat(input="x", tools=[PATCH, {"type": "custom", "name": "note"}])
    patch, note = (tool["function"] for tool in request.tools)
    assert patch["parameters"]["required"] == note["parameters"]["required"] == ["input"]
    assert patch["description"] == 'Edits files.\n\nThe input must match this Lark grammar:\nstart: "x"'
    assert patch["input_grammar"] == InputGrammar("lark", 'start: "x"', "tools[0].format.definition")
    assert patch["strict"]
    assert note["strict"]
    assert "input_grammar" not in note
    call = {"type": "custom_tool_call", "call_id": "c1", "name": "note", "input": "a\nb"}
    assistant, result = chat(input=[call, {**RESULT, "type": "custom_tool_call_output"}]).messages
    assert assistant["tool_calls"][0]["function"] == {"name": "note", "arguments": {"input": "a\nb"}}
    assert result == {"role": "tool", "tool_call_id": "c1", "name": "note", "content": "3"}
    named = chat(input="x", tools=[PATCH], tool_choice={"type": "custom", "name": "apply_patch"})
    assert named.tool_choice == NamedTool("apply_patch")


def test_server_side_tools_are_dropped_unless_they_are_required() -> None:
    search = {"type": "web_search", "external_web_access": False}
    assert [tool["function"]["name"] for tool in chat(input="x", tools=[search, TOOL]).tools] == ["add"]
    assert chat(input="x", tools=[search]).tools == []
    assert chat(input="x", tools=[search, TOOL], tool_choice="required").tool_choice == "required"
    for choice in ("required", {"type": "web_search"}):
        with pytest.raises(ApiError, match=r"requires web_search: the server itself runs no tools") as error:
            chat(input="x", tools=[search], tool_choice=choice)
        assert error.value.param == "tool_choice"


def test_past_calls_of_unavailable_tools_become_text() -> None:
    action = {"type": "exec", "command": ["ls", "-l"], "env": {}, "timeout_ms": 100}
    items = [
        {"type": "local_shell_call", "id": "l1", "call_id": "c", "action": action, "status": "completed"},
        {"type": "local_shell_call_output", "id": "c", "output": "a.py"},
        {
            "type": "web_search_call",
            "id": "w",
            "status": "completed",
            "action": {"type": "search", "query": "rain"},
        },
    ]
    assert chat(input=items).messages == [
        {"role": "assistant", "content": "I ran the shell command: ls -l"},
        {"role": "user", "content": "Output of the shell command:\na.py"},
        {"role": "assistant", "content": "I searched the web: rain"},
    ]


def test_template_arguments_reach_the_template() -> None:
    assert chat(input="x", chat_template_kwargs={"enable_thinking": False}).template_kwargs == {
        "enable_thinking": False
    }


def test_text_format_becomes_a_constraint() -> None:
    assert text_constraint(body_of(input="x")) is None
    assert text_constraint(body_of(input="x", text={"format": {"type": "text"}})) is None
    any_object = text_constraint(body_of(input="x", text={"format": {"type": "json_object"}}))
    assert any_object is not None
    assert any_object.kind == "json_object"
    schema = {"type": "object", "properties": {}}
    schema_format = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    constraint = text_constraint(body_of(input="x", text={"format": schema_format}))
    assert constraint is not None
    assert (constraint.kind, constraint.value) == ("json", schema)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (
            {"tools": [{"type": "browser"}]},
            "tools[0]",
            "browser.*its type must be function, custom or namespace",
        ),
        ({"input": [{"type": "computer_call"}]}, "input[0]", "computer_call.*its type must be message"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0]",
            "input_image.*images are not supported",
        ),
        ({"input": [{**CALL, "arguments": 1}]}, "input[0].arguments", "should be a valid string"),
        ({"input": [{**CALL, "colour": 1}]}, "input[0].colour", "unknown parameter"),
        ({"background": True}, "background", "stream the answer"),
        ({"truncation": "auto"}, "truncation", "does not fit is refused"),
        ({"include": ["everything"]}, "include[0]", "input should be"),
        ({"prompt": {"id": "p"}}, "prompt", "put it into instructions"),
        ({"nonsense": 1}, "nonsense", "unknown parameter"),
    ],
)
def test_unsupported_parameters_are_rejected_by_name(
    fields: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(ApiError, match=message) as refused:
        body_of(**{"input": "x", **fields})
    assert (refused.value.status, refused.value.param) == (400, param)


def test_parameters_without_effect_are_accepted() -> None:
    body_of(
        input="x",
        background=False,
        truncation="disabled",
        service_tier="auto",
        include=["reasoning.encrypted_content"],
        text={"verbosity": "low"},
        reasoning={"effort": "low", "summary": "auto"},
        prompt_cache_key="k",
        safety_identifier="s",
        stream_options={"include_obfuscation": False},
        metadata={"a": "b"},
        max_tool_calls=3,
        client_metadata={"turn_id": "1", "nested": {"a": 1}},
    )
