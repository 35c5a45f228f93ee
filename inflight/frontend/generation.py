"""Runs prompts through an engine client: adds their requests, reads all deltas, aborts and closes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from inflight.engine.client import EngineClient
from inflight.events import Delta
from inflight.frontend.output_processor import Answer, OutputProcessor
from inflight.request import Request

MAX_BUFFERED = 64  # deltas buffered for a slow reader; beyond that they are merged in the client


class Generation:
    """All answers to one or several prompts: call `start`, read `deltas` to the end, then `close`.

    A delta is added to its answer before it is yielded. An answer that ended with a stop string is aborted in the
    engine; its last delta is still yielded.
    """

    def __init__(self, client: EngineClient, prompts: list[OutputProcessor]) -> None:
        self.prompts = prompts
        self._client = client
        # By request id, in order: the answer and its prompt.
        self._answers = {
            answer.request.request_id: (answer, prompt) for prompt in prompts for answer in prompt.answers
        }
        self._streams: dict[str, AsyncGenerator[Delta]] = {}
        self._aborted = False

    @property
    def answers(self) -> list[Answer]:
        return [answer for answer, _ in self._answers.values()]

    @property
    def request_ids(self) -> list[str]:
        """The ids that the engine uses."""
        return list(self._answers)

    async def start(self) -> None:
        """Add all requests, or none of them."""
        requests = [answer.request for answer in self.answers]
        try:
            if len(requests) == 1:
                await self._add(requests[0])
            else:
                results = await asyncio.gather(*map(self._add, requests), return_exceptions=True)
                for error in results:
                    if error is not None:
                        raise error
            if self._aborted:  # while they were being added
                await self.abort()
        except BaseException:
            await self.close()
            raise

    async def _add(self, request: Request) -> None:
        await self._client.add(request)
        self._streams[request.request_id] = self._client.stream(request.request_id)

    async def deltas(self) -> AsyncGenerator[tuple[Answer, Delta]]:
        """Yield each delta with its answer until all answers have ended."""
        if len(self._streams) == 1:
            (stream,) = self._streams.values()
            async for delta in stream:
                yield await self._push(delta), delta
            return
        queue: asyncio.Queue[Delta | Exception] = asyncio.Queue(MAX_BUFFERED)
        pumps = [asyncio.create_task(_pump(stream, queue)) for stream in self._streams.values()]
        num_open = len(pumps)
        try:
            while num_open:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                num_open -= item.finish_reason is not None
                yield await self._push(item), item
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _push(self, delta: Delta) -> Answer:
        answer, prompt = self._answers[delta.request_id]
        if prompt.push(delta):
            await self._client.abort(delta.request_id, "stop")
        return answer

    async def abort(self) -> int:
        """Abort all answers. Return the number of KV blocks freed."""
        self._aborted = True
        return sum([await self._client.abort(request_id) for request_id in self._answers])

    async def close(self) -> None:
        """Close the streams, which aborts requests that still run."""
        for stream in self._streams.values():
            await stream.aclose()


async def _pump(stream: AsyncGenerator[Delta], queue: asyncio.Queue[Delta | Exception]) -> None:
    try:
        async for delta in stream:
            await queue.put(delta)
    except Exception as error:  # raised again by the reader of the queue
        await queue.put(error)
