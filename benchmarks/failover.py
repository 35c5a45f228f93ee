"""Whether answers outlive their engines, and whether anything is left behind.

    python -m benchmarks.failover streams                    200 streams under each kind of fault, for a minute each
    python -m benchmarks.failover streams --faults kill      of one kind: kill, hang, cut, roll
    python -m benchmarks.failover soak --requests 10000      short requests while engines are killed at random

Both run the built-in model on three replicas, and compare every answer, token by token and logprob by logprob, with
that of an undisturbed engine. Afterwards no request, KV block, process, socket or shared memory may be there that was
not there before.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import socket
import stat
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import zmq

from benchmarks.report import show
from inflight import AsyncEngine, SamplingParams
from inflight.config import ProcessConfig
from inflight.engine.remote.process_client import ProcessClient
from inflight.engine.remote.supervisor import Supervisor
from inflight.outputs import CompletionOutput
from inflight.router.replica import Replica
from inflight.router.router import Router
from inflight.structured_outputs import StructuredOutputs

NUM_REPLICAS = 3
NUM_BLOCKS = 4096
# An engine that says nothing for so long is given up. A busy one on a busy machine must not be.
PROCESS = ProcessConfig(max_restarts=100_000, silent_after=5.0)
DRAIN_SECONDS = 2.0  # that a rolling restart waits for streams; what still runs goes on elsewhere

SAMPLED = SamplingParams(temperature=0.9, ignore_eos=True)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 200}, "list": {"type": "array", "minItems": 40}},
    "required": ["name", "list"],
    "additionalProperties": False,
}
KINDS = (
    replace(SAMPLED, temperature=0),
    SAMPLED,
    replace(SAMPLED, n=4),
    replace(SAMPLED, logprobs=2),
    replace(SAMPLED, structured_outputs=StructuredOutputs(json=SCHEMA), ignore_eos=False),
)


# ---- questions and answers ----


async def _answer(engine: AsyncEngine, index: int, num_tokens: int) -> list[CompletionOutput]:
    params = replace(KINDS[index % len(KINDS)], seed=index, max_tokens=num_tokens)
    async for output in engine.generate(f"Once upon a time, {index} foxes", params, output_kind="final"):
        found = output.outputs
    return found


async def _undisturbed(count: int, num_tokens: int) -> list[list[CompletionOutput]]:
    async with await AsyncEngine.start(num_blocks=NUM_BLOCKS) as engine:
        return await asyncio.gather(*(_answer(engine, index, num_tokens) for index in range(count)))


@dataclass
class Outcome:
    """Of one run."""

    counts: Counter[str] = field(default_factory=Counter)
    left: list[str] = field(default_factory=list)  # what is still there, in words

    def compare(self, found: list[CompletionOutput], expected: list[CompletionOutput]) -> None:
        self.counts["answers"] += len(found)
        self.counts["changed"] += sum(mine != theirs for mine, theirs in zip(found, expected, strict=True))

    def fail(self, error: Exception) -> None:
        self.counts["failed"] += 1
        print(f"failed: {type(error).__name__}: {error}")


async def _ask(
    engine: AsyncEngine, index: int, num_tokens: int, expected: list[CompletionOutput], outcome: Outcome
) -> None:
    try:
        outcome.compare(await _answer(engine, index, num_tokens), expected)
    except Exception as error:
        outcome.fail(error)


# ---- faults ----


def _process_of(replica: Replica) -> int | None:
    assert isinstance(replica.client, ProcessClient)
    return replica.client.process_id


def _signal(replica: Replica, number: int) -> None:
    process_id = _process_of(replica)
    if process_id is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_id, number)


def cut(replica: Replica) -> None:
    """End the connections to an engine that runs on: neither side hears of the other any more."""
    assert isinstance(replica.client, ProcessClient)
    link = replica.client._connection
    assert isinstance(link, Supervisor)
    sockets = (link.engine_process._up, link.engine_process._down)
    paths = {item.get_string(zmq.LAST_ENDPOINT).removeprefix("ipc://") for item in sockets}
    for descriptor in _sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as found:
            listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if found.family == socket.AF_UNIX and found.getsockname() in paths and not listens:
                found.shutdown(socket.SHUT_RDWR)


async def _hurt_one(router: Router, hurt: Callable[[Replica], None]) -> bool:
    """One that has work, unless no one would be left. Whether there was one."""
    victims = [replica for replica in router.replicas.available if replica.requests]
    if len(victims) < 2:
        return False
    hurt(random.choice(victims))
    return True


async def _roll(router: Router) -> bool:
    await router.replicas.roll(DRAIN_SECONDS)
    return True


# By name: what is done to a router, and how many seconds apart at least.
FAULTS: dict[str, tuple[Callable[[Router], Awaitable[bool]], float]] = {
    "kill": (lambda router: _hurt_one(router, lambda replica: _signal(replica, signal.SIGKILL)), 4.0),
    "hang": (lambda router: _hurt_one(router, lambda replica: _signal(replica, signal.SIGSTOP)), 8.0),
    "cut": (lambda router: _hurt_one(router, cut), 8.0),
    "roll": (_roll, 0.0),
}


async def _disturb(router: Router, fault: str, ends_at: float, outcome: Outcome) -> None:
    disturb, every = FAULTS[fault]
    while time.monotonic() < ends_at - every:
        await asyncio.sleep(every)
        outcome.counts["faults"] += await disturb(router)


# ---- what is left ----


def _sockets() -> list[int]:
    """Descriptors of this process that are sockets."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.stat(int(name)).st_mode):
                found.append(int(name))
    return found


def _children() -> list[str]:
    return [
        child
        for task in Path("/proc/self/task").iterdir()
        for child in (task / "children").read_text().split()
    ]


def _shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


async def _held(router: Router) -> list[str]:
    """What requests that have ended still hold in the router and its replicas."""
    found = [f"request {name}" for name in router._requests]
    for replica in router.replicas.members:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(60):
                while not replica.available:
                    await asyncio.sleep(0.1)
        kv = (await replica.client.stats()).kv
        if replica.requests or replica.num_queued_tokens or replica.blocks._expected or kv.num_used:
            found.append(f"replica {replica.replica_id}: {kv.num_used} blocks")
        if kv.num_empty + kv.num_cached + kv.num_used != kv.num_blocks:
            found.append(f"replica {replica.replica_id}: blocks do not add up")
    return found


@contextlib.asynccontextmanager
async def _replicas(outcome: Outcome) -> AsyncGenerator[tuple[AsyncEngine, Router]]:
    """Three, after which everything must be as it was before."""
    num_sockets, shared = len(_sockets()), _shared_memory()
    with tempfile.TemporaryDirectory() as folder:
        before, tempfile.tempdir = tempfile.tempdir, folder
        try:
            engine = await AsyncEngine.start(replicas=NUM_REPLICAS, process=PROCESS, num_blocks=NUM_BLOCKS)
            async with engine:
                router = engine.client
                assert isinstance(router, Router)
                yield engine, router
                records = [router._history.get(name) for name in list(router._history._records)]
                moved = sum(state.record.num_failovers for state in records if state is not None)
                outcome.counts["failovers"] = moved
                outcome.left += await _held(router)
        finally:
            tempfile.tempdir = before
        outcome.left += [f"file {name}" for name in os.listdir(folder)]
    await asyncio.sleep(0.5)
    outcome.left += [f"process {child}" for child in _children()]
    outcome.left += [f"{number} sockets" for number in [len(_sockets()) - num_sockets] if number > 0]
    outcome.left += [f"shared memory {name}" for name in _shared_memory() - shared]


# ---- the two runs ----


async def _streams_under(
    fault: str, seconds: float, num_tokens: int, expected: list[list[CompletionOutput]]
) -> Outcome:
    """Streams for so long, each followed by the next, while something is done to their engines."""
    outcome = Outcome()
    async with _replicas(outcome) as (engine, router):
        ends_at = time.monotonic() + seconds

        async def ask_again(index: int) -> None:
            while time.monotonic() < ends_at:
                await _ask(engine, index, num_tokens, expected[index], outcome)

        await asyncio.gather(
            _disturb(router, fault, ends_at, outcome), *(ask_again(index) for index in range(len(expected)))
        )
    return outcome


COLUMNS = ("faults", "answers", "failed", "changed", "failovers")


async def streams(faults: list[str], count: int, num_tokens: int, seconds: float, as_json: bool) -> None:
    expected = await _undisturbed(count, num_tokens)
    rows, data = [], []
    for fault in faults:
        outcome = await _streams_under(fault, seconds, num_tokens, expected)
        rows.append(
            (fault, *(outcome.counts[name] for name in COLUMNS), ", ".join(outcome.left) or "nothing")
        )
        data.append({"fault": fault, **outcome.counts, "left": outcome.left})
        print(*rows[-1], flush=True)
    title = f"{count} streams over {NUM_REPLICAS} replicas, {seconds:g} s of each"
    columns = ("fault", *COLUMNS[:-1], "failovers of the latest 4,096", "left behind")
    show(title, columns, rows, as_json, {"benchmark": "failover streams", "rows": data})


async def soak(num_requests: int, at_once: int, every: float, as_json: bool) -> None:
    """Many short requests of all kinds, while engines are killed at random times."""
    num_tokens, num_kinds = 12, 200
    expected = await _undisturbed(num_kinds, num_tokens)
    outcome = Outcome()
    started = time.monotonic()
    async with _replicas(outcome) as (engine, router):
        numbers = iter(range(num_requests))

        async def ask() -> None:
            for number in numbers:
                index = number % num_kinds
                await _ask(engine, index, num_tokens, expected[index], outcome)

        async def kill() -> None:
            while True:
                await asyncio.sleep(random.uniform(0, 2 * every))
                outcome.counts["faults"] += await FAULTS["kill"][0](router)

        killing = asyncio.create_task(kill())
        await asyncio.gather(*(ask() for _ in range(at_once)))
        killing.cancel()
    seconds = time.monotonic() - started
    row = (
        num_requests,
        *(outcome.counts[name] for name in COLUMNS),
        ", ".join(outcome.left) or "nothing",
        seconds,
    )
    columns = ("requests", *COLUMNS[:-1], "failovers of the latest 4,096", "left behind", "seconds")
    data = {"benchmark": "failover soak", "requests": num_requests, **outcome.counts, "left": outcome.left}
    show("short requests while engines are killed at random", columns, [row], as_json, data)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("streams", "soak"))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--faults", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=100, help="of each answer of streams")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each kind of fault")
    parser.add_argument("--requests", type=int, default=10_000, help="of soak")
    parser.add_argument("--at-once", type=int, default=64, help="requests of soak")
    parser.add_argument(
        "--every", type=float, default=6.0, help="seconds between two kills of soak, on average"
    )
    given = parser.parse_args()
    if given.what == "streams":
        work = streams(given.faults, given.streams, given.tokens, given.seconds, given.json)
    else:
        work = soak(given.requests, given.at_once, given.every, given.json)
    asyncio.run(work)


if __name__ == "__main__":
    main()
