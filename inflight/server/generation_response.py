"""One generation over HTTP, from its checked body to its last byte."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from inflight.errors import EngineError
from inflight.events import Delta
from inflight.frontend import Generation, OutputProcessor
from inflight.server.cancel_scope import CancelScope, Reason
from inflight.server.errors import ApiError, of_answer, of_exception
from inflight.server.formatters import DONE, Choice, ResponseFormatter
from inflight.server.keys import Caller
from inflight.server.request_log import LoggedRequest
from inflight.server.schemas.common import GenerationBody
from inflight.server.state import ServerState

logger = logging.getLogger(__name__)

ABORT_SECONDS = 5.0  # to hear how many blocks came back; an engine that hangs is not waited for
ERROR_SECONDS = 5.0  # for a client to take it
_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True, slots=True)
class GenerationSpec:
    """What a route has found out about a generation before it runs."""

    route: str
    request_id: str
    body: GenerationBody
    model: str
    num_answers: int
    echo: bool
    prepare: Callable[[], list[OutputProcessor]]  # takes long with long texts
    is_long: bool
    has_long_answer: bool  # to write down: logprobs are many times the text
    formatter: Callable[[int], ResponseFormatter]  # by the time of creation


class GenerationResponse(Response):
    """A response that makes itself: nothing is known of it before it runs."""

    background = None

    def __init__(self, state: ServerState, caller: Caller, spec: GenerationSpec) -> None:
        self._state = state
        self._caller = caller
        self._spec = spec
        self._events_begun = False
        self._generation: Generation | None = None
        self._choices: dict[str, Choice] = {}  # by the engine's request id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state, spec, options = self._state, self._spec, self._state.options
        cancel_scope = CancelScope(receive, options.first_token_timeout, options.request_timeout)
        self._send = send
        self._cancel_scope = cancel_scope
        self._logged = logged = LoggedRequest(
            spec.request_id,
            self._caller,
            spec.route,
            bool(spec.body.stream),
            spec.body.priority or 0,
            self._caller.tenant(spec.body.user),
            cancel_scope,
        )
        error: ApiError | None = None
        self._admit(logged)  # raises before anything is to be cleaned up
        try:
            async with cancel_scope:
                cancel_scope.watch(self._leave)
                await self._run()
        except TimeoutError:
            error = self._interrupted(cancel_scope.reason)
        except Exception as raised:
            error = of_exception(raised, state.request_log.retry_after())
        finally:
            await self._close(error)
        if error is not None and cancel_scope.reason != "disconnect":
            await self._send_error(error)
        state.tracer.ended(logged, spec.model, Headers(scope=scope), None if error is None else error.message)

    def _admit(self, logged: LoggedRequest) -> None:
        if self._state.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after=5)
        self._caller.enter()
        try:
            self._state.request_log.open(logged)
        except ApiError:
            self._caller.leave()
            raise

    # ---- when all goes well ----

    async def _run(self) -> None:
        state, spec = self._state, self._spec
        prompts = await state.in_thread_if(spec.is_long, spec.prepare)
        self._generation = generation = Generation(state.client, prompts)
        state.request_log.set_generation(self._logged, generation)
        self._formatter = spec.formatter(self._logged.created)
        pairs = [(prompt, answer) for prompt in prompts for answer in prompt.answers]
        for index, (prompt, answer) in enumerate(pairs):
            self._choices[answer.request.request_id] = Choice(index, prompt, answer, spec.echo)
        state.metrics.num_answers.add(spec.num_answers)
        for prompt in prompts:
            state.metrics.max_tokens.add(prompt.answers[0].request.max_tokens)
        await generation.start()
        self._logged.queued = True
        self._caller.usage.began(sum(answer.request.num_prompt_tokens for _, answer in pairs))
        await (self._stream(generation) if spec.body.stream else self._collect(generation))

    async def _stream(self, generation: Generation) -> None:
        send, formatter, choices = self._send, self._formatter, list(self._choices.values())
        self._events_begun = True
        headers = [*_EVENTS, (b"x-request-id", self._spec.request_id.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        opening = b"".join([formatter.begin(choice) for choice in choices])
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
        end = data + formatter.usage(choices) + DONE
        await send({"type": "http.response.body", "body": end, "more_body": False})

    async def _event(self, choice: Choice, is_last: bool) -> bytes:
        write, text = self._formatter.end if is_last else self._formatter.more, choice.answer.take_text()
        is_long = choice.echoes and self._spec.has_long_answer  # the logprobs of a whole prompt
        return await self._state.in_thread_if(is_long, lambda: write(choice, text))

    async def _collect(self, generation: Generation) -> None:
        async with contextlib.aclosing(generation.deltas()) as deltas:
            async for _, delta in deltas:
                self._count(delta)
        choices = list(self._choices.values())
        content = await self._state.in_thread_if(
            self._spec.has_long_answer, lambda: self._formatter.whole(choices)
        )
        await self._respond(Response(content, media_type="application/json"))

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
            self._state.metrics.ended(delta.record)
        return choice

    def _first_token(self, now: float) -> None:
        if self._logged.first_token_at is None:
            self._logged.first_token_at = now
            self._state.metrics.first_token.add(now - self._logged.started_at)
            self._cancel_scope.first_token()

    async def _respond(self, response: Response) -> None:
        response.headers["x-request-id"] = self._spec.request_id
        start = {
            "type": "http.response.start",
            "status": response.status_code,
            "headers": response.raw_headers,
        }
        await self._send(start)
        await self._send({"type": "http.response.body", "body": response.body, "more_body": False})

    # ---- when it does not ----

    async def _leave(self) -> None:
        """The client has gone: so do its answers, and their blocks are counted."""
        self._state.metrics.num_disconnects += 1
        self._logged.outcome = "cancelled"
        if self._generation is not None:
            with contextlib.suppress(TimeoutError, EngineError):
                async with asyncio.timeout(ABORT_SECONDS):
                    self._state.metrics.num_freed_blocks += await self._generation.abort()

    def _interrupted(self, reason: Reason) -> ApiError:
        if reason == "disconnect":
            return ApiError(499, "the client went away", code="disconnected")
        options = self._state.options
        if reason == "shutdown":
            return ApiError(
                503, "the server stopped before this was done", code="shutting_down", retry_after=5
            )
        if reason == "first_token":
            message = f"no token came within {options.first_token_timeout:g} s: the server is overloaded"
            return ApiError(503, message, code="first_token_timeout", retry_after=10)
        message = f"the request took longer than {options.request_timeout:g} s, which is the limit"
        return ApiError(504, message, code="request_timeout")

    async def _close(self, error: ApiError | None) -> None:
        state, logged = self._state, self._logged
        if self._generation is not None:
            await self._generation.close()
            if logged.queued:
                self._count_waiting()
        self._caller.leave()
        state.request_log.close(logged, "finished" if error is None else "failed")
        if error is None:
            state.metrics.latency.add(time.perf_counter() - logged.started_at)
        else:
            state.metrics.refused[error.code or str(error.status)] += 1

    def _count_waiting(self) -> None:
        seconds = time.perf_counter() - self._logged.started_at
        for request_id, choice in self._choices.items():
            record = self._logged.records.get(request_id)
            if record is not None or not choice.last_at:  # else it ran, and no one told since when
                self._caller.usage.waited(record, seconds)

    async def _send_error(self, error: ApiError) -> None:
        """As a response of its own or, once events were sent, as the last of them."""
        with contextlib.suppress(TimeoutError):  # a client that does not read is not waited for
            async with asyncio.timeout(ERROR_SECONDS):
                if self._events_begun:
                    data = b"data: " + error.body() + b"\n\n"
                    await self._send({"type": "http.response.body", "body": data, "more_body": False})
                else:
                    await self._respond(error.response())
