"""What a body of /v1/responses asks for, as any other chat would ask."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from inflight.frontend import OutputProcessor
from inflight.frontend.chat import ChatRequest, NamedTool, ToolChoice, checked_tools
from inflight.server.access.keys import Caller
from inflight.server.conversation import Conversation
from inflight.server.errors import ApiError
from inflight.server.formatters import encode
from inflight.server.openai.responses.schemas import (
    AllowedTools,
    ChosenFunction,
    InputItem,
    InputMessage,
    ItemReference,
    ResponsesBody,
    TextObjectFormat,
    TextSchemaFormat,
)
from inflight.server.openai.responses.store import (
    ConversationItem,
    ResponseContent,
    StoredItem,
    StoredResponse,
    TextPart,
    check_conversation,
)
from inflight.server.params import ContentConstraint, GenerationParams
from inflight.server.prepare import prepare_chat
from inflight.server.state import ServerState


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


def _text(content: str | list[TextPart] | None) -> str:
    return content if isinstance(content, str) else "".join(map(_part_text, content or ()))


def _part_text(part: TextPart) -> str:
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


class ResponseTurn:
    """`look_up` once the request is admitted, then `prepare`; `ended` and `keep` after the answer."""

    def __init__(self, state: ServerState, caller: Caller, body: ResponsesBody) -> None:
        self._state, self._caller, self._body = state, caller, body
        self._input = input_items(body)
        self._earlier: Sequence[StoredItem] = ()  # the conversation that this one continues
        self._referenced: dict[str, StoredItem] = {}
        self._conversation: list[StoredItem] = []  # all items before the answer, where they are to be stored
        self._ended: StoredResponse | None = None

    async def look_up(self) -> None:
        """Fetch what the body refers to. Raises ApiError where that is not stored."""
        responses, response_id = self._state.responses, self._body.previous_response_id
        if response_id is not None:
            earlier = await responses.conversation(self._caller, response_id)
            if earlier is None:
                message = f"there is no response {response_id!r:.200} to go on from"
                message += ": it was not stored, or is forgotten by now"
                raise ApiError(400, message, code="previous_response_not_found", param="previous_response_id")
            self._earlier = earlier
        item_ids = list(dict.fromkeys(item.id for item in self._input if isinstance(item, ItemReference)))
        if item_ids:
            found = await responses.find_items(self._caller, item_ids, self._state.options.max_body_size)
            for item_id, item in found.items():
                if item is None:
                    message = f"there is no item {item_id!r:.200}: its response was not stored, or is forgotten by now"
                    raise ApiError(400, message, code="item_not_found", param="input")
                self._referenced[item_id] = item

    def prepare(self, params: GenerationParams) -> list[OutputProcessor]:
        """Render the conversation. Takes long."""
        body = self._body
        items = [*self._earlier, *self._own_items()]
        if self._earlier or self._referenced:  # else all of it was in the body, whose limits are checked
            param = "previous_response_id" if self._earlier else "input"
            check_conversation(items, self._state.options.max_body_size, param)
        if body.store is not False:
            self._conversation = items
        return prepare_chat(
            # Items are decoded one by one, so that no other thread waits long for Python's lock.
            *(self._state, self._caller, chat_of(body, (item.read() for item in items)), params),
            priority=body.priority or 0,
            user=user_of(body),
            cache_salt=body.cache_salt or "",
        )

    def _own_items(self) -> Iterator[StoredItem]:
        """Yield the items of the body, references replaced by what they refer to."""
        for item in self._input:
            yield self._referenced[item.id] if isinstance(item, ItemReference) else StoredItem.of_input(item)

    def ended(self, response: dict[str, Any]) -> None:
        """Remember the response as it is now, to be stored."""
        outputs = tuple(map(StoredItem.of_output, response["output"]))
        content = ResponseContent(encode(response), secrets.token_hex(8))
        items = (*self._conversation, *outputs)
        self._ended = StoredResponse(response["id"], content, items, len(outputs))

    async def keep(self) -> None:
        """Store the response before its client hears of its end, so that any process can continue from it."""
        if self._ended is not None:
            await self._state.responses.add(self._caller, self._ended)
