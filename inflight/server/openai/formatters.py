"""Completions and chats in OpenAI's format.

A common event is three byte strings joined. The one before the text is encoded once per answer, the one after it once
per request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, TypeVar

import msgspec

from inflight.events import PositionLogprobs, logprob_columns, own_logprob, unpack_logprobs
from inflight.frontend.agents.source import (
    ArgumentsDelta,
    ContentDelta,
    ParserEvent,
    ReasoningDelta,
    ToolCallBegun,
)
from inflight.frontend.text.tokenizer import Tokenizer
from inflight.server.formatters import Choice, ResponseFormatter, encode, json_pieces, usage_of

DONE = b"data: [DONE]\n\n"


class OpenAIFormatter(ResponseFormatter):
    """The parts that completions and chats share."""

    object_whole: str
    object_event: str

    def __init__(
        self,
        request_id: str,
        model: str,
        *,
        created: int,
        tokenizer: Tokenizer | None,
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
        self._without_details = num_logprobs is None and not with_ids and not with_usage_so_far
        self._usage = {"usage": None} if with_usage else {}
        self._with_usage_so_far = with_usage_so_far
        self._suffix = b""

    def opening(self, choices: list[Choice]) -> bytes:
        return b"".join([self._begin(choice) for choice in choices])

    def _begin(self, choice: Choice) -> bytes:
        """Encode what the answer's events have in common. Return the event that opens it, or b"" if there is none."""
        if self._without_details:  # encode an event and cut it where the text goes
            echoes, choice.echoes = choice.echoes, False
            choice.prefix, self._suffix = self._event([self._fields(choice, "\0")]).split(encode("\0"))
            choice.echoes = echoes
        return b""

    def more(self, choice: Choice) -> bytes:
        return self._text_event(choice, choice.answer.take_text())

    def _text_event(self, choice: Choice, text: str) -> bytes:
        if self._without_details and not choice.echoes:
            return choice.prefix + encode(text) + self._suffix if text else b""
        if not text and choice.num_sent == choice.num_tokens:
            return b""
        return self._choice_event(choice, self._fields(choice, text))

    def closing(self, choices: list[Choice]) -> bytes:
        return (self._event([], usage=usage_of(choices)) if self._usage else b"") + DONE

    def whole(self, choices: list[Choice]) -> Iterator[bytes]:
        return json_pieces(self._answer(choices))

    def _answer(self, choices: list[Choice]) -> dict[str, Any]:
        return {
            **self._head,
            "object": self.object_whole,
            "choices": map(self._item, choices),
            "usage": usage_of(choices),
        }

    def _item(self, choice: Choice) -> dict[str, Any]:
        """Return one of the `choices` of a whole answer."""
        raise NotImplementedError

    def _fields(self, choice: Choice, text: str) -> dict[str, Any]:
        """Return one of the `choices` of an event with new text."""
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
        return self._choice_event(choice, self._last_fields(choice))

    def _last_fields(self, choice: Choice) -> dict[str, Any]:
        output = choice.answer.output
        fields = self._fields(choice, choice.answer.take_text())
        return fields | {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}

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
        """Return the token ids that were not sent yet, and the logprobs at their positions."""
        output = choice.answer.output
        ids: list[int] = output.token_ids[choice.num_sent :]
        positions: list[Any] = choice.answer.positions[choice.num_sent :]
        if choice.echoes:
            ids = [*choice.prompt.prompt_token_ids, *ids]
            positions = [*(choice.prompt.prompt_positions or []), *positions]
        return ids, positions

    def _item(self, choice: Choice) -> dict[str, Any]:
        fields = self._last_fields(choice)
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
        if choice.answer.reader is None:
            return super().more(choice)
        events = [self._message_event(choice, event) for event in choice.answer.take_events()]
        data = b"".join(events)
        if not data and not self._without_details and choice.num_sent < choice.num_tokens:
            return self._text_event(choice, "")  # tokens of held-back text, or of a marker
        return data

    def _message_event(self, choice: Choice, event: ParserEvent) -> bytes:
        if isinstance(event, ContentDelta):
            return self._text_event(choice, event.text)
        delta = self._message_delta(event)
        return b"" if delta is None else self._choice_event(choice, self._delta_with_tokens(choice, delta))

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
        delta = self._delta(choice, {}, None)
        delta |= {
            "finish_reason": choice.answer.finish_reason,
            "stop_reason": choice.answer.output.stop_reason,
        }
        return more + self._choice_event(choice, delta)

    def _delta(
        self, choice: Choice, delta: dict[str, Any], logprobs: dict[str, Any] | None
    ) -> dict[str, Any]:
        return {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _fields(self, choice: Choice, text: str) -> dict[str, Any]:
        return self._delta_with_tokens(choice, {"content": text})

    def _delta_with_tokens(self, choice: Choice, delta: dict[str, Any]) -> dict[str, Any]:
        fields = self._delta(choice, delta, self._logprobs(choice)) | self._new_ids(choice)
        choice.num_sent = choice.num_tokens
        return fields

    def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        if self._num_logprobs is None:
            return None
        positions = choice.answer.positions[choice.num_sent :]
        return chat_logprobs(positions, self._num_logprobs, self._tokenizer)

    def _answer(self, choices: list[Choice]) -> dict[str, Any]:
        answer = super()._answer(choices)
        if self._with_ids:
            answer["prompt_token_ids"] = choices[0].prompt.prompt_token_ids
        if self._num_prompt_logprobs is not None:
            answer["prompt_logprobs"] = self._prompt_logprobs(choices[0])
        return answer

    def _item(self, choice: Choice) -> dict[str, Any]:
        choice.answer.result()
        return {
            "index": choice.index,
            "message": self._message(choice),
            "logprobs": self._logprobs(choice),
            "finish_reason": choice.answer.finish_reason,
            "stop_reason": choice.answer.output.stop_reason,
            **self._new_ids(choice),
        }

    def _message(self, choice: Choice) -> dict[str, Any]:
        message = choice.answer.message()
        fields: dict[str, Any] = {"role": "assistant", "content": message.content, "refusal": None}
        if message.reasoning and self._with_reasoning:
            fields |= {"reasoning_content": message.reasoning, "reasoning": message.reasoning}
        if message.tool_calls:
            fields["tool_calls"] = message.as_dict()["tool_calls"]
        return fields


def _prompt_text(choice: Choice, tokenizer: Tokenizer | None) -> str:
    if choice.prompt.prompt is not None:
        return choice.prompt.prompt
    if tokenizer is None:
        return ""
    return tokenizer.decode(choice.prompt.prompt_token_ids, skip_special_tokens=False)


T = TypeVar("T")

LEAST = -9999.0  # JSON has no infinity
MAX_BATCH = 1024  # candidates that are encoded together
MAX_CACHED_TOKENS = 16384  # tokens whose JSON is cached


def _finite(value: float) -> float:
    return value if math.isfinite(value) else LEAST


def _most_likely(position: PositionLogprobs, count: int) -> list[tuple[int, float]]:
    """Return ids and logprobs of the most likely tokens, best first; the token itself is among them only where it is
    that likely."""
    ids, logprobs, ranks = logprob_columns(position)
    sampled_id = ids[0]
    order = sorted(range(len(ids)), key=ranks.__getitem__)
    return [
        (ids[index], logprobs[index])
        for index in order
        if ranks[index] <= count and (not index or ids[index] != sampled_id)
    ][:count]


def _batches(
    items: Sequence[T], candidates_each: int, write: Callable[[Sequence[T]], Iterable[bytes]]
) -> Iterator[msgspec.Raw]:
    size = max(1, MAX_BATCH // candidates_each)
    for start in range(0, len(items), size):
        yield msgspec.Raw(b",".join(write(items[start : start + size])))


def _plain_batches(items: Sequence[Any]) -> Iterator[msgspec.Raw]:
    return _batches(items, 1, lambda batch: map(encode, batch))


def completion_logprobs(
    token_ids: list[int],
    positions: Sequence[PositionLogprobs | None],
    count: int,
    tokenizer: Tokenizer | None,
    offset: int,
) -> tuple[dict[str, Any], int]:
    """Return parallel lists with an item for each token, and the offset behind the last one. Nothing predicts the first
    token of a prompt: its position is None."""
    tokens = [_text(token_id, tokenizer) for token_id in token_ids]
    *offsets, end = accumulate(map(len, tokens), initial=offset)

    def write_top(batch: Sequence[PositionLogprobs | None]) -> Iterator[bytes]:
        for position in batch:
            if position is None:
                yield b"null"
                continue
            top = dict(_most_likely(position, count))
            top.setdefault(logprob_columns(position)[0][0], own_logprob(position))
            yield encode({_text(token_id, tokenizer): _finite(logprob) for token_id, logprob in top.items()})

    chosen = [None if position is None else _finite(own_logprob(position)) for position in positions]
    logprobs = {
        "text_offset": _plain_batches(offsets),
        "token_logprobs": _plain_batches(chosen),
        "tokens": _plain_batches(tokens),
        "top_logprobs": _batches(positions, 1 + count, write_top) if count else None,
    }
    return logprobs, end


def chat_logprobs(
    positions: Sequence[PositionLogprobs], count: int, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """Return one object per token, each with the most likely tokens at its position."""

    def write(batch: Sequence[PositionLogprobs]) -> Iterator[bytes]:
        for position in batch:
            sampled = _token_json(logprob_columns(position)[0][0], own_logprob(position), tokenizer)
            top = [_token_json(*candidate, tokenizer) for candidate in _most_likely(position, count)]
            yield b'%b,"top_logprobs":[%b]}' % (sampled.removesuffix(b"}"), b",".join(top))

    return {"content": _batches(positions, 1 + count, write), "refusal": None}


def prompt_logprobs(
    positions: Sequence[PositionLogprobs | None] | None, count: int, tokenizer: Tokenizer | None
) -> Iterator[msgspec.Raw] | None:
    """Return one object per position, keyed by token id."""
    if positions is None:
        return None

    def write(batch: Sequence[PositionLogprobs | None]) -> Iterator[bytes]:
        for position in batch:
            candidates = () if position is None else unpack_logprobs(position)
            by_id = {
                str(token_id): {
                    "logprob": _finite(logprob),
                    "rank": rank,
                    "decoded_token": None if tokenizer is None else tokenizer.text_of(token_id),
                }
                for token_id, logprob, rank in candidates
            }
            yield b"null" if position is None else encode(by_id)

    return _batches(positions, 1 + count, write)


def _text(token_id: int, tokenizer: Tokenizer | None) -> str:
    return "" if tokenizer is None else tokenizer.text_of(token_id)


def _token_json(token_id: int, logprob: float, tokenizer: Tokenizer | None) -> bytes:
    before, after = _around_logprob(token_id, tokenizer)
    return before + encode(_finite(logprob)) + after


@lru_cache(MAX_CACHED_TOKENS)
def _around_logprob(token_id: int, tokenizer: Tokenizer | None) -> tuple[bytes, bytes]:
    """Return the JSON of a token before and after its logprob, cached since the same tokens occur again and again."""
    before = b'{"token":%b,"logprob":' % encode(_text(token_id, tokenizer))
    return before, b',"bytes":%b}' % encode(_bytes(token_id, tokenizer))


def _bytes(token_id: int, tokenizer: Tokenizer | None) -> list[int] | None:
    """Return the bytes of a token: it may be a part of a character, which has no text."""
    if tokenizer is None:
        return None
    if tokenizer.byte_decoder is not None:
        return list(tokenizer.byte_decoder.pieces[token_id])
    return list(tokenizer.text_of(token_id).encode())
