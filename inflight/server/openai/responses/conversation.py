"""What a body of /v1/responses asks for, as any other chat would ask."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from inflight.frontend.chat import ChatRequest, NamedTool, ToolChoice, checked_tools
from inflight.server.constraints import ContentConstraint
from inflight.server.conversation import Conversation
from inflight.server.errors import ApiError
from inflight.server.openai.responses.schemas import (
    AllowedTools,
    ChosenFunction,
    InputItem,
    InputMessage,
    ResponsesBody,
    TextObjectFormat,
    TextSchemaFormat,
)
from inflight.server.openai.responses.stored_items import ConversationItem, StoredText


def chat_of(body: ResponsesBody, items: Iterable[ConversationItem]) -> ChatRequest:
    """The conversation of all items, those of earlier responses first. Raises ApiError where it makes no sense."""
    tools, choice = _offered(body)
    return ChatRequest(
        messages=_messages(body.instructions, items),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        max_reasoning_tokens=body.max_reasoning_tokens,
    )


def input_items(body: ResponsesBody) -> list[InputItem]:
    if isinstance(body.input, str):
        return [InputMessage(role="user", content=body.input)]
    return body.input


def user_of(body: ResponsesBody) -> str | None:
    """Whom fair scheduling counts this against."""
    return body.user or body.safety_identifier


def text_constraint(body: ResponsesBody) -> ContentConstraint | None:
    """What `text.format` demands of the answer's text."""
    wanted = None if body.text is None else body.text.format
    if isinstance(wanted, TextObjectFormat):
        return ContentConstraint("json_object", True, "text.format", "text.format")
    if isinstance(wanted, TextSchemaFormat):
        return ContentConstraint("json", wanted.schema_, "text.format", "text.format.schema")
    return None


def _messages(instructions: str | None, items: Iterable[ConversationItem]) -> list[dict[str, Any]]:
    conversation = Conversation()
    if instructions:
        conversation.system(instructions)
    for item in items:
        _add(conversation, item)
    return conversation.messages


def _add(conversation: Conversation, item: ConversationItem) -> None:
    match item.type:
        case "message" if item.role == "user":
            conversation.user(_text(item.content))
        case "message" if item.role == "assistant":
            conversation.answer(_text(item.content))
        case "message":  # a developer's are instructions too, and few templates know that role
            conversation.system(_text(item.content))
        case "reasoning":
            # A client that has nothing but a summary sends that.
            parts = item.content or item.summary
            if parts:
                conversation.reasoning("\n\n".join(map(_part_text, parts)))
        case "function_call":
            conversation.call(item.call_id or "", item.name or "", item.arguments)
        case "function_call_output":
            conversation.result(item.call_id or "", _text(item.output), "input.call_id")


def _text(content: str | list[StoredText] | None) -> str:
    return content if isinstance(content, str) else "".join(map(_part_text, content or ()))


def _part_text(part: StoredText) -> str:
    return part.text or part.refusal or ""


def _offered(body: ResponsesBody) -> tuple[list[dict[str, Any]], ToolChoice]:
    """Tools as chats have them, and which of them may be called."""
    given, choice = body.tools or [], body.tool_choice
    functions = [tool.model_dump(include={"name", "description", "parameters", "strict"}) for tool in given]
    tools = checked_tools([{"type": "function", "function": function} for function in functions])
    if isinstance(choice, ChosenFunction):
        return tools, NamedTool(choice.name)
    if not isinstance(choice, AllowedTools):
        return tools, choice or "auto"
    allowed = {tool.name for tool in choice.tools}
    unknown = allowed - {tool.name for tool in given}
    if unknown:
        message = f"tool_choice names {', '.join(sorted(unknown)):.200}: there are no such tools"
        raise ApiError(400, message, code="invalid_value", param="tool_choice")
    return [tool for tool in tools if tool["function"]["name"] in allowed], choice.mode
