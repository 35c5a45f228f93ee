"""One generation over HTTP, from its checked body to its last byte."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from starlette.responses import Response

from inflight.events import Delta
from inflight.frontend import Generation, OutputProcessor
from inflight.server.access.keys import Caller
from inflight.server.engine_response import EngineResponse, RequestHead
from inflight.server.errors import ApiError, of_answer
from inflight.server.formatters import Choice, ResponseFormatter
from inflight.server.state import ServerState

_EVENTS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


LONG_ANSWER = 4096  # tokens of all answers together, from which on writing them down is worth a thread
PART_SIZE = 256 << 10  # bytes of a long answer that are made and sent at a time


@dataclass(frozen=True, slots=True)
class GenerationSpec:
    """What a route has found out about a generation before it runs."""

    head: RequestHead
    num_answers: int
    echo: bool
    prepare: Callable[[], list[OutputProcessor]]  # takes long with long texts
    blamed: Callable[[], AbstractContextManager[None]]  # in it, refusals name what the client has written
    is_long: bool
    has_long_answer: bool  # to write down: logprobs are many times the text
    formatter: Callable[[int], ResponseFormatter]  # by the time of creation
    before_prepare: Callable[[], Awaitable[None]] | None = None  # fetches what the body refers to
    before_end: Callable[[], Awaitable[None]] | None = None  # the last byte waits for it


class GenerationResponse(EngineResponse):
    """Answers, whole or as events."""

    def __init__(self, state: ServerState, caller: Caller, spec: GenerationSpec) -> None:
        super().__init__(state, caller, spec.head)
        self._spec = spec
        self._events_begun = self._parts_begun = False
        self._generation: Generation | None = None
        self._choices: dict[str, Choice] = {}  # by the engine's request id

    async def _run(self) -> None:
        state, spec = self._state, self._spec
        self._formatter = self._logged.formatter = spec.formatter(self._logged.created)
        if spec.before_prepare is not None:
            await spec.before_prepare()
        prompts = await state.in_thread_if(spec.is_long, spec.prepare)
        with spec.blamed():
            for prompt in prompts:
                await state.frontend.validate_async(prompt)
        self._generation = generation = Generation(state.client, prompts)
        state.request_log.set_generation(self._logged, generation)
        pairs = [(prompt, answer) for prompt in prompts for answer in prompt.answers]
        for index, (prompt, answer) in enumerate(pairs):
            self._choices[answer.request.request_id] = Choice(index, prompt, answer, spec.echo)
        state.metrics.num_answers.add(spec.num_answers)
        for prompt in prompts:
            state.metrics.max_tokens.add(prompt.answers[0].request.max_tokens)
        await generation.start()
        state.metrics.requests["generate"] += 1
        self._logged.queued = True
        self._caller.usage.add_request(sum(answer.request.num_prompt_tokens for _, answer in pairs))
        await (self._stream(generation) if spec.head.stream else self._collect(generation))

    async def _stream(self, generation: Generation) -> None:
        send, formatter, choices = self._send, self._formatter, list(self._choices.values())
        self._events_begun = True
        headers = [(b"content-type", formatter.content_type), *_EVENTS, *formatter.headers]
        headers.append((b"x-request-id", self._head.request_id.encode()))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        opening = formatter.opening(choices)
        if opening:
            await send({"type": "http.response.body", "body": opening, "more_body": True})
        num_open = len(choices)
        async with contextlib.aclosing(generation.deltas()) as deltas:
            async for _, delta in deltas:
                data = await self._event(self._count(delta), delta.finish_reason is not None)
                if delta.finish_reason is not None:
                    num_open -= 1
                    if not num_open:
                        break
                if data:
                    started_at = time.perf_counter()
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                    self._logged.client_seconds += time.perf_counter() - started_at
        end = data + formatter.closing(choices)
        await self._before_end()
        await send({"type": "http.response.body", "body": end, "more_body": False})

    async def _event(self, choice: Choice, is_last: bool) -> bytes:
        write = self._formatter.end if is_last else self._formatter.more
        is_long = choice.echoes and self._spec.has_long_answer  # the logprobs of a whole prompt
        return await self._state.in_thread_if(is_long, lambda: write(choice))

    async def _collect(self, generation: Generation) -> None:
        async with contextlib.aclosing(generation.deltas()) as deltas:
            async for _, delta in deltas:
                choice = self._count(delta)
                if choice.reader is not None:  # as it comes: at the end it would be long
                    choice.answer.complete()
        choices = list(self._choices.values())
        num_tokens = sum(choice.num_tokens for choice in choices)
        is_long = self._spec.has_long_answer or num_tokens > LONG_ANSWER
        pieces = self._formatter.whole(choices)
        part = await self._state.in_thread_if(is_long, lambda: _next_part(pieces))
        if len(part) < PART_SIZE:
            await self._before_end()
            await self._respond(Response(part, media_type="application/json"))
            return
        self._parts_begun = True
        headers = [(b"content-type", b"application/json")]
        headers.append((b"x-request-id", self._head.request_id.encode()))
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        while len(part) >= PART_SIZE:  # the client's pace: no more is made before it has read most of this
            await self._send({"type": "http.response.body", "body": part, "more_body": True})
            part = await self._state.in_thread_if(is_long, lambda: _next_part(pieces))
        await self._before_end()
        await self._send({"type": "http.response.body", "body": part, "more_body": False})

    async def _before_end(self) -> None:
        if self._spec.before_end is not None:
            await self._spec.before_end()

    def _count(self, delta: Delta) -> Choice:
        """Count what a delta brought. The choice that it belongs to."""
        choice, num_tokens = self._choices[delta.request_id], len(delta.token_ids)
        if num_tokens:
            self._caller.usage.num_output_tokens += num_tokens
            now = time.perf_counter()
            if choice.last_at:
                self._state.metrics.gap.add((now - choice.last_at) / num_tokens, num_tokens)
            else:
                self._first_token(now)
            choice.last_at = now
        if delta.error is not None:
            raise of_answer(delta)
        if delta.record is not None:
            self._state.request_log.answer_ended(self._logged, delta.record)
            self._state.metrics.record_answer(delta.record)
        return choice

    def _first_token(self, now: float) -> None:
        if self._logged.first_token_at is None:
            self._logged.first_token_at = now
            self._state.metrics.first_token.add(now - self._logged.started_at)
            self._cancel_scope.first_token()

    async def _close_work(self) -> None:
        if self._generation is not None:
            await self._generation.close()
            if self._logged.queued:
                longest = max(choice.num_tokens for choice in self._choices.values())
                self._state.metrics.longest_answer.add(longest)
                self._count_waiting()

    def _count_waiting(self) -> None:
        seconds = time.perf_counter() - self._logged.started_at
        for request_id, choice in self._choices.items():
            record = self._logged.records.get(request_id)
            if record is not None or not choice.last_at:  # else it ran, and no one told since when
                self._caller.usage.add_queue_time(record, seconds)

    async def _write_error(self, error: ApiError) -> None:
        """As a response of its own or, once events were sent, as the last of them. JSON that has begun breaks off, and
        the connection with it: its client sees that the end is missing."""
        if self._parts_begun:
            return
        if self._events_begun:
            data = self._formatter.error_event(error)
            await self._send({"type": "http.response.body", "body": data, "more_body": False})
        else:
            await self._respond(self._formatter.error_response(error))


def _next_part(pieces: Iterator[bytes]) -> bytes:
    """Return the next bytes of a body: less than PART_SIZE only at its end."""
    part = bytearray()
    for piece in pieces:
        part += piece
        if len(part) >= PART_SIZE:
            break
    return bytes(part)
