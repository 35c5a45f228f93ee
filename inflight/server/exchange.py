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
from inflight.server.cancel_scope import CancelScope, Reason
from inflight.server.errors import ApiError, of_answer, of_exception
from inflight.server.job import Child, Job, Prepared
from inflight.server.keys import Caller
from inflight.server.ledger import Entry
from inflight.server.schemas.common import GenerationBody
from inflight.server.shapes import DONE, Shape
from inflight.server.state import ServerState

logger = logging.getLogger(__name__)

ABORT_SECONDS = 5.0  # to hear how many blocks came back; an engine that hangs is not waited for
TELL_SECONDS = 5.0
_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True, slots=True)
class Order:
    """What a route asks of an exchange."""

    route: str
    request_id: str
    body: GenerationBody
    model: str
    num_answers: int
    echo: bool
    prepare: Callable[[], list[Prepared]]  # takes long with long texts
    is_long: bool
    has_long_answer: bool  # to write down: logprobs are many times the text
    shape: Callable[[int], Shape]  # by the time of creation


class Exchange(Response):
    """A response that makes itself: nothing is known of it before it runs."""

    background = None

    def __init__(self, state: ServerState, caller: Caller, order: Order) -> None:
        self._state = state
        self._caller = caller
        self._order = order
        self._events_begun = False
        self._job: Job | None = None
        self._queued = False  # by the engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state, order, options = self._state, self._order, self._state.options
        cancel_scope = CancelScope(receive, options.first_token_timeout, options.request_timeout)
        self._send = send
        self._cancel_scope = cancel_scope
        self._entry = entry = Entry(
            order.request_id,
            self._caller,
            order.route,
            bool(order.body.stream),
            order.body.priority or 0,
            self._caller.tenant(order.body.user),
            cancel_scope,
        )
        error: ApiError | None = None
        self._admit(entry)  # raises before anything is to be cleaned up
        try:
            async with cancel_scope:
                cancel_scope.watch(self._leave)
                await self._run()
        except TimeoutError:
            error = self._interrupted(cancel_scope.reason)
        except Exception as raised:
            error = of_exception(raised, state.ledger.retry_after())
        finally:
            await self._close(error)
        if error is not None and cancel_scope.reason != "disconnect":
            await self._tell(error)
        state.tracer.ended(entry, order.model, Headers(scope=scope), None if error is None else error.message)

    def _admit(self, entry: Entry) -> None:
        if self._state.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after=5)
        self._caller.enter()
        try:
            self._state.ledger.open(entry)
        except ApiError:
            self._caller.leave()
            raise

    # ---- the way of one that goes well ----

    async def _run(self) -> None:
        state, order = self._state, self._order
        prompts = await state.off_loop(order.is_long, order.prepare)
        self._job = job = Job(state, prompts)
        state.ledger.name(self._entry, job.engine_ids)
        self._shape = order.shape(self._entry.created)
        state.metrics.num_answers.add(order.num_answers)
        for prompt in prompts:
            state.metrics.max_tokens.add(prompt.requests[0].max_tokens)
        for child in job.children:
            child.echoes = order.echo
        await job.start()
        self._queued = True
        self._caller.usage.began(sum(child.request.num_prompt_tokens for child in job.children))
        await (self._stream(job) if order.body.stream else self._collect(job))

    async def _stream(self, job: Job) -> None:
        send, shape = self._send, self._shape
        self._events_begun = True
        headers = [*_EVENTS, (b"x-request-id", self._order.request_id.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        opening = b"".join([shape.begin(child) for child in job.children])
        if opening:
            await send({"type": "http.response.body", "body": opening, "more_body": True})
        num_open = len(job.children)
        async with contextlib.aclosing(job.news()) as news:  # type: ignore[type-var]
            async for child, delta in news:
                await self._take(job, child, delta)
                data = await self._event(child, delta.finish_reason is not None)
                if delta.finish_reason is not None:
                    num_open -= 1
                    if not num_open:
                        break
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": data + shape.usage(job) + DONE, "more_body": False})

    async def _event(self, child: Child, is_last: bool) -> bytes:
        tell, text = self._shape.end if is_last else self._shape.more, child.answer.take_text()
        is_long = child.echoes and self._order.has_long_answer  # the logprobs of a whole prompt
        return await self._state.off_loop(is_long, lambda: tell(child, text))

    async def _collect(self, job: Job) -> None:
        async with contextlib.aclosing(job.news()) as news:  # type: ignore[type-var]
            async for child, delta in news:
                await self._take(job, child, delta)
        content = await self._state.off_loop(self._order.has_long_answer, lambda: self._shape.whole(job))
        await self._respond(Response(content, media_type="application/json"))

    async def _take(self, job: Job, child: Child, delta: Delta) -> None:
        """Count the news and let the answer grow by them."""
        num_tokens = len(delta.token_ids)
        if num_tokens:
            self._caller.usage.num_output_tokens += num_tokens
            now = time.perf_counter()
            if child.last_at:
                self._state.metrics.gap.add((now - child.last_at) / num_tokens, num_tokens)
            else:
                self._first_token(now)
            child.last_at = now
        if delta.error is not None:
            raise of_answer(delta)
        await job.take(child, delta)
        if delta.record is not None:
            child.answer.record = delta.record
            self._entry.records[delta.request_id] = delta.record
            self._state.metrics.ended(delta.record)

    def _first_token(self, now: float) -> None:
        if self._entry.first_token_at is None:
            self._entry.first_token_at = now
            self._state.metrics.first_token.add(now - self._entry.started_at)
            self._cancel_scope.first_token()

    async def _respond(self, response: Response) -> None:
        response.headers["x-request-id"] = self._order.request_id
        start = {
            "type": "http.response.start",
            "status": response.status_code,
            "headers": response.raw_headers,
        }
        await self._send(start)
        await self._send({"type": "http.response.body", "body": response.body, "more_body": False})

    # ---- other ways ----

    async def _leave(self) -> None:
        """The client has gone: so do its answers, and their blocks are counted."""
        self._state.metrics.num_disconnects += 1
        self._entry.outcome = "cancelled"
        if self._job is not None:
            with contextlib.suppress(TimeoutError, EngineError):
                async with asyncio.timeout(ABORT_SECONDS):
                    self._state.metrics.num_freed_blocks += await self._job.abort()

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
        state, entry = self._state, self._entry
        if self._job is not None:
            await self._job.close()
            if self._queued:
                self._count_waiting(self._job)
        self._caller.leave()
        state.ledger.close(entry, "finished" if error is None else "failed")
        if error is None:
            state.metrics.latency.add(time.perf_counter() - entry.started_at)
        else:
            state.metrics.refused[error.code or str(error.status)] += 1

    def _count_waiting(self, job: Job) -> None:
        seconds = time.perf_counter() - self._entry.started_at
        for child in job.children:
            record = self._entry.records.get(child.request.request_id)
            if record is not None or not child.last_at:  # else it ran, and no one told since when
                self._caller.usage.waited(record, seconds)

    async def _tell(self, error: ApiError) -> None:
        """As an answer of its own or, in the middle of a stream, as its last event."""
        with contextlib.suppress(TimeoutError):  # a client that does not read is not waited for
            async with asyncio.timeout(TELL_SECONDS):
                if self._events_begun:
                    data = b"data: " + error.body() + b"\n\n"
                    await self._send({"type": "http.response.body", "body": data, "more_body": False})
                else:
                    await self._respond(error.response())
