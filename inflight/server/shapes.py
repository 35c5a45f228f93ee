"""Answers in the shapes of the two APIs, whole or as events.

An event of the common kind is three byte strings joined: what comes before the text was made once for the answer,
what comes after it once for the request.
"""

from __future__ import annotations

from typing import Any

import msgspec

from inflight.server.job import Child, Job
from inflight.server.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from inflight.text import Tokenizer

_encode = msgspec.json.encode

DONE = b"data: [DONE]\n\n"


def usage_of(job: Job, scores_only: bool = False) -> dict[str, Any]:
    num_prompt = sum(len(prompt.token_ids) for prompt in job.prompts)
    num_output = 0 if scores_only else sum(child.num_tokens for child in job.children)
    firsts = {id(child.prompt): child.answer.record for child in reversed(job.children)}
    num_cached = sum(record.num_cached_tokens for record in firsts.values())
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


class Shape:
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
        scores_only: bool = False,
    ) -> None:
        self._head = {"id": request_id, "object": "", "created": created, "model": model}
        self._tokenizer = tokenizer
        self._num_logprobs = num_logprobs
        self._with_ids = with_ids
        self._with_prompt_logprobs = with_prompt_logprobs
        self._scores_only = scores_only  # the answer itself is not told
        self._plain = num_logprobs is None and not with_ids
        self._usage = {"usage": None} if with_usage else {}
        self._suffix = b""

    def begin(self, child: Child) -> bytes:
        """Make what its events have in common. Returns the event that opens it, if there is one."""
        if self._plain:  # an event is cut where its text goes
            echoes, child.echoes = child.echoes, False
            child.prefix, self._suffix = self._event([self._choice(child, "\0")]).split(_encode("\0"))
            child.echoes = echoes
        return b""

    def more(self, child: Child, text: str) -> bytes:
        """The event of new text, or b"" where there is nothing to tell yet."""
        if self._plain and not child.echoes:
            return child.prefix + _encode(text) + self._suffix if text else b""
        if not text and child.num_told == child.num_tokens:
            return b""
        return self._event([self._choice(child, text)])

    def end(self, child: Child, text: str) -> bytes:
        """The last events of an answer."""
        raise NotImplementedError

    def usage(self, job: Job) -> bytes:
        return self._event([], usage=usage_of(job, self._scores_only)) if self._usage else b""

    def whole(self, job: Job) -> bytes:
        raise NotImplementedError

    def _choice(self, child: Child, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        head = {**self._head, "object": self.object_event, "choices": choices, **self._usage, **more}
        return b"data: " + _encode(head) + b"\n\n"

    def _new_ids(self, child: Child) -> dict[str, Any]:
        return {"token_ids": child.answer.output.token_ids[child.num_told :]} if self._with_ids else {}


class CompletionShape(Shape):
    object_whole = object_event = "text_completion"

    def more(self, child: Child, text: str) -> bytes:
        return super().more(child, "" if self._scores_only else text)

    def end(self, child: Child, text: str) -> bytes:
        output = child.answer.output
        choice = self._choice(child, "" if self._scores_only else text)
        return self._event(
            [{**choice, "finish_reason": output.finish_reason, "stop_reason": output.stop_reason}]
        )

    def _choice(self, child: Child, text: str) -> dict[str, Any]:
        ids, positions = self._tokens(child)
        echoed = _prompt_text(child, self._tokenizer) if child.echoes else ""
        logprobs = None
        if self._num_logprobs is not None:
            logprobs = completion_logprobs(ids, positions, self._num_logprobs, self._tokenizer, child.offset)
            child.offset += sum(map(len, logprobs["tokens"]))
        more = {} if self._scores_only else self._new_ids(child)
        if self._with_ids and child.num_told == 0:
            more["prompt_token_ids"] = child.prompt.token_ids
        child.num_told, child.echoes = child.num_tokens, False
        return {
            "index": child.index,
            "text": echoed + text,
            "logprobs": logprobs,
            "finish_reason": None,
            "stop_reason": None,
            **more,
        }

    def _tokens(self, child: Child) -> tuple[list[int], list[Any]]:
        """Token ids and their positions' logprobs, as far as they are new."""
        output = child.answer.output
        ids: list[int] = [] if self._scores_only else output.token_ids[child.num_told :]
        positions: list[Any] = [] if self._scores_only else (output.logprobs or [])[child.num_told :]
        if child.echoes:
            ids = [*child.prompt.token_ids, *ids]
            positions = [*(child.prompt.logprobs or []), *positions]
        return ids, positions

    def whole(self, job: Job) -> bytes:
        choices = []
        for child in job.children:
            output = child.answer.output
            child.num_told = 0
            choice = self._choice(child, "" if self._scores_only else child.answer.take_text())
            choice |= {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
            if self._with_prompt_logprobs:
                choice["prompt_logprobs"] = prompt_logprobs(child.prompt.logprobs)
            choices.append(choice)
        return _encode(
            {
                **self._head,
                "object": self.object_whole,
                "choices": choices,
                "usage": usage_of(job, self._scores_only),
            }
        )


class ChatShape(Shape):
    object_whole = "chat.completion"
    object_event = "chat.completion.chunk"

    def begin(self, child: Child) -> bytes:
        super().begin(child)
        delta = {"role": "assistant", "content": ""}
        choice = {"index": child.index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._event([choice])

    def end(self, child: Child, text: str) -> bytes:
        output = child.answer.output
        last = {
            "index": child.index,
            "delta": {},
            "logprobs": None,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        return self.more(child, text) + self._event([last])

    def _choice(self, child: Child, text: str) -> dict[str, Any]:
        choice = {
            "index": child.index,
            "delta": {"content": text},
            "logprobs": self._logprobs(child),
            "finish_reason": None,
            **self._new_ids(child),
        }
        child.num_told = child.num_tokens
        return choice

    def _logprobs(self, child: Child) -> dict[str, Any] | None:
        if self._num_logprobs is None:
            return None
        output = child.answer.output
        positions = (output.logprobs or [])[child.num_told :]
        return chat_logprobs(
            output.token_ids[child.num_told :], positions, self._num_logprobs, self._tokenizer
        )

    def whole(self, job: Job) -> bytes:
        choices = []
        for child in job.children:
            output = child.answer.output
            message = {"role": "assistant", "content": child.answer.take_text(), "refusal": None}
            choices.append(
                {
                    "index": child.index,
                    "message": message,
                    "logprobs": self._logprobs(child),
                    "finish_reason": output.finish_reason,
                    "stop_reason": output.stop_reason,
                    **self._new_ids(child),
                }
            )
        answer = {**self._head, "object": self.object_whole, "choices": choices, "usage": usage_of(job)}
        if self._with_ids:
            answer["prompt_token_ids"] = job.prompts[0].token_ids
        if self._with_prompt_logprobs:
            answer["prompt_logprobs"] = prompt_logprobs(job.prompts[0].logprobs)
        return _encode(answer)


def _prompt_text(child: Child, tokenizer: Tokenizer | None) -> str:
    if child.prompt.text is not None:
        return child.prompt.text
    return "" if tokenizer is None else tokenizer.decode(child.prompt.token_ids, skip_special_tokens=False)
