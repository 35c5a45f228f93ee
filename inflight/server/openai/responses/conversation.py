"""The conversation of a request to /v1/responses: from its body and stored items to a `ChatRequest`."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from inflight.errors import shown
from inflight.frontend.agents.grammar_writer import INPUT
from inflight.frontend.chat import ChatRequest, num_characters
from inflight.frontend.output_processor import OutputProcessor
from inflight.request import RequestContext
from inflight.server.access.keys import Caller
from inflight.server.conversation import Conversation
from inflight.server.errors import ApiError, invalid
from inflight.server.formatters import encode
from inflight.server.openai.responses.schemas import (
    InputItem,
    InputMessage,
    ItemReference,
    ResponseConversationBody,
    ResponsesBody,
    TextObjectFormat,
    TextSchemaFormat,
)
from inflight.server.openai.responses.store import (
    NOT_STORED,
    ConversationItem,
    ResponseContent,
    StoredItem,
    StoredResponse,
    StoredText,
    check_conversation,
)
from inflight.server.openai.responses.tools import ResponseTools, shown_name
from inflight.server.prepare import ContentConstraint, GenerationParams, prepare_conversation
from inflight.server.state import ServedModel, ServerState

MAX_REPEATED_CHARACTERS = 1 << 20


def chat_of(body: ResponseConversationBody, items: Iterable[ConversationItem]) -> ChatRequest:
    """Return the conversation of all items, earlier responses first. Raise ApiError if it is not valid."""
    tools = ResponseTools.from_body(body)
    return ChatRequest(
        messages=_messages(body.instructions, items),
        tools=tools.functions,
        tool_choice=tools.choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        max_reasoning_tokens=body.max_reasoning_tokens,
        template_kwargs=body.chat_template_kwargs or {},
    )


def check_repeated(body: ResponsesBody) -> None:
    """Bound what every event with the whole response repeats, though the model may never see it."""
    size = num_characters(body.model_dump(include={"tools", "tool_choice", "text", "prompt_cache_key"}))
    if size > MAX_REPEATED_CHARACTERS:
        message = (
            f"tools, tool_choice, text and prompt_cache_key have {size} characters: together they may have at most "
            f"{MAX_REPEATED_CHARACTERS}"
        )
        raise invalid("tools", message)


def input_items(body: ResponseConversationBody) -> list[InputItem]:
    if isinstance(body.input, str):
        return [InputMessage(role="user", content=body.input)]
    return body.input


def user_of(body: ResponsesBody) -> str | None:
    """Return the user that fair scheduling counts this request against."""
    return body.user or body.safety_identifier


def text_constraint(body: ResponseConversationBody) -> ContentConstraint | None:
    """Return the constraint that `text.format` puts on the answer."""
    text_format = None if body.text is None else body.text.format
    if isinstance(text_format, TextObjectFormat):
        return ContentConstraint("json_object", True, "text.format", "text.format")
    if isinstance(text_format, TextSchemaFormat):
        return ContentConstraint("json", text_format.schema_, "text.format", "text.format.schema")
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
        case "message":  # developer messages are instructions too, and few templates know that role
            conversation.system(_text(item.content))
        case "reasoning":
            parts = item.content or item.summary  # some clients only have a summary
            if parts:
                conversation.reasoning("\n\n".join(map(_part_text, parts)))
        case "function_call":
            conversation.call(item.call_id or "", shown_name(item.name or "", item.namespace), item.arguments)
        case "custom_tool_call":
            name = shown_name(item.name or "", item.namespace)
            conversation.call(item.call_id or "", name, {INPUT: item.input or ""})
        case "function_call_output" | "custom_tool_call_output":
            conversation.result(item.call_id or "", _text(item.output), "input.call_id")


def _text(content: str | list[StoredText] | None) -> str:
    return content if isinstance(content, str) else "".join(map(_part_text, content or ()))


def _part_text(part: StoredText) -> str:
    return part.text or part.refusal or ""


class ResponseInput:
    """The conversation of a body, with the stored items that it refers to. Call `look_up` before `chat`."""

    def __init__(self, state: ServerState, caller: Caller, body: ResponseConversationBody) -> None:
        self._state, self._caller, self._body = state, caller, body
        self._input = input_items(body)
        self._earlier: Sequence[StoredItem] = ()  # the conversation that this request continues
        self._referenced: dict[str, StoredItem] = {}
        self.items: list[StoredItem] = []  # all of them

    async def look_up(self) -> None:
        """Fetch the stored items that the body refers to. Raise ApiError if they are not stored."""
        responses, response_id = self._state.responses, self._body.previous_response_id
        if response_id is not None:
            earlier = await responses.conversation(self._caller, response_id)
            if earlier is None:
                message = f"previous_response_id is {shown(response_id, 200)}: {NOT_STORED}"
                raise ApiError(400, message, code="previous_response_not_found", param="previous_response_id")
            self._earlier = earlier
        item_ids = list(dict.fromkeys(item.id for item in self._input if isinstance(item, ItemReference)))
        if item_ids:
            items = await responses.find_items(self._caller, item_ids, self._state.options.max_body_size)
            for item_id, item in items.items():
                if item is None:
                    message = f"there is no item {shown(item_id, 200)}: its response was never stored, or was evicted"
                    raise ApiError(400, message, code="item_not_found", param="input")
                self._referenced[item_id] = item

    def chat(self) -> ChatRequest:
        """Return the conversation. Takes long: call it in a thread."""
        self.items = [*self._earlier, *self._own_items()]
        if self._earlier or self._referenced:  # otherwise it is the body, whose size is checked
            param = "previous_response_id" if self._earlier else "input"
            check_conversation(self.items, self._state.options.max_body_size, param)
        # Items are decoded one by one, so that no other thread waits long for the GIL.
        return chat_of(self._body, (item.read() for item in self.items))

    def _own_items(self) -> Iterator[StoredItem]:
        """Yield the items of the body, with references replaced by the items that they refer to."""
        for item in self._input:
            yield self._referenced[item.id] if isinstance(item, ItemReference) else StoredItem.of_input(item)


class ResponseTurn(ResponseInput):
    """One request: its conversation, and what is stored of it.

    Call `look_up` once it is admitted, then `prepare`, and after the answer `set_ended` and `store`.
    """

    def __init__(self, state: ServerState, model: ServedModel, caller: Caller, body: ResponsesBody) -> None:
        super().__init__(state, caller, body)
        self._model, self._sampled = model, body
        self._ended: StoredResponse | None = None

    def prepare(self, params: GenerationParams, context: RequestContext) -> list[OutputProcessor]:
        """Render the conversation. Takes long: call it in a thread."""
        body = self._sampled
        check_repeated(body)
        chat = self.chat()
        if body.store is False:
            self.items = []
        return prepare_conversation(self._model, chat, params, context)

    def set_ended(self, response: dict[str, Any]) -> None:
        """Set the finished response, for `store`."""
        outputs = tuple(map(StoredItem.of_output, response["output"]))
        content = ResponseContent(encode(response), secrets.token_hex(8))
        items = (*self.items, *outputs)
        self._ended = StoredResponse(response["id"], content, items, len(outputs))

    async def store(self) -> None:
        """Store the response. The client sees its end only afterwards, so that it can be continued in any process."""
        if self._ended is not None:
            await self._state.responses.add(self._caller, self._ended)
