"""Runs the texts of one scoring call through an engine client, a window at a time so that other calls get a turn."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from concurrent.futures import Executor

from inflight.engine import EngineClient
from inflight.errors import EngineError, QueueFullError
from inflight.frontend.scoring import PooledVectors, RequestContext, ScoringJob, ScoringProcessor
from inflight.frontend.scoring_inputs import EncodedText
from inflight.request import Request

STEPS_IN_WINDOW = 2  # the step being computed, and the next one
LONG_TEXT = 2000  # characters from which tokenizing is worth a thread
RETRY_SECONDS = 0.02  # between attempts to add to a full queue


class ScoringRun:
    """One scoring call. Cancelling `run` aborts all its texts in the engine.

    If the queue is full, a call with no text in the engine yet is rejected; one that has started waits for room.
    """

    def __init__(
        self,
        client: EngineClient,
        processor: ScoringProcessor,
        job: ScoringJob,
        context: RequestContext,
        request_id: str,
        threads: Executor,
    ) -> None:
        self._client = client
        self._processor = processor
        self._job = job
        self._context = context
        self._request_id = request_id
        self._threads = threads
        facts = client.facts
        self._window = STEPS_IN_WINDOW * facts.max_num_batched_tokens
        # A short text takes a whole slot of a step, so it counts at least as many tokens as an average slot has.
        self._least_cost = max(1, facts.max_num_batched_tokens // facts.max_num_seqs)
        self._num_tokens = 0  # of texts in the engine or about to be added
        self._running: set[str] = set()  # request ids
        self._freed = asyncio.Event()
        self._started = self._aborted = False
        self._turn = asyncio.Lock()
        self.vectors = PooledVectors(job.num_texts, processor.facts.size)

    async def run(self) -> PooledVectors:
        """Return the vectors of all texts. The first error aborts the remaining texts."""
        try:
            async with asyncio.TaskGroup() as group, contextlib.aclosing(self._encoded()) as chunks:
                index = 0
                async for texts in chunks:
                    for text in texts:
                        cost = max(len(text.ids), self._least_cost)
                        await self._wait_for_room(cost)
                        group.create_task(self._compute(index, text, cost))
                        index += 1
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return self.vectors

    async def _encoded(self) -> AsyncGenerator[list[EncodedText]]:
        """Yield all texts in order. The next chunk is tokenized while the current one is computed."""
        encode, job = self._processor.inputs.encode, self._job
        if job.num_characters < LONG_TEXT:
            for chunk in job.chunks():
                yield encode(*chunk)
            return
        loop = asyncio.get_running_loop()
        ahead: asyncio.Future[list[EncodedText]] | None = None
        try:
            for chunk in job.chunks():
                ready, ahead = ahead, loop.run_in_executor(self._threads, encode, *chunk)
                if ready is not None:
                    yield await ready
            if ahead is not None:
                yield await ahead
        finally:
            if ahead is not None and not ahead.cancel() and not ahead.cancelled():
                ahead.exception()  # retrieved, so that asyncio does not log it

    async def _wait_for_room(self, cost: int) -> None:
        while self._num_tokens and self._num_tokens + cost > self._window:
            self._freed.clear()
            await self._freed.wait()
        if self._aborted:
            raise EngineError("the call was aborted", code="aborted")
        self._num_tokens += cost

    async def _compute(self, index: int, text: EncodedText, cost: int) -> None:
        request = self._processor.request(f"{self._request_id}/{index}", text, self._context)
        try:
            await self._add(request)
            self._running.add(request.request_id)
            async with contextlib.aclosing(self._client.stream(request.request_id)) as deltas:
                async for delta in deltas:
                    if delta.record is not None:
                        self._context.on_record(delta.record)
                    if delta.finish_reason is not None:
                        self.vectors.put(index, delta)
        finally:
            self._running.discard(request.request_id)
            self._num_tokens -= cost
            self._freed.set()

    async def _add(self, request: Request) -> None:
        try:
            await self._client.add(request)
        except QueueFullError:
            if not self._started:
                raise
            async with self._turn:  # only one text retries at a time
                await self._add_when_there_is_room(request)
        self._started = True

    async def _add_when_there_is_room(self, request: Request) -> None:
        while True:
            await asyncio.sleep(RETRY_SECONDS)
            with contextlib.suppress(QueueFullError):
                return await self._client.add(request)

    async def abort(self) -> int:
        """Abort the call, so that `run` raises EngineError. Return the number of KV blocks freed."""
        self._aborted = True
        return sum([await self._client.abort(request_id) for request_id in list(self._running)])
