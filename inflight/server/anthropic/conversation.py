"""The conversation of a request to /v1/messages, as a `ChatRequest`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from inflight.frontend.agents.answer_grammar import NamedTool, ToolChoice
from inflight.frontend.chat import ChatRequest, checked_tools
from inflight.request import MAX_TENANT_LENGTH
from inflight.server.anthropic.schemas import (
    ContentBlock,
    ConversationBody,
    DocumentBlock,
    MessagesBody,
    RedactedThinkingBlock,
    ResultPart,
    SearchResultBlock,
    SentMessage,
    TextBlock,
    TextSource,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from inflight.server.conversation import Conversation
from inflight.server.errors import invalid
from inflight.server.prepare import ContentConstraint

# Some clients start the system prompt with a billing line that differs in every request. In the prompt it would mean
# nothing to the model and defeat the prefix cache.
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*", re.IGNORECASE)
DEFAULT_EFFORT = "medium"  # for thinking without an effort


def chat_of(body: ConversationBody) -> ChatRequest:
    """Return the conversation. A final assistant message is continued (prefill). Raise ApiError if it is not valid."""
    choice, messages = body.tool_choice, _messages(body)
    continues = (
        bool(messages) and messages[-1].keys() == {"role", "content"} and messages[-1]["role"] == "assistant"
    )
    return ChatRequest(
        messages=messages,
        tools=_tools(body),
        tool_choice=_tool_choice(body),
        parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
        reasoning_effort=_effort(body),
        max_reasoning_tokens=None if body.thinking is None else body.thinking.budget_tokens,
        add_generation_prompt=not continues,
        continue_final_message=continues,
    )


def text_constraint(body: ConversationBody) -> ContentConstraint | None:
    """Return the constraint that `output_config.format` puts on the answer."""
    output_format = None if body.output_config is None else body.output_config.format
    if output_format is None:
        return None
    return ContentConstraint(
        "json", output_format.schema_, "output_config.format", "output_config.format.schema"
    )


def user_of(body: MessagesBody) -> str | None:
    """Return the user that fair scheduling counts this request against, hashed if it is too long for a tenant."""
    user = None if body.metadata is None else body.metadata.user_id
    if user is None or len(user) <= MAX_TENANT_LENGTH:
        return body.user if user is None else user
    return sha256(user.encode(errors="replace")).hexdigest()


def check(body: MessagesBody) -> None:
    """Raise ApiError if parameters contradict each other."""
    thinking = body.thinking
    if thinking is None:
        return
    if (thinking.type == "enabled") != (thinking.budget_tokens is not None):
        message = "it is required with the type enabled, and not allowed with others"
        raise invalid("thinking.budget_tokens", f"thinking.budget_tokens: {message}")
    if thinking.budget_tokens is not None and not 1 <= thinking.budget_tokens < body.max_tokens:
        message = f"{thinking.budget_tokens} must be at least 1 and less than max_tokens"
        raise invalid("thinking.budget_tokens", f"thinking.budget_tokens: {message}")


# ---- messages ----


def _messages(body: ConversationBody) -> list[dict[str, Any]]:
    conversation = Conversation()
    system = body.system or ()
    for text in [system] if isinstance(system, str) else [block.text for block in system]:
        if rest := _BILLING.sub("", text):
            conversation.system(rest)
    for index, message in enumerate(body.messages):
        _add(conversation, message, f"messages[{index}]")
    return conversation.messages


def _add(conversation: Conversation, message: SentMessage, path: str) -> None:
    content = message.content
    blocks = [TextBlock(type="text", text=content)] if isinstance(content, str) else content
    for index, block in enumerate(blocks):
        _add_block(conversation, message.role, block, f"{path}.content[{index}]")


def _add_block(conversation: Conversation, role: str, block: ContentBlock, path: str) -> None:
    match role, block:
        case "user", TextBlock() | DocumentBlock() | SearchResultBlock():
            conversation.user(_text(block), joined=True)
        case "system", TextBlock() if conversation.has_begun:
            # Most templates allow system messages only at the start.
            conversation.user(block.text, joined=True)
        case "system", TextBlock():
            conversation.system(block.text)
        case "assistant", TextBlock():
            conversation.answer(block.text)
        case "assistant", ThinkingBlock():
            if block.thinking:
                conversation.reasoning(block.thinking)
        case "assistant", RedactedThinkingBlock():
            pass  # it is encrypted
        case "assistant", ToolUseBlock():
            conversation.call(block.id, block.name, block.input)
        case "user", ToolResultBlock():
            conversation.result(block.tool_use_id, _result(block), f"{path}.tool_use_id")
        case _:
            raise invalid(path, f"{path}: {block.type} is not allowed in a message with the role {role}")


def _result(block: ToolResultBlock) -> str:
    text = _joined(block.content or "")
    return f"Error: {text}" if block.is_error else text  # templates cannot express it otherwise


def _text(part: ResultPart) -> str:
    """Return what the model reads of a part."""
    match part:
        case TextBlock():
            return part.text
        case DocumentBlock(source=source):
            text = source.data if isinstance(source, TextSource) else _joined(source.content)
            return _tagged("document", text, title=part.title, context=part.context)
        case SearchResultBlock():
            return _tagged("search_result", _joined(part.content), title=part.title, source=part.source)
        case ToolReferenceBlock():
            return f"The tool {part.tool_name} can be called now."


def _joined(content: str | Sequence[ResultPart]) -> str:
    return content if isinstance(content, str) else "\n\n".join(map(_text, content))


def _tagged(tag: str, text: str, **about: str | None) -> str:
    lines = [f"{name}: {value}" for name, value in about.items() if value is not None]
    return "\n".join([f"<{tag}>", *lines, text, f"</{tag}>"])


# ---- tools and thinking ----


def _tools(body: ConversationBody) -> list[dict[str, Any]]:
    """Return the tools as functions. Tools with `defer_loading` are left out until a result refers to them."""
    loaded = _referenced_tools(body)
    functions = [
        {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.input_schema,
            "strict": tool.strict,
        }
        for tool in body.tools or ()
        if not tool.defer_loading or tool.name in loaded
    ]
    return checked_tools([{"type": "function", "function": function} for function in functions])


def _referenced_tools(body: ConversationBody) -> set[str]:
    """Return the names of tools that results or `tool_choice` refer to."""
    names = set() if body.tool_choice is None else {body.tool_choice.name or ""}
    for message in body.messages:
        for block in message.content if isinstance(message.content, list) else ():
            if isinstance(block, ToolResultBlock) and isinstance(block.content, list):
                names |= {part.tool_name for part in block.content if isinstance(part, ToolReferenceBlock)}
    return names


def _tool_choice(body: ConversationBody) -> ToolChoice:
    choice = body.tool_choice
    if choice is None:
        return "auto"
    if (choice.type == "tool") != (choice.name is not None):
        message = "tool_choice.name: it is required with the type tool, and not allowed with others"
        raise invalid("tool_choice.name", message)
    if choice.name is not None:
        return NamedTool(choice.name)
    return {"any": "required", "none": "none"}.get(choice.type, "auto")  # type: ignore[return-value]


def _effort(body: ConversationBody) -> str | None:
    """Return the reasoning effort: None leaves it to the template, "none" disables thinking."""
    if body.thinking is not None and body.thinking.type == "disabled":
        return "none"
    effort = None if body.output_config is None else body.output_config.effort
    return effort or (None if body.thinking is None else DEFAULT_EFFORT)
