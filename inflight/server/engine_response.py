"""One request to the engine over HTTP, from its checked body to its last byte: what all kinds of them share."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from inflight.errors import EngineError
from inflight.server.access.keys import Caller
from inflight.server.cancel_scope import CancelScope, Reason
from inflight.server.errors import ApiError, of_exception
from inflight.server.http.unsent import ENGINE_RESPONSE
from inflight.server.observability.request_log import LoggedRequest
from inflight.server.state import ServerState

ABORT_SECONDS = 5.0  # to hear how many blocks came back; an engine that hangs is not waited for
ERROR_SECONDS = 5.0  # for a client to take it


@dataclass(frozen=True, slots=True)
class RequestHead:
    """What is known of a request before it runs, whatever its kind."""

    route: str
    request_id: str  # as the client knows it
    model: str
    stream: bool
    priority: int
    user: str | None


class EngineResponse(Response):
    """A response that makes itself: nothing is known of it before it runs."""

    background = None
    awaited = "token"  # what its client waits for first

    def __init__(self, state: ServerState, caller: Caller, head: RequestHead) -> None:
        self._state = state
        self._caller = caller
        self._head = head

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state, head, options = self._state, self._head, self._state.options
        scope[ENGINE_RESPONSE] = True
        cancel_scope = CancelScope(receive, options.first_token_timeout, options.request_timeout)
        self._send = send
        self._cancel_scope = cancel_scope
        self._logged = logged = LoggedRequest(
            head.request_id,
            self._caller,
            head.route,
            head.stream,
            head.priority,
            self._caller.tenant(head.user),
            cancel_scope,
        )
        error: ApiError | None = None
        await self._admit(logged)  # raises before anything is to be cleaned up
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
        state.tracer.record(
            logged, head.model, Headers(scope=scope), None if error is None else error.message
        )

    async def _admit(self, logged: LoggedRequest) -> None:
        if self._state.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after=5)
        await self._state.admission.enter(self._caller, logged.request_id)
        self._state.request_log.open(logged)

    # ---- what each kind does ----

    async def _run(self) -> None:
        """All of it, to the last byte."""
        raise NotImplementedError

    async def _close_work(self) -> None:
        """Leave nothing of it in the engine, and count what it used."""

    async def _write_error(self, error: ApiError) -> None:
        await self._respond(error.response())

    # ---- around it ----

    async def _respond(self, response: Response) -> None:
        response.headers["x-request-id"] = self._head.request_id
        start = {
            "type": "http.response.start",
            "status": response.status_code,
            "headers": response.raw_headers,
        }
        await self._send(start)
        await self._send({"type": "http.response.body", "body": response.body, "more_body": False})

    async def _leave(self) -> None:
        """The client has gone: so does what it asked for, and the blocks that this frees are counted."""
        self._state.metrics.num_disconnects += 1
        self._logged.outcome = "cancelled"
        if self._logged.abort is not None:
            with contextlib.suppress(TimeoutError, EngineError):
                async with asyncio.timeout(ABORT_SECONDS):
                    self._state.metrics.num_freed_blocks += await self._logged.abort()

    def _interrupted(self, reason: Reason) -> ApiError:
        if reason == "disconnect":
            return ApiError(499, "the client went away", code="disconnected")
        options = self._state.options
        if reason == "shutdown":
            return ApiError(
                503, "the server stopped before this was done", code="shutting_down", retry_after=5
            )
        if reason == "cancelled":
            return ApiError(409, "the request was cancelled before it was done", code="cancelled")
        if reason == "first_token":
            message = (
                f"no {self.awaited} came within {options.first_token_timeout:g} s: the server is overloaded"
            )
            return ApiError(503, message, code="first_token_timeout", retry_after=10)
        message = f"the request took longer than {options.request_timeout:g} s, which is the limit"
        return ApiError(504, message, code="request_timeout")

    async def _close(self, error: ApiError | None) -> None:
        state, logged = self._state, self._logged
        await self._close_work()
        state.admission.leave(self._caller, logged.request_id)
        state.request_log.close(logged, "finished" if error is None else "failed")
        if error is None:
            state.metrics.latency.add(time.perf_counter() - logged.started_at)
        else:
            state.metrics.refused[error.code or str(error.status)] += 1

    async def _send_error(self, error: ApiError) -> None:
        with contextlib.suppress(TimeoutError):  # a client that does not read is not waited for
            async with asyncio.timeout(ERROR_SECONDS):
                await self._write_error(error)
