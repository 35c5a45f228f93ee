"""What a body of /v1/messages asks for, as any other chat would ask."""

from __future__ import annotations

import re
from hashlib import sha256
from typing import Any

from inflight.frontend.chat import ChatRequest, NamedTool, ToolChoice, checked_tools
from inflight.frontend.input_processor import MAX_TENANT_LENGTH
from inflight.server.anthropic.schemas import (
    ContentBlock,
    ConversationBody,
    MessagesBody,
    RedactedThinkingBlock,
    SentMessage,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from inflight.server.conversation import Conversation
from inflight.server.errors import ApiError
from inflight.server.params import ContentConstraint

# Some clients begin the system prompt with a line for whoever bills them, another one in every request: in the prompt
# it would mean nothing to the model, and no prefix would ever be found again.
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*", re.IGNORECASE)
DEFAULT_EFFORT = "medium"  # where thinking is asked for, and not how much of it


def chat_of(body: ConversationBody) -> ChatRequest:
    """Raises ApiError where the conversation makes no sense. An answer that has been begun is gone on with."""
    choice, messages = body.tool_choice, _messages(body)
    begun = (
        bool(messages) and messages[-1].keys() == {"role", "content"} and messages[-1]["role"] == "assistant"
    )
    return ChatRequest(
        messages=messages,
        tools=_tools(body),
        tool_choice=_tool_choice(body),
        parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
        reasoning_effort=_effort(body),
        max_reasoning_tokens=None if body.thinking is None else body.thinking.budget_tokens,
        add_generation_prompt=not begun,
        continue_final_message=begun,
    )


def text_constraint(body: ConversationBody) -> ContentConstraint | None:
    """What `output_config.format` demands of the answer's text."""
    wanted = None if body.output_config is None else body.output_config.format
    if wanted is None:
        return None
    return ContentConstraint("json", wanted.schema_, "output_config.format", "output_config.format.schema")


def user_of(body: MessagesBody) -> str | None:
    """Whom fair scheduling counts this against. Ids of users may be longer than a tenant's name."""
    user = None if body.metadata is None else body.metadata.user_id
    if user is None or len(user) <= MAX_TENANT_LENGTH:
        return body.user if user is None else user
    return sha256(user.encode(errors="replace")).hexdigest()


def check(body: MessagesBody) -> None:
    """Raises ApiError for what has the right types and yet cannot be."""
    thinking = body.thinking
    if thinking is None:
        return
    if (thinking.type == "enabled") != (thinking.budget_tokens is not None):
        raise _wrong("thinking.budget_tokens", "it is needed with the type enabled, and with no other")
    if thinking.budget_tokens is not None and not 1 <= thinking.budget_tokens < body.max_tokens:
        raise _wrong(
            "thinking.budget_tokens", f"{thinking.budget_tokens} must be at least 1, and less than max_tokens"
        )


# ---- messages ----


def _messages(body: ConversationBody) -> list[dict[str, Any]]:
    conversation = Conversation()
    system = body.system or ()
    for text in [system] if isinstance(system, str) else [block.text for block in system]:
        if left := _BILLING.sub("", text):
            conversation.system(left)
    for index, message in enumerate(body.messages):
        _add(conversation, message, f"messages[{index}]")
    return conversation.messages


def _add(conversation: Conversation, message: SentMessage, place: str) -> None:
    content = message.content
    blocks = [TextBlock(type="text", text=content)] if isinstance(content, str) else content
    for index, block in enumerate(blocks):
        _add_block(conversation, message.role, block, f"{place}.content[{index}]")


def _add_block(conversation: Conversation, role: str, block: ContentBlock, place: str) -> None:
    match role, block:
        case "user", TextBlock():
            conversation.user(block.text, joined=True)
        case "system", TextBlock():
            conversation.system(block.text)
        case "assistant", TextBlock():
            conversation.answer(block.text)
        case "assistant", ThinkingBlock():
            if block.thinking:
                conversation.reasoning(block.thinking)
        case "assistant", RedactedThinkingBlock():
            pass  # no one here can read it
        case "assistant", ToolUseBlock():
            conversation.call(block.id, block.name, block.input)
        case "user", ToolResultBlock():
            conversation.result(block.tool_use_id, _result(block), f"{place}.tool_use_id")
        case _:
            raise _wrong(place, f"{block.type} is not allowed in a message of the {role}")


def _result(block: ToolResultBlock) -> str:
    content = block.content or ""
    text = content if isinstance(content, str) else "\n\n".join(part.text for part in content)
    return f"Error: {text}" if block.is_error else text  # templates have no other way to say so


def _wrong(param: str, message: str) -> ApiError:
    return ApiError(400, f"{param}: {message}", code="invalid_value", param=param)


# ---- tools and thinking ----


def _tools(body: ConversationBody) -> list[dict[str, Any]]:
    functions = [
        {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.input_schema,
            "strict": tool.strict,
        }
        for tool in body.tools or ()
    ]
    return checked_tools([{"type": "function", "function": function} for function in functions])


def _tool_choice(body: ConversationBody) -> ToolChoice:
    choice = body.tool_choice
    if choice is None:
        return "auto"
    if (choice.type == "tool") != (choice.name is not None):
        raise _wrong("tool_choice.name", "it is needed with the type tool, and with no other")
    if choice.name is not None:
        return NamedTool(choice.name)
    return {"any": "required", "none": "none"}.get(choice.type, "auto")  # type: ignore[return-value]


def _effort(body: ConversationBody) -> str | None:
    """What is not said is as the template has it; "none" switches thinking off."""
    if body.thinking is not None and body.thinking.type == "disabled":
        return "none"
    asked = None if body.output_config is None else body.output_config.effort
    return asked or (None if body.thinking is None else DEFAULT_EFFORT)
