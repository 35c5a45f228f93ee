"""The answers of one request: from prompts to the news of each answer as it comes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field

from inflight.errors import EngineError, RequestError
from inflight.events import Delta, PositionLogprobs
from inflight.frontend.output_processor import Answer, named
from inflight.outputs import Logprobs
from inflight.request import Request
from inflight.server.state import ServerState

MAX_PENDING = 64  # news of several answers that wait for a slow client; beyond that they merge


@dataclass(slots=True, eq=False)
class Prepared:
    """A prompt that passed all checks, and a request for each answer to it."""

    text: str | None
    token_ids: list[int]
    requests: list[Request]
    logprobs: list[Logprobs | None] | None = None  # of the prompt, once computed


@dataclass(slots=True, eq=False)
class Child:
    """One answer, and how much of it has been told."""

    index: int  # among all answers of the request
    prompt: Prepared
    request: Request
    answer: Answer
    stream: AsyncGenerator[Delta] | None = None
    last_at: float = 0.0  # when its last token came; 0.0 before the first
    num_told: int = 0  # tokens
    offset: int = 0  # characters told
    prefix: bytes = b""  # of its events
    echoes: bool = field(default=False)  # its prompt is still to be told

    @property
    def num_tokens(self) -> int:
        return len(self.answer.output.token_ids)


class Job:
    def __init__(self, state: ServerState, prompts: list[Prepared]) -> None:
        self._state = state
        self._client = state.client
        tokenizer = state.frontend.tokenizer
        self.prompts = prompts
        pairs = [(prompt, request) for prompt in prompts for request in prompt.requests]
        self.children = [
            Child(index, prompt, request, Answer(index, request, tokenizer))
            for index, (prompt, request) in enumerate(pairs)
        ]
        for prompt in prompts:
            if prompt.requests[0].params.prompt_logprobs is not None and len(prompt.token_ids) == 1:
                prompt.logprobs = [None]  # nothing predicts the first token, so no news will tell

    @property
    def engine_ids(self) -> list[str]:
        return [child.request.request_id for child in self.children]

    async def start(self) -> None:
        """Queue all of it, or nothing."""
        try:
            if len(self.children) == 1:
                await self._client.add(self.children[0].request)
            else:
                await asyncio.gather(*(self._client.add(child.request) for child in self.children))
            for child in self.children:
                child.stream = self._client.stream(child.request.request_id)
        except BaseException:
            for child in self.children:  # those that were added must not stay
                if child.stream is None:
                    with contextlib.suppress(RequestError, EngineError):
                        child.stream = self._client.stream(child.request.request_id)
            await self.close()
            raise

    async def news(self) -> AsyncIterator[tuple[Child, Delta]]:
        """What happens to the answers, until all have ended."""
        if len(self.children) == 1:
            child = self.children[0]
            assert child.stream is not None
            async for delta in child.stream:
                yield child, delta
            return
        queue: asyncio.Queue[tuple[Child, Delta] | Exception] = asyncio.Queue(MAX_PENDING)
        pumps = [asyncio.create_task(_pump(child, queue)) for child in self.children]
        num_open = len(pumps)
        try:
            while num_open:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                num_open -= item[1].finish_reason is not None
                yield item
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def take(self, child: Child, delta: Delta) -> None:
        """Let the answer grow by the news."""
        if delta.prompt_logprobs is not None and child.prompt.logprobs is None:
            found = delta.prompt_logprobs
            child.prompt.logprobs = await self._state.off_loop(True, lambda: self._named(found))
        if child.answer.push(delta):
            # A stop string has ended it; its last news is still to come.
            await self._client.abort(child.request.request_id, "stop")

    def _named(self, positions: list[PositionLogprobs | None]) -> list[Logprobs | None]:
        tokenizer = self._state.frontend.tokenizer
        return [None if position is None else named(position, tokenizer) for position in positions]

    async def abort(self) -> int:
        """End all answers now. The number of KV blocks freed."""
        return sum([await self._client.abort(engine_id) for engine_id in self.engine_ids])

    async def close(self) -> None:
        """Leave the streams; what still runs is aborted by that."""
        for child in self.children:
            if child.stream is not None:
                await child.stream.aclose()


async def _pump(child: Child, queue: asyncio.Queue[tuple[Child, Delta] | Exception]) -> None:
    assert child.stream is not None
    try:
        async for delta in child.stream:
            await queue.put((child, delta))
    except Exception as error:  # whoever reads the queue must hear of it, whatever it is
        await queue.put(error)
