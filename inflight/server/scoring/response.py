"""One request for embeddings, classes, scores or a ranking over HTTP."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.responses import Response

from inflight.errors import EngineError, RequestError
from inflight.events import RequestRecord
from inflight.pooling import Task
from inflight.server.access.keys import Caller
from inflight.server.engine_response import EngineResponse, RequestHead
from inflight.server.errors import ApiError
from inflight.server.observability.request_log import MAX_RECORDS
from inflight.server.scoring.formatters import AnswerHead, Pooled
from inflight.server.state import ServerState

LONG_ANSWER = 1 << 14  # numbers from which on writing them is worth a thread


@dataclass(frozen=True, slots=True)
class PoolingSpec:
    """What a route has found out about a request before it runs."""

    head: RequestHead
    task: Task
    num_texts: int  # to compute
    cache_salt: str
    call: Callable[..., Awaitable[Pooled]]  # of the engine, with all but what every call has
    write: Callable[[AnswerHead, Any], bytes]
    names: dict[str, str]  # of the body's parameters, by those of the call; where they differ


class PoolingResponse(EngineResponse):
    """All results at once, when the last is there."""

    awaited = "result"

    def __init__(self, state: ServerState, caller: Caller, spec: PoolingSpec) -> None:
        super().__init__(state, caller, spec.head)
        self._spec = spec

    async def _run(self) -> None:
        state, spec, logged = self._state, self._spec, self._logged
        name = f"p{next(state.serials)}"
        told = [f"{name}/{index}" for index in range(min(spec.num_texts, MAX_RECORDS))]
        logged.task, logged.num_answers = spec.task, spec.num_texts
        state.request_log.set_engine_ids(logged, told)
        logged.abort = partial(self._abort, name)
        found = await self._call(name)
        head = AnswerHead(spec.head.request_id, logged.created, spec.head.model)
        is_long = spec.num_texts * state.num_results > LONG_ANSWER
        content = await state.in_thread_if(is_long, lambda: spec.write(head, found))
        await self._respond(Response(content, media_type="application/json"))

    async def _call(self, name: str) -> Pooled:
        spec, logged = self._spec, self._logged
        try:
            return await spec.call(
                request_id=name,
                priority=spec.head.priority,
                tenant=logged.tenant,
                cache_salt=self._caller.salt(spec.cache_salt),
                on_record=self._ended,
            )
        except RequestError as error:
            param = None if error.param is None else spec.names.get(error.param, error.param)
            raise ApiError(400, str(error), code=error.code, param=param) from None
        except EngineError:
            if logged.outcome != "cancelled":
                raise
            gone = self._cancel_scope.reason == "disconnect"
            raise self._interrupted("disconnect" if gone else "cancelled") from None

    async def _abort(self, name: str) -> int:
        """End it, whatever it is at: texts in the engine, or one that is not there yet."""
        num_freed = await self._state.engine.abort(name)
        if self._cancel_scope.reason != "disconnect":
            self._cancel_scope.end("cancelled")
        return num_freed

    def _ended(self, record: RequestRecord) -> None:
        """A text is done."""
        state, logged, usage = self._state, self._logged, self._caller.usage
        if not logged.queued:
            logged.queued, logged.first_token_at = True, time.perf_counter()
            self._cancel_scope.first_token()
            usage.add_request(0)
            state.metrics.requests[self._spec.task] += 1
        usage.num_prompt_tokens += record.num_prompt_tokens
        usage.add_queue_time(record, 0.0)
        logged.num_pooled_tokens += record.num_prompt_tokens
        state.request_log.answer_ended(logged, record)
        state.metrics.record_text(self._spec.task, record)
