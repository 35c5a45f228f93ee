"""Completions and chats as OpenAI's API writes them.

An event of the common kind is three byte strings joined: what comes before the text was made once for the answer,
what comes after it once for the request.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from inflight.agents import (
    ArgumentsDelta,
    ContentDelta,
    ParserEvent,
    ReasoningDelta,
    ToolCallBegun,
)
from inflight.server.formatters import Choice, ResponseFormatter, encode, json_pieces, usage_of
from inflight.server.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from inflight.text import Tokenizer

DONE = b"data: [DONE]\n\n"


class OpenAIFormatter(ResponseFormatter):
    """What both share."""

    object_whole = ""
    object_event = ""

    def __init__(
        self,
        request_id: str,
        created: int,
        model: str,
        tokenizer: Tokenizer | None,
        *,
        fingerprint: str,
        num_logprobs: int | None = None,
        with_ids: bool = False,
        with_usage: bool = False,
        with_usage_so_far: bool = False,
        num_prompt_logprobs: int | None = None,
    ) -> None:
        self._head = {
            "id": request_id,
            "object": "",
            "created": created,
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._tokenizer = tokenizer
        self._num_logprobs = num_logprobs
        self._with_ids = with_ids
        self._num_prompt_logprobs = num_prompt_logprobs
        self._plain = num_logprobs is None and not with_ids and not with_usage_so_far
        self._usage = {"usage": None} if with_usage else {}
        self._with_usage_so_far = with_usage_so_far
        self._suffix = b""

    def opening(self, choices: list[Choice]) -> bytes:
        return b"".join([self._begin(choice) for choice in choices])

    def _begin(self, choice: Choice) -> bytes:
        """Make what its events have in common. Returns the event that opens it, if there is one."""
        if self._plain:  # an event is cut where its text goes
            echoes, choice.echoes = choice.echoes, False
            choice.prefix, self._suffix = self._event([self._fields(choice, "\0")]).split(encode("\0"))
            choice.echoes = echoes
        return b""

    def more(self, choice: Choice) -> bytes:
        return self._text_event(choice, choice.answer.take_text())

    def _text_event(self, choice: Choice, text: str) -> bytes:
        if self._plain and not choice.echoes:
            return choice.prefix + encode(text) + self._suffix if text else b""
        if not text and choice.num_sent == choice.num_tokens:
            return b""
        return self._choice_event(choice, self._fields(choice, text))

    def closing(self, choices: list[Choice]) -> bytes:
        return (self._event([], usage=usage_of(choices)) if self._usage else b"") + DONE

    def _fields(self, choice: Choice, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _choice_event(self, choice: Choice, fields: dict[str, Any]) -> bytes:
        more = {"usage": usage_of([choice])} if self._with_usage_so_far else {}
        return self._event([fields], **more)

    def _event(self, items: list[dict[str, Any]], **more: Any) -> bytes:
        head = {**self._head, "object": self.object_event, "choices": iter(items), **self._usage, **more}
        return b"data: " + b"".join(json_pieces(head)) + b"\n\n"

    def _prompt_logprobs(self, choice: Choice) -> Any:
        count = self._num_prompt_logprobs or 0
        return prompt_logprobs(choice.prompt.prompt_positions, count, self._tokenizer)

    def _new_ids(self, choice: Choice) -> dict[str, Any]:
        return {"token_ids": choice.answer.output.token_ids[choice.num_sent :]} if self._with_ids else {}


class CompletionFormatter(OpenAIFormatter):
    object_whole = object_event = "text_completion"

    def end(self, choice: Choice) -> bytes:
        output = choice.answer.output
        fields = self._fields(choice, choice.answer.take_text())
        fields |= {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
        return self._choice_event(choice, fields)

    def _fields(self, choice: Choice, text: str) -> dict[str, Any]:
        ids, positions = self._tokens(choice)
        echoed = _prompt_text(choice, self._tokenizer) if choice.echoes else ""
        logprobs = None
        if self._num_logprobs is not None:
            logprobs, choice.offset = completion_logprobs(
                ids, positions, self._num_logprobs, self._tokenizer, choice.offset
            )
        more = self._new_ids(choice)
        if self._with_ids and choice.num_sent == 0:
            more["prompt_token_ids"] = choice.prompt.prompt_token_ids
        choice.num_sent, choice.echoes = choice.num_tokens, False
        return {
            "index": choice.index,
            "text": echoed + text,
            "logprobs": logprobs,
            "finish_reason": None,
            "stop_reason": None,
            **more,
        }

    def _tokens(self, choice: Choice) -> tuple[list[int], list[Any]]:
        """Token ids and their positions' logprobs, as far as they are new."""
        output = choice.answer.output
        ids: list[int] = output.token_ids[choice.num_sent :]
        positions: list[Any] = choice.answer.positions[choice.num_sent :]
        if choice.echoes:
            ids = [*choice.prompt.prompt_token_ids, *ids]
            positions = [*(choice.prompt.prompt_positions or []), *positions]
        return ids, positions

    def whole(self, choices: list[Choice]) -> Iterator[bytes]:
        return json_pieces(
            {
                **self._head,
                "object": self.object_whole,
                "choices": map(self._item, choices),
                "usage": usage_of(choices),
            }
        )

    def _item(self, choice: Choice) -> dict[str, Any]:
        output = choice.answer.output
        choice.num_sent = 0
        fields = self._fields(choice, choice.answer.take_text())
        fields |= {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
        if self._num_prompt_logprobs is not None:
            fields["prompt_logprobs"] = self._prompt_logprobs(choice)
        return fields


class ChatFormatter(OpenAIFormatter):
    object_whole = "chat.completion"
    object_event = "chat.completion.chunk"

    def __init__(self, *args: Any, with_reasoning: bool = True, **options: Any) -> None:
        super().__init__(*args, **options)
        self._with_reasoning = with_reasoning

    def _begin(self, choice: Choice) -> bytes:
        super()._begin(choice)
        return self._choice_event(choice, self._delta(choice, {"role": "assistant", "content": ""}, None))

    def more(self, choice: Choice) -> bytes:
        if choice.reader is None:
            return super().more(choice)
        events = [self._message_event(choice, event) for event in choice.reader.take()]
        found = b"".join(events)
        if not found and not self._plain and choice.num_sent < choice.num_tokens:
            return self._text_event(choice, "")  # tokens of what is held back, or of a marker
        return found

    def _message_event(self, choice: Choice, event: ParserEvent) -> bytes:
        if isinstance(event, ContentDelta):
            return self._text_event(choice, event.text)
        delta = self._message_delta(event)
        if delta is None:
            return b""
        fields = self._delta(choice, delta, self._logprobs(choice))
        fields |= self._new_ids(choice)
        choice.num_sent = choice.num_tokens
        return self._choice_event(choice, fields)

    def _message_delta(self, event: ParserEvent) -> dict[str, Any] | None:
        match event:
            case ReasoningDelta(text) if self._with_reasoning:
                return {"reasoning_content": text, "reasoning": text}
            case ToolCallBegun(index, name, id):
                function = {"name": name, "arguments": ""}
                return {"tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]}
            case ArgumentsDelta(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        return None

    def end(self, choice: Choice) -> bytes:
        more = self.more(choice)
        last = self._delta(choice, {}, None)
        last |= {"finish_reason": choice.finish_reason, "stop_reason": choice.answer.output.stop_reason}
        return more + self._choice_event(choice, last)

    def _delta(
        self, choice: Choice, delta: dict[str, Any], logprobs: dict[str, Any] | None
    ) -> dict[str, Any]:
        return {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _fields(self, choice: Choice, text: str) -> dict[str, Any]:
        fields = self._delta(choice, {"content": text}, self._logprobs(choice))
        fields |= self._new_ids(choice)
        choice.num_sent = choice.num_tokens
        return fields

    def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        if self._num_logprobs is None:
            return None
        positions = choice.answer.positions[choice.num_sent :]
        return chat_logprobs(positions, self._num_logprobs, self._tokenizer)

    def whole(self, choices: list[Choice]) -> Iterator[bytes]:
        answer = {
            **self._head,
            "object": self.object_whole,
            "choices": map(self._item, choices),
            "usage": usage_of(choices),
        }
        if self._with_ids:
            answer["prompt_token_ids"] = choices[0].prompt.prompt_token_ids
        if self._num_prompt_logprobs is not None:
            answer["prompt_logprobs"] = self._prompt_logprobs(choices[0])
        return json_pieces(answer)

    def _item(self, choice: Choice) -> dict[str, Any]:
        choice.answer.complete()
        return {
            "index": choice.index,
            "message": self._message(choice),
            "logprobs": self._logprobs(choice),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.answer.output.stop_reason,
            **self._new_ids(choice),
        }

    def _message(self, choice: Choice) -> dict[str, Any]:
        message = choice.answer.message()
        found: dict[str, Any] = {"role": "assistant", "content": message.content, "refusal": None}
        if message.reasoning and self._with_reasoning:
            found |= {"reasoning_content": message.reasoning, "reasoning": message.reasoning}
        if message.tool_calls:
            found["tool_calls"] = message.as_dict()["tool_calls"]
        return found


def _prompt_text(choice: Choice, tokenizer: Tokenizer | None) -> str:
    if choice.prompt.prompt is not None:
        return choice.prompt.prompt
    return (
        ""
        if tokenizer is None
        else tokenizer.decode(choice.prompt.prompt_token_ids, skip_special_tokens=False)
    )
