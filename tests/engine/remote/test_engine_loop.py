"""The loop of an engine process: what it tells of itself, and that no message of one request ends those of others."""

from __future__ import annotations

import itertools
from collections import deque
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from inflight.engine.remote.engine_loop import CHECK_EVERY, STATS_EVERY, EngineLoop
from inflight.engine.remote.wire import Abort, Add, Describe, StepOutputs, ToEngine
from inflight.processes.channel import SECRET_LENGTH, Codec, RemoteError, Stop
from inflight.request import Request
from tests.support.fake_runner import expected_tokens
from tests.support.requests import FakeEngine, make_request


class Surprised:
    """A core that gets work while its clock is read."""

    def __init__(self) -> None:
        self.now, self.has_work, self.work_comes = 0.0, False, False

    def clock(self) -> float:
        self.has_work = self.work_comes
        return self.now

    def stats(self) -> None: ...


def test_new_work_does_not_count_as_stalled() -> None:
    core: Any = Surprised()
    sockets: Any = SimpleNamespace(send=lambda _: None, incoming=SimpleNamespace(num_dropped=0))
    loop = EngineLoop(core, sockets)
    core.now, core.work_comes = 100.0, True  # after a long rest
    assert not loop.heartbeat().working
    assert loop.heartbeat().working


class Wire:
    """The sockets of a loop: messages that wait for it, and the outputs it has sent.

    The loop receives `Stop` when no message is left and the engine has nothing to do.
    """

    def __init__(self, *messages: Any) -> None:
        self.messages = deque(messages)
        self.sent: list[StepOutputs] = []
        self.incoming = SimpleNamespace(num_dropped=0)

    def send(self, outputs: StepOutputs) -> None:
        self.sent.append(outputs)

    def wait(self, seconds: float) -> bool:
        return seconds >= CHECK_EVERY

    def receive(self, wait: bool) -> Any:
        if self.messages:
            return self.messages.popleft()
        return Stop() if wait else None

    @property
    def errors(self) -> dict[int, RemoteError | None]:
        """The error in the reply to each call, or None."""
        return {reply.call: reply.remote_error for outputs in self.sent for reply in outputs.replies}

    def tokens(self, handle: int) -> list[int]:
        token_ids: list[int] = []
        for outputs in self.sent:
            token_ids += [
                token
                for each, token in zip(outputs.handles, outputs.token_ids, strict=True)
                if each == handle
            ]
            for each, delta in outputs.deltas:
                token_ids += delta.token_ids if each == handle else []
        return token_ids


def run_loop(engine: FakeEngine, *messages: Any) -> Wire:
    wire: Any = Wire(*messages)
    EngineLoop(engine.core, wire).run()
    return wire  # type: ignore[no-any-return]


def add(call: int, prompt: list[int], **fields: Any) -> Add:
    return Add(call, make_request(prompt, 4, f"r{call}", **fields).spec)


PROMPT = [1, 2, 3]


def assert_served(wire: Wire, handle: int) -> None:
    assert wire.errors[handle] is None
    assert wire.tokens(handle) == expected_tokens(PROMPT, 4)


def test_request_that_cannot_be_prepared_ends_with_its_own_error() -> None:
    engine = FakeEngine()

    def prepare(request: Request) -> None:
        if request.request_id == "r1":
            raise RuntimeError("can't start new thread")

    engine.core.prepare = prepare
    wire = run_loop(engine, add(1, [9, 9]), add(2, PROMPT))
    error = wire.errors[1]
    assert error is not None
    assert error.text == "can't start new thread"
    assert_served(wire, 2)


@pytest.mark.parametrize("message", [Abort(7, 1, "abort"), Describe(7, 1)])
def test_failing_message_about_a_request_affects_no_other(
    message: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine()
    monkeypatch.setattr(engine.core, "abort", Mock(side_effect=ValueError("broken on purpose")))
    monkeypatch.setattr(engine.core, "describe", Mock(side_effect=ValueError("broken on purpose")))
    wire = run_loop(engine, add(1, PROMPT), add(2, PROMPT), message)
    error = wire.errors[7]
    assert error is not None
    assert error.text == "broken on purpose"
    assert_served(wire, 1)
    assert_served(wire, 2)


def test_unreadable_request_gets_an_error_reply() -> None:
    codec: Codec[Any] = Codec(b"s" * SECRET_LENGTH, ToEngine)
    frame = bytes(codec.encode(add(1, PROMPT)))
    tag, call, spec = msgspec.msgpack.decode(frame[SECRET_LENGTH:])
    odd = msgspec.msgpack.encode([tag, call, {**spec, "token_ids": b"123"}])
    unreadable = codec.decode_call(frame[:SECRET_LENGTH] + odd)
    assert codec.num_dropped == 1
    wire = run_loop(FakeEngine(), unreadable, add(2, PROMPT))
    error = wire.errors[1]
    assert error is not None
    assert "hold no token ids" in error.text
    assert_served(wire, 2)


def test_request_larger_than_memory_is_rejected_alone() -> None:
    engine = FakeEngine(num_blocks=8, block_size=4)
    wire = run_loop(engine, add(1, list(range(40))), add(2, PROMPT))
    error = wire.errors[1]
    assert error is not None
    assert "KV memory for 32" in error.text
    assert_served(wire, 2)


def test_requests_in_preparation_count_as_waiting() -> None:
    engine = FakeEngine(max_num_seqs=1)
    engine.core.max_queue = 2
    pending: list[Future[None]] = []

    def prepare(_: Request) -> Future[None]:
        pending.append(Future())
        return pending[-1]

    engine.core.prepare = prepare
    wire: Any = Wire(*(add(call, PROMPT) for call in range(1, 6)))
    loop = EngineLoop(engine.core, wire)
    loop._take_messages()
    assert len(pending) == 3  # one that can run, two in the queue
    for each in pending:
        each.set_result(None)
    loop.run()
    errors = wire.errors
    assert [call for call, error in errors.items() if error is not None] == [4, 5]
    assert errors[4].class_name == "QueueFullError"
    for call in (1, 2, 3):
        assert_served(wire, call)


def test_statistics_are_sent_while_a_prompt_is_computed() -> None:
    engine = FakeEngine(num_blocks=512, max_num_batched_tokens=8)
    ticks = itertools.count()
    engine.core.clock = lambda: next(ticks) * STATS_EVERY / 64
    wire = run_loop(engine, add(1, list(range(800))))
    quiet = [outputs for outputs in wire.sent if not (outputs.handles or outputs.deltas or outputs.replies)]
    stats = [outputs.stats for outputs in quiet if outputs.stats is not None]
    assert len(stats) == len(quiet) > 10
    assert all((each.num_running, each.num_output_tokens) == (1, 0) for each in stats)
    computed = [each.num_step_tokens for each in stats]
    assert computed == sorted(set(computed))
    steps = wire.sent[-1].stats
    assert steps is not None
    assert len(quiet) < steps.num_steps  # not with every step
