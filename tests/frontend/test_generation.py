"""The one path for answers, over clients that refuse, fail, or cut every stream and resume it from its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from inflight import AsyncEngine, SamplingParams
from inflight.engine.client import Command, EngineClient, Health, ModelFacts, RequestState
from inflight.engine.stats import EngineStats
from inflight.errors import EngineDeadError, QueueFullError, RequestError
from inflight.events import Delta
from inflight.frontend.generation import Generation
from inflight.frontend.output_processor import OutputProcessor
from inflight.request import Request
from inflight.server.formatters import Choice, usage_of
from tests.support.no_timeline import NoTimeline
from tests.support.requests import make_request
from tests.support.waiting import until_idle

PROMPT = "Once upon a time there was a"
LENGTH = 14
SAMPLED = SamplingParams(temperature=0.9, seed=5, max_tokens=LENGTH, ignore_eos=True)


class Cutting(NoTimeline):
    """A client that cuts every stream after so many tokens and goes on with a request for the rest: all that a router
    does when an engine dies under a stream."""

    def __init__(self, inner: EngineClient, every: int) -> None:
        self._inner = inner
        self._every = every
        self._requests: dict[str, Request] = {}
        self.num_cuts = 0

    @property
    def facts(self) -> ModelFacts:
        return self._inner.facts

    async def add(self, request: Request) -> None:
        self._requests[request.request_id] = request
        await self._inner.add(request)

    async def stream(self, request_id: str) -> AsyncGenerator[Delta]:
        request, known = self._requests[request_id], list[int]()
        first = True
        while True:
            stream, left = self._inner.stream(request_id), 0 if first else self._every
            try:
                async for delta in stream:
                    is_cut = len(delta.token_ids) > left or (
                        len(delta.token_ids) == left and delta.finish_reason is None
                    )
                    if is_cut:
                        delta = _beginning(delta, left)
                    left -= len(delta.token_ids)
                    known += delta.token_ids
                    if delta.token_ids or delta.finish_reason is not None:
                        yield delta
                    if delta.finish_reason is not None:
                        return
                    if is_cut:
                        break
            finally:
                await stream.aclose()
            first = False
            self.num_cuts += 1
            await self._inner.add(request.resumed(known))

    async def abort(self, request_id: str, reason: str = "abort") -> int:
        return await self._inner.abort(request_id, reason)

    async def command(self, command: Command) -> None:
        """It has none to give."""

    async def describe(self, request_id: str) -> RequestState | None:
        return await self._inner.describe(request_id)

    async def stats(self) -> EngineStats:
        return await self._inner.stats()

    async def health(self) -> Health:
        return await self._inner.health()

    async def close(self, drain: float = 0.0) -> None:
        await self._inner.close(drain)


def _beginning(delta: Delta, count: int) -> Delta:
    logprobs = None if delta.logprobs is None else delta.logprobs[:count]
    told = delta.prompt_logprobs if count else None
    return Delta(delta.request_id, delta.token_ids[:count], logprobs, told)


@pytest.fixture
async def engine() -> AsyncIterator[AsyncEngine]:
    async with await AsyncEngine.start() as engine:
        yield engine


async def run(engine: AsyncEngine, client: EngineClient, params: SamplingParams) -> OutputProcessor:
    prepared = engine.frontend.prepare("r", PROMPT, params)
    generation = Generation(client, [prepared])
    await generation.start()
    async for _, delta in generation.deltas():
        assert delta.error is None
    await generation.close()
    return prepared


def told(prepared: OutputProcessor) -> list[Any]:
    """All that a user sees of the answers, but for when it came."""
    output = prepared.output()
    found: list[Any] = [positions(output.prompt_logprobs)]
    for answer in output.outputs:
        ending = (answer.finish_reason, answer.stop_reason)
        found.append((answer.text, answer.token_ids, *ending, positions(answer.logprobs)))
    return found


def positions(logprobs: Any) -> list[Any]:
    return [
        {token_id: (round(item.logprob, 4), item.rank, item.decoded_token) for token_id, item in at.items()}
        for at in logprobs or []
        if at is not None
    ]


def usage(prepared: OutputProcessor) -> dict[str, Any]:
    found = usage_of([Choice(i, prepared, answer, False) for i, answer in enumerate(prepared.answers)])
    cached = found.pop("prompt_tokens_details")["cached_tokens"]
    assert cached <= found["prompt_tokens"]
    return found


CASES = {
    "greedy": replace(SAMPLED, temperature=0, seed=None),
    "sampled": SAMPLED,
    "two answers": replace(SAMPLED, n=2),
    "logprobs": replace(SAMPLED, logprobs=2, prompt_logprobs=1),
    "penalties": replace(SAMPLED, presence_penalty=1.5, frequency_penalty=1.0, repetition_penalty=1.3),
    "a stop string": replace(SAMPLED, stop=["e", "zz"], min_tokens=3),
    "its end": replace(SAMPLED, ignore_eos=False, max_tokens=60, min_tokens=20),
    "all of it": replace(SAMPLED, n=2, logprobs=1, frequency_penalty=1.0, stop=["a "], min_tokens=4),
}


@pytest.mark.parametrize("case", CASES)
async def test_stream_resumed_at_any_point_has_the_same_tokens(case: str, engine: AsyncEngine) -> None:
    whole = await run(engine, engine.client, CASES[case])
    for every in (1, 3, LENGTH):
        client = Cutting(engine.client, every)
        resumed = await run(engine, client, CASES[case])
        assert client.num_cuts >= CASES[case].n
        assert told(resumed) == told(whole), f"cut every {every} tokens"
        assert usage(resumed) == usage(whole)
        for answer in resumed.answers:  # the engine may be a few tokens past a stop string
            assert answer.record.num_output_tokens >= len(answer.output.token_ids)
    stats = await engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv.num_used) == (0, 0, 0)


def test_finished_request_is_not_resumed() -> None:
    request = make_request([1, 2], 3, stop_ids=frozenset({9}))
    assert request.resumed([4, 5]).token_ids == [1, 2, 4, 5]
    for outputs in ([4, 5, 6], [4, 9]):
        with pytest.raises(RequestError, match=f"already has all its {len(outputs)} output tokens"):
            request.resumed(outputs)


def test_resumed_request_can_be_resumed_again() -> None:
    request = make_request([1, 2], 8).resumed([4, 5])
    again = request.resumed([4, 5, 6])
    assert (again.token_ids, again.num_prompt_tokens, again.max_total) == ([1, 2, 4, 5, 6], 2, 10)


def test_request_without_outputs_starts_over() -> None:
    request = make_request([1, 2], 0, params=SamplingParams(), task="prompt_logprobs", splittable=False)
    again = request.resumed([])
    assert (again.task, again.splittable, again.token_ids, again.max_tokens) == (
        "prompt_logprobs",
        False,
        [1, 2],
        0,
    )


# ---- all or none ----


class Refusing(Cutting):
    """Takes so many requests, then is full; or hangs."""

    def __init__(self, inner: EngineClient, num_taken: int, hangs: bool = False) -> None:
        super().__init__(inner, 1 << 20)
        self._num_taken = num_taken
        self._hangs = hangs
        self.full = asyncio.Event()

    async def add(self, request: Request) -> None:
        if self._num_taken == 0:
            self.full.set()
            if self._hangs:
                await asyncio.sleep(3600)
            raise QueueFullError("full")
        self._num_taken -= 1
        await super().add(request)

    def stream(self, request_id: str) -> AsyncGenerator[Delta]:
        return self._inner.stream(request_id)  # as it is: one that is left before it was read aborts


@pytest.mark.parametrize("num_taken", [0, 1, 3])
async def test_rejected_request_aborts_the_others_of_its_call(num_taken: int, engine: AsyncEngine) -> None:
    endless = replace(SAMPLED, n=4, max_tokens=None)
    generation = Generation(
        Refusing(engine.client, num_taken), [engine.frontend.prepare("r", PROMPT, endless)]
    )
    with pytest.raises(QueueFullError):
        await generation.start()
    await until_idle(engine)
    for request_id in generation.request_ids[:num_taken]:
        state = await engine.client.describe(request_id)
        assert state is not None
        assert state.record.finish_reason == "abort"


async def test_cancelled_start_leaves_no_requests_behind(engine: AsyncEngine) -> None:
    client = Refusing(engine.client, 2, hangs=True)
    endless = replace(SAMPLED, n=3, max_tokens=None)
    generation = Generation(client, [engine.frontend.prepare("r", PROMPT, endless)])
    starting = asyncio.create_task(generation.start())
    await client.full.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await until_idle(engine)


async def test_abort_ends_all_prompts(engine: AsyncEngine) -> None:
    endless = replace(SAMPLED, n=2, max_tokens=None)
    prompts = [engine.frontend.prepare(name, PROMPT, endless) for name in ("a", "b")]
    generation = Generation(engine.client, prompts)
    assert generation.request_ids == ["a/0", "a/1", "b/0", "b/1"]
    await generation.start()
    reasons: list[str] = []
    async for answer, delta in generation.deltas():
        if not reasons and delta.finish_reason is None:
            assert answer.output.token_ids[-1:] == delta.token_ids[-1:]
            await generation.abort()
        if delta.finish_reason is not None:
            reasons.append(delta.finish_reason)
    assert reasons == ["abort"] * 4
    assert all(prompt.finished for prompt in prompts)


@pytest.mark.parametrize("n", [1, 2])
async def test_reader_gets_an_error_when_the_engine_dies(n: int, engine: AsyncEngine) -> None:
    endless = replace(SAMPLED, n=n, max_tokens=None)
    generation = Generation(engine.client, [engine.frontend.prepare("r", PROMPT, endless)])
    await generation.start()
    deltas = generation.deltas()
    await anext(deltas)
    await engine.client.close()

    async def read() -> None:
        async for _ in deltas:
            pass

    with pytest.raises(EngineDeadError):
        await read()
    await generation.close()
