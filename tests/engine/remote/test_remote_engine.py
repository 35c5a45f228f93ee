"""Engines that are reached over the network: here one on this machine, through a wire that can be cut."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import zmq

from inflight.config import EngineConfig, ProcessConfig
from inflight.engine.remote import supervisor as supervisor_module
from inflight.engine.remote.process_client import ProcessClient
from inflight.engine.remote.supervisor import Supervisor, engine_host
from inflight.errors import EngineDeadError
from inflight.processes import connected_process
from inflight.processes.channel import ConnectionInfo, EncryptedConnection
from inflight.processes.child import ChildProcess, ProcessNotStartedError
from tests.engine.faulty import BUILD, SLOW
from tests.router.replicas import process_id
from tests.support.fake_runner import expected_tokens
from tests.support.processes import exists
from tests.support.requests import make_request
from tests.support.waiting import until

ADDRESS = "127.0.0.1"


class Wire:
    """Passes bytes on, until it is cut."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._servers: list[asyncio.Server] = []
        self._writers: list[asyncio.StreamWriter] = []

    def lay(self, endpoint: str) -> str:
        """Forward a new address to the endpoint, and return it. The engine connects there."""
        port = int(endpoint.rpartition(":")[2])
        listener = socket.create_server((ADDRESS, 0))
        asyncio.get_running_loop().create_task(self._serve(listener, port))
        return f"tcp://{ADDRESS}:{listener.getsockname()[1]}"

    async def _serve(self, listener: socket.socket, port: int) -> None:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_connection(ADDRESS, port)
            self._writers += (writer, back)
            for source, target in ((reader, back), (there, writer)):
                task = asyncio.create_task(self._pass_on(source, target))
                self._tasks.add(task)

        self._servers.append(await asyncio.start_server(accept, sock=listener))

    async def _pass_on(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(1 << 16):
                target.write(data)
                await target.drain()
            target.close()

    async def cut(self) -> None:
        for server in self._servers:
            server.close()
        for writer in self._writers:
            writer.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._servers, self._writers = [], []
        self._tasks.clear()


class DistantHost:
    """Children of this process that think that they are not."""

    name = "engine process"
    address = ADDRESS

    def __init__(self) -> None:
        self.wire = Wire()
        self.processes: list[ChildProcess] = []

    def create_process(self, connection: ConnectionInfo) -> ChildProcess:
        up, down = self.wire.lay(connection.up), self.wire.lay(connection.down)
        laid = msgspec.structs.replace(connection, up=up, down=down)
        self.processes.append(engine_host({}).create_process(laid))
        return self.processes[-1]


def supervisor_of(client: ProcessClient) -> Supervisor:
    assert isinstance(client._connection, Supervisor)
    return client._connection


@contextlib.asynccontextmanager
async def distant(host: DistantHost) -> AsyncIterator[ProcessClient]:
    config = EngineConfig.create(model="faulty")
    process = ProcessConfig(heartbeat=0.05, silent_after=60.0)
    async with asyncio.timeout(120):
        client = await ProcessClient.start(config, process, build=BUILD, host=host)
        try:
            yield client
        finally:
            await client.close()
            await host.wire.cut()
    assert not any(exists(number) for process in host.processes if (number := process.process_id))


async def ask(client: ProcessClient, prompt: list[int], count: int) -> tuple[list[int], Any]:
    request = make_request(prompt, count)
    await client.add(request)
    tokens: list[int] = []
    async for delta in client.stream(request.request_id):
        tokens += delta.token_ids
    return tokens, delta.record


async def test_remote_engine_answers_with_times_of_the_clients_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "COMMAND", (sys.executable, "-m", "tests.engine.elsewhere"))
    async with distant(DistantHost()) as client:
        began = time.monotonic()
        tokens, record = await ask(client, [1], 30)
        assert tokens == expected_tokens([1], 30)
        times = (record.arrived_at, record.admitted_at, record.first_token_at, record.finished_at)
        # As exact as the first message was quick.
        assert all(began - 10 < at < time.monotonic() + 10 for at in times)


async def test_clients_without_the_key_can_neither_read_nor_send(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connected_process, "CUT_TIMEOUT", 0.3)
    async with distant(DistantHost()) as client:
        process = supervisor_of(client).engine_process
        up, down = (socket.get_string(zmq.LAST_ENDPOINT) for socket in (process._up, process._down))
        asking = asyncio.create_task(ask(client, [SLOW], 100))
        with socket.create_connection((ADDRESS, int(up.rpartition(":")[2]))) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with (
            zmq.Context() as context,
            context.socket(zmq.PUSH) as talker,
            context.socket(zmq.PULL) as listener,
        ):
            talker.linger = 0
            talker.connect(up)
            talker.send(b"x" * 16 + b"\x91\xa4Stop")
            listener.connect(down)
            assert (await asking)[0] == expected_tokens([SLOW], 100)
            assert not await asyncio.to_thread(listener.poll, 500)
        assert supervisor_of(client)._num_restarts == 0
        assert (await client.health()).healthy


async def test_engine_with_a_cut_connection_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connected_process, "CUT_TIMEOUT", 0.3)
    host = DistantHost()
    async with distant(host) as client:
        asking = asyncio.create_task(ask(client, [SLOW], 3000))
        await until(lambda: bool(client._open) and supervisor_of(client).engine_process._num_received > 20)
        first = process_id(client)
        await host.wire.cut()
        with pytest.raises(EngineDeadError, match=r"connection to the engine was cut|ended with code 1"):
            await asking
        assert not exists(first), "it ended by itself, or was ended"

        async def is_back() -> bool:
            return (await client.health()).healthy

        await until(is_back)
        assert (await ask(client, [1], 30))[0] == expected_tokens([1], 30)


def test_engine_that_cannot_reach_its_server_says_so() -> None:
    public, _ = zmq.curve_keypair()
    with socket.socket() as taken, zmq.Context() as context, context.socket(zmq.PUSH) as push:
        taken.bind((ADDRESS, 0))  # and does not listen
        endpoint = f"tcp://{ADDRESS}:{taken.getsockname()[1]}"
        with pytest.raises(EngineDeadError, match=f"^the engine cannot reach the server at {endpoint}"):
            EncryptedConnection(public.decode()).connect(push, endpoint)


async def test_address_of_another_machine_is_a_one_line_error() -> None:
    host = DistantHost()
    host.address = "192.0.2.77"
    with pytest.raises(ProcessNotStartedError, match="could not be started: Cannot assign requested address"):
        await ProcessClient.start(EngineConfig.create(model="faulty"), build=BUILD, host=host)
