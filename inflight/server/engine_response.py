"""One request to the engine over HTTP, from its checked body to its last byte.

A route reads the body as an `EngineCall` and returns an `EngineResponse`. Starlette calls it, and the call reads from
top to bottom: admit the request, run the route's `answer` coroutine (prepare the prompts, then `generate`), clean up,
send an error if there was one.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from inflight.errors import EngineError
from inflight.events import Delta
from inflight.frontend.generation import Generation
from inflight.frontend.output_processor import OutputProcessor
from inflight.request import RequestOrigin
from inflight.scoring import Task
from inflight.server.access.keys import Caller
from inflight.server.errors import ApiError, of_answer, of_exception
from inflight.server.formatters import Choice, ResponseFormatter
from inflight.server.http.bodies import ENGINE_RESPONSE, read_json
from inflight.server.observability.request_log import LoggedRequest, Reason
from inflight.server.prepare import GenerationParams
from inflight.server.schemas import EngineBody
from inflight.server.state import ServedModel, ServerState, caller_of, state_of

ABORT_SECONDS = 5.0  # how long to wait for the number of freed blocks; a hung engine is not waited for
ERROR_SECONDS = 5.0  # how long a client has to read an error
MAX_SHOWN_TEXT = 500  # characters of a prompt in the timeline
LONG_ANSWER = 4096  # tokens of all answers together above which they are encoded in a thread
PART_SIZE = 256 << 10  # bytes of a long answer that are encoded and sent at a time

_STREAM_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


BodyT = TypeVar("BodyT", bound=EngineBody)


@dataclass(frozen=True, slots=True)
class EngineCall(Generic[BodyT]):
    """A request to the engine as a route reads it."""

    request: Request
    state: ServerState
    caller: Caller
    body: BodyT
    model: ServedModel
    model_name: str  # as the body names it
    request_id: str

    @classmethod
    async def read(
        cls, request: Request, schema: type[BodyT], task: Task, prefix: str, num_bytes: int = 16
    ) -> EngineCall[BodyT]:
        """Read and check the body. An id that it does not give is random, with this prefix and so many bytes.

        Raises ApiError, and RequestError if the model cannot do the task.
        """
        state = state_of(request)
        body = await read_json(request, schema, state.options)
        model, name = state.find_model(body.model, task)
        request_id = body.request_id or f"{prefix}{secrets.token_hex(num_bytes)}"
        return cls(request, state, caller_of(request), body, model, name, request_id)


class EngineResponse(Response):
    """A response that is written while the engine computes it. It holds the whole state of one answer."""

    background = None

    def __init__(
        self,
        call: EngineCall[Any],
        answer: Callable[[EngineResponse], Awaitable[None]],
        user: str | None,
        *,
        stream: bool | None = False,
        formatter: ResponseFormatter | None = None,
        awaited: str = "token",
    ) -> None:
        """`answer` does the work and sends everything. `awaited` is what the client waits for first."""
        self.state, self.caller, self.model = call.state, call.caller, call.model
        self.model_name, request = call.model_name, call.request
        self.context = context = call.caller.context(call.body, user)
        options = self.state.options
        self.cancel_scope = CancelScope(request.receive, options.first_token_timeout, options.request_timeout)
        self.logged = LoggedRequest(
            call.request_id,
            self.caller,
            request.scope["route"].path,
            bool(stream),
            context.priority,
            context.tenant,
            self.cancel_scope.end,
        )
        self._answer = answer
        self._formatter = self.logged.formatter = formatter or ResponseFormatter()
        self._awaited = awaited
        self._choices: dict[str, Choice] = {}  # by the engine's request id
        self._stream_started = self._parts_started = False
        self._pings: Pings | None = None  # of a stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        scope[ENGINE_RESPONSE] = True
        error: ApiError | None = None
        await self._admit()  # if this raises, there is nothing to clean up yet
        self._send = send
        if self.logged.stream:
            self._send = self._pings = Pings(send, self.state.options.ping_interval, self._ping)
        try:
            async with self.cancel_scope:
                self.cancel_scope.watch(self._abort_for_disconnect)
                await self._answer(self)
        except TimeoutError:
            error = self.interruption(self.cancel_scope.reason)
        except Exception as raised:
            error = of_exception(raised, self.state.request_log.retry_after())
        finally:
            if self._pings is not None:
                await self._pings.stop()
            await self._close(error)
        if error is not None and self.cancel_scope.reason != "disconnect":
            with contextlib.suppress(TimeoutError):  # a client that does not read is not waited for
                async with asyncio.timeout(ERROR_SECONDS):
                    await self._send_error(error)
        message = None if error is None else error.message
        self.state.tracer.record(self.logged, self.model_name, Headers(scope=scope), message)

    async def _admit(self) -> None:
        if self.state.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after=5)
        await self.state.admission.enter(self.caller, self.logged.request_id)
        self.state.request_log.open(self.logged)

    # ---- generation ----

    async def generate(
        self,
        prompts: list[OutputProcessor],
        params: GenerationParams,
        before_end: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Run the prompts and send their answers, whole or as events. `before_end` is awaited before the last byte."""
        state, logged = self.state, self.logged
        with params.translated_errors():
            for prompt in prompts:
                await self.model.frontend.validate_async(prompt)
        generation = Generation(self.model.client, prompts)
        state.request_log.set_generation(logged, generation)
        answers = [(prompt, answer) for prompt in prompts for answer in prompt.answers]
        for index, (prompt, answer) in enumerate(answers):
            self._choices[answer.request.request_id] = Choice(index, prompt, answer, params.echo)
            answer.request.spec = replace(answer.request.spec, origin=self._origin(index, prompt))
        state.metrics.num_answers.add(len(answers))
        for prompt in prompts:
            state.metrics.max_tokens.add(prompt.answers[0].request.max_tokens)
        await generation.start()
        state.metrics.requests["generate"] += 1
        logged.queued = True
        self.caller.usage.add_request(sum(answer.request.num_prompt_tokens for _, answer in answers))
        if logged.stream:
            last_events = await self._stream(generation, params)
        else:
            last_events = await self._collect(generation, params)
        if before_end is not None:
            await before_end()
        await self._send_last(last_events)

    def _origin(self, index: int, prompt: OutputProcessor) -> RequestOrigin:
        """Return what the timeline may tell about an answer."""
        logged = self.logged
        text = prompt.excerpt(MAX_SHOWN_TEXT) if self.state.options.timeline_text else ""
        return RequestOrigin(logged.request_id, index, self.caller.name, logged.route, text)

    async def _stream(self, generation: Generation, params: GenerationParams) -> bytes:
        """Send the events as they come. Return the last ones."""
        formatter, choices = self._formatter, list(self._choices.values())
        if self._pings is not None:
            await self._pings.settle()
        if not self._stream_started:
            self._stream_started = True
            await self._send(self._stream_start())
        await self._send_more(formatter.opening(choices))
        num_open, events = len(choices), b""
        async with contextlib.aclosing(generation.deltas()) as deltas:
            async for _, delta in deltas:
                choice, is_last = self._count(delta), delta.finish_reason is not None
                write = formatter.end if is_last else formatter.more
                is_long = choice.echoes and params.has_logprobs  # the logprobs of a whole prompt
                events = (
                    await self.state.in_thread(self.caller, partial(write, choice))
                    if is_long
                    else write(choice)
                )
                num_open -= is_last
                if not num_open:
                    break
                started_at = time.perf_counter()
                await self._send_more(events)
                self.logged.client_seconds += time.perf_counter() - started_at
        return events + formatter.closing(choices)

    async def _collect(self, generation: Generation, params: GenerationParams) -> bytes:
        """Wait for all answers, then send all but the last part of the body. Return the last part."""
        async with contextlib.aclosing(generation.deltas()) as deltas:
            async for _, delta in deltas:
                choice = self._count(delta)
                if choice.answer.reader is not None:  # parse as it comes: at the end it would take long
                    choice.answer.complete()
        choices = list(self._choices.values())
        is_long = params.has_logprobs or sum(choice.num_tokens for choice in choices) > LONG_ANSWER
        pieces = self._formatter.whole(choices)
        part = await self.state.in_thread_if(is_long, self.caller, lambda: _next_part(pieces))
        if len(part) >= PART_SIZE:
            self._parts_started = True
            await self._send(self._start((b"content-type", b"application/json")))
        while len(part) >= PART_SIZE:  # at the client's pace: nothing is encoded before most of this is read
            await self._send_more(part)
            part = await self.state.in_thread_if(is_long, self.caller, lambda: _next_part(pieces))
        return part

    def _count(self, delta: Delta) -> Choice:
        """Count the tokens of a delta and return its choice. Raise ApiError if the answer failed."""
        choice, num_tokens = self._choices[delta.request_id], len(delta.token_ids)
        if num_tokens:
            self.caller.usage.num_output_tokens += num_tokens
            now = time.perf_counter()
            if choice.last_at:
                self.state.metrics.gap.add((now - choice.last_at) / num_tokens, num_tokens)
            elif self.logged.first_token_at is None:
                self.logged.first_token_at = now
                self.state.metrics.first_token.add(now - self.logged.started_at)
                self.cancel_scope.first_token()
            choice.last_at = now
        if delta.error is not None:
            raise of_answer(delta)
        if delta.record is not None:
            self.state.request_log.answer_ended(self.logged, delta.record)
            self.state.metrics.record_answer(delta.record)
        return choice

    # ---- sending ----

    async def respond(self, response: Response) -> None:
        """Send a whole response."""
        response.headers["x-request-id"] = self.logged.request_id
        start = {
            "type": "http.response.start",
            "status": response.status_code,
            "headers": response.raw_headers,
        }
        await self._send(start)
        await self._send({"type": "http.response.body", "body": response.body, "more_body": False})

    def _start(self, *headers: tuple[bytes, bytes]) -> Message:
        all_headers = [*headers, (b"x-request-id", self.logged.request_id.encode())]
        return {"type": "http.response.start", "status": 200, "headers": all_headers}

    def _stream_start(self) -> Message:
        formatter = self._formatter
        return self._start((b"content-type", formatter.content_type), *_STREAM_HEADERS, *formatter.headers)

    async def _ping(self, send: Send) -> None:
        """Send a ping. If the prompt is still being prepared, the stream starts here, and errors become events."""
        if not self._stream_started:
            await send(self._stream_start())
            self._stream_started = True
        await send({"type": "http.response.body", "body": self._formatter.ping(), "more_body": True})

    async def _send_more(self, data: bytes) -> None:
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def _send_last(self, data: bytes) -> None:
        if self._stream_started or self._parts_started:
            await self._send({"type": "http.response.body", "body": data, "more_body": False})
        else:
            await self.respond(Response(data, media_type="application/json"))

    async def _send_error(self, error: ApiError) -> None:
        """Send a separate response or, in a stream, the last event. JSON that has started breaks off together with
        the connection, so that the client sees that its end is missing."""
        if self._stream_started:
            data = self._formatter.error_event(error)
            await self._send({"type": "http.response.body", "body": data, "more_body": False})
        elif not self._parts_started:
            await self.respond(self._formatter.error_response(error))

    # ---- the end ----

    async def _abort_for_disconnect(self) -> None:
        """Abort the request of a client that has disconnected, and count the blocks that this frees."""
        self.state.metrics.num_disconnects += 1
        self.logged.outcome = "cancelled"
        if self.logged.abort is not None:
            with contextlib.suppress(TimeoutError, EngineError):
                async with asyncio.timeout(ABORT_SECONDS):
                    self.state.metrics.num_freed_blocks += await self.logged.abort()

    def interruption(self, reason: Reason) -> ApiError:
        """Return the error for a request that was ended early."""
        options = self.state.options
        if reason == "disconnect":
            return ApiError(499, "the client disconnected", code="disconnected")
        if reason == "shutdown":
            message = "the server shut down before the request was finished"
            return ApiError(503, message, code="shutting_down", retry_after=5)
        if reason == "cancelled":
            return ApiError(409, "the request was cancelled before it was finished", code="cancelled")
        if reason == "first_token":
            limit = f"{options.first_token_timeout:g} s"
            message = f"no {self._awaited} was computed within {limit}: the server is overloaded"
            return ApiError(503, message, code="first_token_timeout", retry_after=10)
        message = f"the request took longer than the limit of {options.request_timeout:g} s"
        return ApiError(504, message, code="request_timeout")

    async def _close(self, error: ApiError | None) -> None:
        """Leave nothing in the engine, release its admission, and count what it used."""
        state, logged = self.state, self.logged
        if logged.generation is not None:
            await logged.generation.close()
            if logged.queued:
                state.metrics.longest_answer.add(max(choice.num_tokens for choice in self._choices.values()))
                self._count_waiting()
        state.admission.leave(self.caller, logged.request_id)
        state.request_log.close(logged, "finished" if error is None else "failed")
        if error is None:
            state.metrics.latency.add(time.perf_counter() - logged.started_at)
        else:
            state.metrics.refused[error.code or str(error.status)] += 1

    def _count_waiting(self) -> None:
        seconds = time.perf_counter() - self.logged.started_at
        for request_id, choice in self._choices.items():
            record = self.logged.records.get(request_id)
            if record is not None or not choice.last_at:  # else it ran, and its time in the queue is unknown
                self.caller.usage.add_queue_time(record, seconds)


def _next_part(pieces: Iterator[bytes]) -> bytes:
    """Return the next bytes of a body: less than PART_SIZE only at its end."""
    part = bytearray()
    for piece in pieces:
        part += piece
        if len(part) >= PART_SIZE:
            break
    return bytes(part)


class CancelScope:
    """A context that may be interrupted with TimeoutError; `reason` then says why.

    A separate task waits for the client to disconnect, so that this costs nothing while tokens flow.
    """

    def __init__(self, receive: Receive, first_token_timeout: float, request_timeout: float) -> None:
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._ends_at = self._loop.time() + request_timeout
        first = self._loop.time() + first_token_timeout
        self.reason: Reason = "first_token" if first < self._ends_at else "request"
        self._timeout = asyncio.timeout_at(min(first, self._ends_at))
        self._watcher: asyncio.Task[None] | None = None
        self._ended = False

    async def __aenter__(self) -> CancelScope:
        await self._timeout.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        self._ended = True
        if self._watcher is not None:
            if self.reason == "disconnect":
                await self._watcher  # it counts the blocks that the abort frees
            else:
                self._watcher.cancel()
        await self._timeout.__aexit__(*error)  # type: ignore[arg-type]

    def watch(self, on_disconnect: Callable[[], Awaitable[None]]) -> None:
        """When the client disconnects, await `on_disconnect` and interrupt. The body must have been read."""
        self._watcher = self._loop.create_task(self._watch(on_disconnect))

    async def _watch(self, on_disconnect: Callable[[], Awaitable[None]]) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            while (await self._receive())["type"] != "http.disconnect":
                pass
            if not self._ended:
                self.reason = "disconnect"
                await on_disconnect()
                self.end("disconnect")

    def first_token(self) -> None:
        """Drop the timeout of the first token: from now on, only that of the whole request applies."""
        if self.reason == "first_token":
            self.reason = "request"
            self._timeout.reschedule(self._ends_at)

    def end(self, reason: Reason) -> None:
        """Interrupt the request now."""
        if not self._ended:
            self._ended = True
            self.reason = reason
            self._timeout.reschedule(self._loop.time())


class Pings:
    """An ASGI `send` that pings whenever it was silent for some seconds, so that proxies keep the connection open.

    It costs a timer per stream; a task runs only while a ping is sent.
    """

    def __init__(self, send: Send, seconds: float, ping: Callable[[Send], Awaitable[None]]) -> None:
        """`ping` sends one with the `send` that it gets."""
        self._send = send
        self._seconds = seconds
        self._ping = ping
        self._loop = asyncio.get_running_loop()
        self._sent_at = self._loop.time()
        self._is_sending = False
        self._task: asyncio.Task[None] | None = None  # that sends a ping
        self._timer = self._loop.call_later(seconds, self._check)

    async def __call__(self, message: Message) -> None:
        await self.settle()
        self._is_sending = True
        try:
            await self._send(message)
        finally:
            self._is_sending = False
            self._sent_at = self._loop.time()

    async def settle(self) -> None:
        """Wait until a ping that is being sent is complete."""
        if self._task is not None:
            await self._task

    def _check(self) -> None:
        silent_for = self._loop.time() - self._sent_at
        if silent_for >= self._seconds:
            silent_for = 0.0
            self._sent_at = self._loop.time()
            if self._task is None and not self._is_sending:  # else the client does not read
                self._task = self._loop.create_task(self._send_ping())
        self._timer = self._loop.call_later(self._seconds - silent_for, self._check)

    async def _send_ping(self) -> None:
        try:
            await self._ping(self._send)
        finally:
            self._task = None

    async def stop(self) -> None:
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
