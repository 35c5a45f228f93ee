"""The asynchronous engine: thousands of requests at once, each a stream."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from inflight.config import EngineConfig
from inflight.engine import EngineClient, EngineStats, Health, InprocClient
from inflight.errors import EngineError
from inflight.events import Delta
from inflight.frontend import Assembler, Prompt
from inflight.loading import LoadedEngine, load_engine
from inflight.outputs import CompletionOutput, RequestOutput
from inflight.request import Request, SamplingParams
from inflight.text import Tokenizer

OutputKind = Literal["cumulative", "delta", "final"]


class AsyncEngine:
    """Text above, an `EngineClient` below.

    >>> engine = await AsyncEngine.start("path/or/hub-id")
    >>> async for output in engine.generate("Once upon a time", SamplingParams(max_tokens=64)):
    ...     print(output.outputs[0].text)

    Leaving the loop, or cancelling the task, ends the request and frees its blocks.
    """

    def __init__(self, loaded: LoadedEngine, client: EngineClient | None = None) -> None:
        self._loaded = loaded
        self._client: EngineClient = client or InprocClient(loaded.core)
        self._ids = itertools.count()
        self._children: dict[str, list[str]] = {}  # by the user's request id

    @classmethod
    async def start(cls, model: str, **options: Any) -> AsyncEngine:
        """Load a model without blocking the event loop. Options are those of `LLM`."""
        config = EngineConfig.create(model=model, **options)
        return cls(await asyncio.to_thread(load_engine, config))

    # ---- requests ----

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        output_kind: OutputKind = "cumulative",
        priority: int = 0,
        tenant: str = "",
        cache_salt: str = "",
    ) -> AsyncGenerator[RequestOutput]:
        """Outputs as they grow: all so far ("cumulative"), what is new ("delta"), or once at the end ("final").

        A reader slower than the engine gets several tokens at a time; the engine never waits for it.
        """
        params = sampling_params or self._loaded.default_sampling_params()
        name = request_id if request_id is not None else f"request-{next(self._ids)}"
        if name in self._children:
            raise EngineError(f"request id {name!r} is already in use")
        text, requests = self._loaded.intake.requests(name, prompt, params, priority, tenant, cache_salt)
        assembler = Assembler(name, text, requests, self._loaded.tokenizer)
        self._children[name] = [request.request_id for request in requests]
        sent = _Sent()
        try:
            async with contextlib.aclosing(self._deltas(requests)) as deltas:
                async for delta in deltas:
                    if assembler.push(delta):
                        await self._client.abort(delta.request_id)
                    if delta.error is not None:
                        raise EngineError(delta.error)
                    finished = assembler.finished
                    if finished or output_kind != "final":
                        yield (
                            sent.trim(assembler.output())
                            if output_kind == "delta"
                            else _snapshot(assembler.output())
                        )
                    if finished:
                        return
        finally:
            del self._children[name]

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        output_kind: OutputKind = "cumulative",
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """`generate` for a conversation, through the checkpoint's chat template."""
        template, tokenizer = self._loaded.chat_template, self.tokenizer
        text = await asyncio.to_thread(template.render, messages, kwargs=chat_template_kwargs)
        prompt = {"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}
        async with contextlib.aclosing(
            self.generate(prompt, sampling_params, request_id, output_kind=output_kind)
        ) as outputs:
            async for output in outputs:
                yield output

    async def _deltas(self, requests: list[Request]) -> AsyncGenerator[Delta]:
        """The news of all answers as they come."""
        async with contextlib.AsyncExitStack() as stack:
            streams = []
            for request in requests:
                await self._client.add(request)
                stream = self._client.stream(request.request_id)
                streams.append(await stack.enter_async_context(contextlib.aclosing(stream)))
            if len(streams) == 1:
                async for delta in streams[0]:
                    yield delta
                return
            reads = {asyncio.ensure_future(anext(stream)): stream for stream in streams}
            try:
                while reads:
                    done, _ = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
                    for read in done:
                        stream, delta = reads.pop(read), read.result()
                        if delta.finish_reason is None:
                            reads[asyncio.ensure_future(anext(stream))] = stream
                        yield delta
            finally:
                for read in reads:
                    read.cancel()
                await asyncio.gather(*reads, return_exceptions=True)

    async def abort(self, request_id: str) -> int:
        """End a request; its stream ends with finish reason "abort". The number of KV blocks freed."""
        return sum([await self._client.abort(child) for child in self._children.get(request_id, ())])

    # ---- around it ----

    @property
    def tokenizer(self) -> Tokenizer:
        if self._loaded.tokenizer is None:
            raise EngineError("this engine runs without a tokenizer")
        return self._loaded.tokenizer

    @property
    def max_model_len(self) -> int:
        return self._loaded.max_model_len

    async def stats(self) -> EngineStats:
        return await self._client.stats()

    async def health(self) -> Health:
        return await self._client.health()

    async def close(self) -> None:
        """Stop the loop. Streams still open end with an error."""
        await self._client.close()

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


def _snapshot(output: RequestOutput) -> RequestOutput:
    """A copy that later tokens do not change."""
    output.outputs = [
        replace(
            answer,
            token_ids=answer.token_ids.copy(),
            logprobs=None if answer.logprobs is None else answer.logprobs.copy(),
        )
        for answer in output.outputs
    ]
    return output


class _Sent:
    """What of each answer has gone out already."""

    def __init__(self) -> None:
        self._done: dict[int, tuple[int, int]] = {}  # answer -> characters, tokens

    def trim(self, output: RequestOutput) -> RequestOutput:
        output.outputs = [self._rest(answer) for answer in output.outputs]
        return output

    def _rest(self, answer: CompletionOutput) -> CompletionOutput:
        characters, tokens = self._done.get(answer.index, (0, 0))
        self._done[answer.index] = len(answer.text), len(answer.token_ids)
        return replace(
            answer,
            text=answer.text[characters:],
            token_ids=answer.token_ids[tokens:],
            logprobs=None if answer.logprobs is None else answer.logprobs[tokens:],
        )
