"""A step is scheduled as late as the device allows, so that more requests can join it."""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import Future

import pytest

from inflight.engine.core import MARGIN, SURE
from inflight.engine.inproc import InprocClient
from inflight.engine.remote.engine_loop import EngineLoop
from inflight.engine.remote.wire import Abort, Ack, Add, StepOutputs, ToEngine
from inflight.processes.channel import Message, Stop
from inflight.request import Request
from inflight.scheduling.policy import TokenBudget
from tests.support.held_steps import held_steps
from tests.support.requests import FakeEngine, make_request
from tests.support.timed import MAX_TOKENS, Timed, timed
from tests.support.waiting import until


def decoding(depth: int) -> Timed:
    """Return an engine in the middle of decoding a request."""
    engine = Timed(TokenBudget(MAX_TOKENS), depth)
    engine.add(4, 200)
    for _ in range(6):
        engine.step()
    return engine


def test_next_step_waits_for_most_of_the_one_on_the_device() -> None:
    engine = decoding(depth=2)
    schedule_delay = engine.core.schedule_delay()
    assert schedule_delay == pytest.approx(SURE * timed(1) - MARGIN)
    engine.runner.now += schedule_delay
    assert engine.core.schedule_delay() == pytest.approx(0)
    assert engine.runner.now + MARGIN < engine.runner.free_at


def test_arrival_during_the_delay_joins_the_next_step() -> None:
    engine = decoding(depth=2)
    engine.runner.now += engine.core.schedule_delay() / 2
    name = engine.add(40, 2)
    num_steps = len(engine.records)
    while name not in engine.outputs:
        engine.step()
    first = next(record for record in engine.records if any(slot.request_id == name for slot in record.slots))
    assert first.step == engine.records[num_steps].step + 1  # after the one that was on the device


@pytest.mark.parametrize("case", ["depth 1", "idle", "a new size"])
def test_no_delay_where_it_would_not_help(case: str) -> None:
    engine = decoding(depth=1 if case == "depth 1" else 2)
    match case:
        case "idle":
            while engine.core.has_work:
                engine.step()
        case "a new size":
            engine = Timed(TokenBudget(MAX_TOKENS), 2)
            engine.add(900, 2)
            engine.step()
    assert engine.core.schedule_delay() == 0


@pytest.mark.parametrize("host", [0.0, 0.5, 2.0, 3.9])
def test_device_never_waits(host: float) -> None:
    """Steps take about 4 ms, and the host takes up to nearly as long for each."""
    engine = decoding(depth=2)
    engine.runner.host = host / 1000
    engine.step()  # the first that takes so long is a surprise
    engine.runner.num_gaps = 0
    for _ in range(100):
        engine.runner.now += engine.core.schedule_delay()
        engine.step()
    assert engine.runner.num_gaps == 0


def test_one_slow_step_does_not_make_the_next_one_late() -> None:
    engine = decoding(depth=2)
    usual = engine.core.schedule_delay()
    engine.runner.now += 1.0  # somebody else had the machine
    engine.step()
    assert 0 < engine.core.schedule_delay() <= usual + 1e-9


class Script:
    """Replaces the sockets: the messages that arrive, and when."""

    def __init__(self, *messages: ToEngine) -> None:
        self.queue = deque(messages)
        self.later: deque[ToEngine] = deque()  # one comes in each wait
        self.waits: list[float] = []
        self.sent: list[Message] = []

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def receive(self, wait: bool) -> ToEngine | None:  # noqa: ARG002
        return self.queue.popleft() if self.queue else None

    def wait(self, seconds: float) -> bool:
        if seconds <= 0:
            return False
        self.waits.append(seconds)
        if not self.later:
            return False
        self.queue.append(self.later.popleft())
        return True


def test_engine_process_takes_messages_while_it_waits() -> None:
    engine = decoding(depth=2)
    link = Script()
    added = make_request([1, 2, 3], 2)
    link.later.extend((Ack(0), Add(1, added.spec), Stop()))
    EngineLoop(engine.core, link).run()  # type: ignore[arg-type]
    assert len(link.waits) == 3
    assert engine.core.scheduler.pool.num_waiting == 1, "it came before the step was scheduled"
    assert len(engine.records) == 5, "no step was made meanwhile"


class Preparation:
    """A preparation of requests that is over when the test says so."""

    def __init__(self, pending: bool) -> None:
        self.future: Future[None] | None = Future() if pending else None

    def __call__(self, request: Request) -> Future[None] | None:  # noqa: ARG002
        return self.future


def test_steps_do_not_wait_for_a_request_that_is_being_prepared() -> None:
    engine, link = decoding(depth=1), Script()
    engine.core.prepare = preparation = Preparation(pending=True)
    num_steps = len(engine.records)
    loop = EngineLoop(engine.core, link)  # type: ignore[arg-type]
    loop._handle(Add(1, make_request([1, 2, 3], 2).spec))
    for _ in range(3):
        loop._add_prepared()
        engine.step()
    assert len(engine.records) == num_steps + 3
    assert engine.core.scheduler.pool.num_waiting == 0
    assert preparation.future is not None
    preparation.future.set_result(None)
    loop._add_prepared()
    assert engine.core.scheduler.pool.num_waiting == 1


def test_request_can_be_aborted_while_it_is_being_prepared() -> None:
    engine, link = FakeEngine(), Script()
    engine.core.prepare = preparation = Preparation(pending=True)
    link.later.extend((Add(1, make_request([1, 2, 3], 2).spec), Abort(2, 1, "abort"), Stop()))
    EngineLoop(engine.core, link).run()  # type: ignore[arg-type]
    assert not engine.core.has_work
    assert preparation.future is not None
    assert preparation.future.cancelled()
    (sent,) = link.sent
    assert isinstance(sent, StepOutputs)
    assert [reply.call for reply in sent.replies] == [1, 2]


async def test_engine_in_a_thread_answers_while_it_waits() -> None:
    engine = FakeEngine(num_blocks=8192)
    client = InprocClient(engine.core, engine.facts)
    with held_steps(client):
        await client.add(make_request([1, 2, 3], 4))
        for _ in range(3):
            stats = await asyncio.wait_for(client.stats(), 30)
            assert stats.num_steps == 0
    await until(lambda: engine.core._num_steps)
    await client.close()
