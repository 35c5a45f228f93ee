"""Answers as the two APIs write them, whole or as events.

An event of the common kind is three byte strings joined: what comes before the text was made once for the answer,
what comes after it once for the request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from inflight.frontend.output_processor import Answer, OutputProcessor
from inflight.server.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from inflight.text import Tokenizer

_encode = msgspec.json.encode

DONE = b"data: [DONE]\n\n"


@dataclass(slots=True, eq=False)
class Choice:
    """An answer as one of the `choices` of a response, and how much of it has been sent."""

    index: int
    prompt: OutputProcessor
    answer: Answer
    echoes: bool  # its prompt is still to be sent
    num_sent: int = 0  # tokens
    offset: int = 0  # characters sent
    prefix: bytes = b""  # of its events
    last_at: float = 0.0  # when its last token came; 0.0 before the first

    @property
    def num_tokens(self) -> int:
        return len(self.answer.output.token_ids)


def usage_of(choices: list[Choice]) -> dict[str, Any]:
    firsts = {id(choice.prompt): choice for choice in reversed(choices)}.values()  # of each prompt
    num_prompt = sum(len(choice.prompt.prompt_token_ids) for choice in firsts)
    num_output = sum(choice.num_tokens for choice in choices)
    num_cached = sum(choice.answer.record.num_cached_tokens for choice in firsts)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


class ResponseFormatter:
    """What both APIs share."""

    object_whole = ""
    object_event = ""

    def __init__(
        self,
        request_id: str,
        created: int,
        model: str,
        tokenizer: Tokenizer | None,
        *,
        num_logprobs: int | None = None,
        with_ids: bool = False,
        with_usage: bool = False,
        with_prompt_logprobs: bool = False,
    ) -> None:
        self._head = {"id": request_id, "object": "", "created": created, "model": model}
        self._tokenizer = tokenizer
        self._num_logprobs = num_logprobs
        self._with_ids = with_ids
        self._with_prompt_logprobs = with_prompt_logprobs
        self._plain = num_logprobs is None and not with_ids
        self._usage = {"usage": None} if with_usage else {}
        self._suffix = b""

    def begin(self, choice: Choice) -> bytes:
        """Make what its events have in common. Returns the event that opens it, if there is one."""
        if self._plain:  # an event is cut where its text goes
            echoes, choice.echoes = choice.echoes, False
            choice.prefix, self._suffix = self._event([self._fields(choice, "\0")]).split(_encode("\0"))
            choice.echoes = echoes
        return b""

    def more(self, choice: Choice, text: str) -> bytes:
        """The event of new text, or b"" where there is nothing to send yet."""
        if self._plain and not choice.echoes:
            return choice.prefix + _encode(text) + self._suffix if text else b""
        if not text and choice.num_sent == choice.num_tokens:
            return b""
        return self._event([self._fields(choice, text)])

    def end(self, choice: Choice, text: str) -> bytes:
        """The last events of an answer."""
        raise NotImplementedError

    def usage(self, choices: list[Choice]) -> bytes:
        return self._event([], usage=usage_of(choices)) if self._usage else b""

    def whole(self, choices: list[Choice]) -> bytes:
        raise NotImplementedError

    def _fields(self, choice: Choice, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _event(self, items: list[dict[str, Any]], **more: Any) -> bytes:
        head = {**self._head, "object": self.object_event, "choices": items, **self._usage, **more}
        return b"data: " + _encode(head) + b"\n\n"

    def _new_ids(self, choice: Choice) -> dict[str, Any]:
        return {"token_ids": choice.answer.output.token_ids[choice.num_sent :]} if self._with_ids else {}


class CompletionFormatter(ResponseFormatter):
    object_whole = object_event = "text_completion"

    def end(self, choice: Choice, text: str) -> bytes:
        output = choice.answer.output
        fields = self._fields(choice, text)
        return self._event(
            [{**fields, "finish_reason": output.finish_reason, "stop_reason": output.stop_reason}]
        )

    def _fields(self, choice: Choice, text: str) -> dict[str, Any]:
        ids, positions = self._tokens(choice)
        echoed = _prompt_text(choice, self._tokenizer) if choice.echoes else ""
        logprobs = None
        if self._num_logprobs is not None:
            logprobs = completion_logprobs(ids, positions, self._num_logprobs, self._tokenizer, choice.offset)
            choice.offset += sum(map(len, logprobs["tokens"]))
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
        positions: list[Any] = (output.logprobs or [])[choice.num_sent :]
        if choice.echoes:
            ids = [*choice.prompt.prompt_token_ids, *ids]
            positions = [*(choice.prompt.prompt_logprobs or []), *positions]
        return ids, positions

    def whole(self, choices: list[Choice]) -> bytes:
        items = []
        for choice in choices:
            output = choice.answer.output
            choice.num_sent = 0
            fields = self._fields(choice, choice.answer.take_text())
            fields |= {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
            if self._with_prompt_logprobs:
                fields["prompt_logprobs"] = prompt_logprobs(choice.prompt.prompt_logprobs)
            items.append(fields)
        return _encode(
            {
                **self._head,
                "object": self.object_whole,
                "choices": items,
                "usage": usage_of(choices),
            }
        )


class ChatFormatter(ResponseFormatter):
    object_whole = "chat.completion"
    object_event = "chat.completion.chunk"

    def begin(self, choice: Choice) -> bytes:
        super().begin(choice)
        delta = {"role": "assistant", "content": ""}
        first = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._event([first])

    def end(self, choice: Choice, text: str) -> bytes:
        output = choice.answer.output
        last = {
            "index": choice.index,
            "delta": {},
            "logprobs": None,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        return self.more(choice, text) + self._event([last])

    def _fields(self, choice: Choice, text: str) -> dict[str, Any]:
        fields = {
            "index": choice.index,
            "delta": {"content": text},
            "logprobs": self._logprobs(choice),
            "finish_reason": None,
            **self._new_ids(choice),
        }
        choice.num_sent = choice.num_tokens
        return fields

    def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        if self._num_logprobs is None:
            return None
        output = choice.answer.output
        positions = (output.logprobs or [])[choice.num_sent :]
        return chat_logprobs(
            output.token_ids[choice.num_sent :], positions, self._num_logprobs, self._tokenizer
        )

    def whole(self, choices: list[Choice]) -> bytes:
        items = []
        for choice in choices:
            output = choice.answer.output
            message = {"role": "assistant", "content": choice.answer.take_text(), "refusal": None}
            items.append(
                {
                    "index": choice.index,
                    "message": message,
                    "logprobs": self._logprobs(choice),
                    "finish_reason": output.finish_reason,
                    "stop_reason": output.stop_reason,
                    **self._new_ids(choice),
                }
            )
        answer = {**self._head, "object": self.object_whole, "choices": items, "usage": usage_of(choices)}
        if self._with_ids:
            answer["prompt_token_ids"] = choices[0].prompt.prompt_token_ids
        if self._with_prompt_logprobs:
            answer["prompt_logprobs"] = prompt_logprobs(choices[0].prompt.prompt_logprobs)
        return _encode(answer)


def _prompt_text(choice: Choice, tokenizer: Tokenizer | None) -> str:
    if choice.prompt.prompt is not None:
        return choice.prompt.prompt
    return (
        ""
        if tokenizer is None
        else tokenizer.decode(choice.prompt.prompt_token_ids, skip_special_tokens=False)
    )
