"""A client of a client, with the wire of an engine process between them; here both are in one process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from unittest.mock import Mock

import pytest

from inflight.engine.client import Health
from inflight.engine.inproc import InprocClient
from inflight.engine.remote import client_service
from inflight.engine.remote.client_service import ClientService
from inflight.engine.remote.process_client import ProcessClient
from inflight.engine.remote.wire import FromEngine, Ready, StepOutputs, ToEngine
from inflight.errors import EngineDeadError, EngineError, RequestError
from inflight.processes.channel import Codec, Message
from tests.support.fake_runner import expected_tokens
from tests.support.requests import FakeEngine, make_request
from tests.support.waiting import until, until_idle

LONG = 30_000  # tokens: a request that a test must end
SECRET = bytes(16)


class Loopback:
    """A link to a service in this process. Everything is encoded on its way."""

    def __init__(self, client: InprocClient) -> None:
        self.closing = self.working = False
        self.state = "running"
        self.process_id: int | None = None
        self.codec: Codec[ToEngine] = Codec(SECRET, ToEngine)
        self.service = ClientService(client, self._receive, client._core.stats)
        self._back: Codec[FromEngine] = Codec(SECRET, FromEngine)
        self._outputs: asyncio.Queue[StepOutputs] = asyncio.Queue()

    @property
    def engine_process(self) -> Loopback:
        return self

    def send(self, message: Message) -> None:
        self.send_frame(self.codec.encode(message))

    def send_frame(self, frame: bytearray) -> None:
        self.service.handle(self.codec.decode(bytes(frame)))  # type: ignore[arg-type]

    def _receive(self, outputs: StepOutputs) -> None:
        self._outputs.put_nowait(self._back.decode(bytes(self._back.encode(outputs))))  # type: ignore[arg-type]

    async def messages(self) -> AsyncGenerator[StepOutputs]:
        while True:
            yield await self._outputs.get()

    def trouble(self) -> str | None:
        return None

    def health(self) -> Health:
        return Health(True, 0.0)

    async def restart(self) -> None:
        raise NotImplementedError

    def give_up(self, reason: str) -> None:
        raise AssertionError(reason)

    async def close(self) -> None:
        await self.service.close()


@contextlib.asynccontextmanager
async def linked() -> AsyncIterator[tuple[ProcessClient, InprocClient, Loopback]]:
    engine = FakeEngine(num_blocks=8192)
    below = InprocClient(engine.core, engine.facts)
    link = Loopback(below)
    client = ProcessClient.from_connection(link, Ready(below.facts, await below.stats()))
    try:
        yield client, below, link
    finally:
        await client.close()
        await below.close()
    assert (client._open, len(client._calls), link.service.num_requests) == ({}, 0, 0)


async def read(client: ProcessClient, request_id: str) -> list[int]:
    return [token async for delta in client.stream(request_id) for token in delta.token_ids]


async def test_service_returns_the_results_of_its_client() -> None:
    async with linked() as (client, below, _):
        prompts = [[number, 7, 8] for number in range(8)]
        for number, prompt in enumerate(prompts):
            await client.add(make_request(prompt, 40, f"r{number}"))
        answers = await asyncio.gather(*(read(client, f"r{number}") for number in range(8)))
        assert answers == [expected_tokens(prompt, 40) for prompt in prompts]
        state = await client.describe("r3")
        assert state is not None
        assert (state.status, state.record.num_output_tokens) == ("finished", 40)
        await below.add(make_request([1], LONG, "taken"))
        with pytest.raises(RequestError, match="already in use") as refused:
            await client.add(make_request([1], 1, "taken"))
        assert refused.value.code == "request_id_in_use"
        await below.stream("taken").aclose()


async def test_requests_can_be_aborted_described_and_left() -> None:
    async with linked() as (client, below, _):
        await client.add(make_request([5, 6], LONG, "r"))
        stream = client.stream("r")
        await anext(stream)
        state = await client.describe("r")
        assert state is not None
        assert state.status == "running"
        assert await client.abort("r", "stop") > 0
        assert [delta.finish_reason async for delta in stream][-1] == "stop"
        await client.add(make_request([5, 6], LONG, "left"))
        await client.stream("left").aclose()
        await until_idle(below)
        assert await client.abort("nobody") == 0


async def test_request_abandoned_while_being_added_is_aborted() -> None:
    async with linked() as (client, below, link):
        adding = asyncio.create_task(client.add(make_request([5, 6], LONG, "r")))
        await asyncio.sleep(0)
        adding.cancel()
        await asyncio.gather(adding, return_exceptions=True)
        await until_idle(below)
        await until(lambda: not link.service.num_requests)


async def test_requests_of_a_dead_process_are_aborted() -> None:
    async with linked() as (client, below, link):
        for number in range(3):
            await client.add(make_request([number], LONG, f"r{number}"))
        await anext(client.stream("r0"))
        await link.service.close()
        await until_idle(below)


async def test_failed_stream_raises_the_error_of_the_client() -> None:
    async with linked() as (client, below, _):
        await client.add(make_request([5, 6], LONG, "r"))
        stream = client.stream("r")
        await anext(stream)
        await below.close()
        with pytest.raises(EngineDeadError, match="closed"):
            async for _ in stream:
                pass
        with pytest.raises(EngineDeadError):
            await client.add(make_request([5, 6], 1, "late"))


async def test_statistics_are_sent_without_other_output() -> None:
    async with linked() as (client, below, link):
        await below.add(make_request([1, 2, 3], 5, "of another client"))
        async for _ in below.stream("of another client"):
            pass
        assert (await client.stats()).num_output_tokens == 0
        link.service.send_stats()

        async def has_come() -> bool:
            return (await client.stats()).num_output_tokens == 5

        await until(has_come, "the statistics")


async def test_invalid_request_ends_with_its_own_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with linked() as (client, _, _):
        with monkeypatch.context() as patch:
            patch.setattr(client_service, "Request", Mock(side_effect=ValueError("broken on purpose")))
            with pytest.raises(EngineError, match="broken on purpose"):
                await client.add(make_request([1, 2, 3], 5, "r"))
        await client.add(make_request([1, 2, 3], 5, "r"))
        tokens = [token async for delta in client.stream("r") for token in delta.token_ids]
        assert tokens == expected_tokens([1, 2, 3], 5)
