"""One call's texts through an engine client: a window of them at a time, so that others are served between."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from concurrent.futures import Executor

from inflight.engine import EngineClient
from inflight.errors import QueueFullError
from inflight.frontend.pooling import PoolingJob, PoolingProcessor, RequestContext
from inflight.frontend.pooling_inputs import EncodedText
from inflight.frontend.pooling_results import PooledVectors
from inflight.request import Request

STEPS_IN_WINDOW = 2  # one that is computed, and the next
LONG_TEXT = 2000  # characters from which on tokenizing is worth a thread
RETRY_SECONDS = 0.02  # between two questions whether a full queue has a place again


class PoolingRun:
    """`run` it once. Cancelling that aborts all texts that are in the engine.

    A queue that is full refuses a call of which nothing is in the engine yet. One that has begun waits for places.
    """

    def __init__(
        self,
        client: EngineClient,
        processor: PoolingProcessor,
        job: PoolingJob,
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
        # A short text takes one of the step's slots, and counts for as many tokens as fill one on average.
        self._least_cost = max(1, facts.max_num_batched_tokens // facts.max_num_seqs)
        self._num_tokens = 0  # of texts in the engine, or on their way
        self._running: set[str] = set()  # request ids
        self._freed = asyncio.Event()
        self._has_begun = False
        self._turn = asyncio.Lock()
        self.vectors = PooledVectors(job.num_texts, processor.facts.size)

    async def run(self) -> PooledVectors:
        """The vectors of all texts. The first error of any of them ends it, and aborts the others."""
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
        """All texts in order, the next ones being tokenized while the last ones are computed."""
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
                ahead.exception()  # looked at, so that no one is told that it was not

    async def _wait_for_room(self, cost: int) -> None:
        while self._num_tokens and self._num_tokens + cost > self._window:
            self._freed.clear()
            await self._freed.wait()
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
            if not self._has_begun:
                raise
            async with self._turn:  # one of them asks again, not all
                await self._add_when_there_is_room(request)
        self._has_begun = True

    async def _add_when_there_is_room(self, request: Request) -> None:
        while True:
            await asyncio.sleep(RETRY_SECONDS)
            with contextlib.suppress(QueueFullError):
                return await self._client.add(request)

    async def abort(self) -> int:
        """End the call: `run` raises EngineError. The number of KV blocks freed."""
        return sum([await self._client.abort(request_id) for request_id in list(self._running)])
