"""Output for a client that does not keep up is merged, bounded and complete."""

from __future__ import annotations

from inflight.engine.remote.engine_loop import STATS_EVERY, WINDOW, Outbox
from inflight.engine.remote.wire import Reply, StepOutputs
from inflight.events import Delta, PositionLogprobs, TokenLogprob, pack_logprobs
from tests.support.requests import FakeEngine


class Sender:
    """An outbox whose StepOutputs are kept."""

    def __init__(self) -> None:
        self.outputs: list[StepOutputs] = []
        self.now = 0.0
        self.outbox = Outbox(self.outputs.append, FakeEngine().core.stats, lambda: self.now)
        for index in range(3):
            self.outbox.open(f"r{index}", 10 + index)

    def step(self, *deltas: Delta, idle: bool = False) -> None:
        self.outbox.put(list(deltas))
        self.outbox.flush(idle)

    def fill(self) -> None:
        for _ in range(WINDOW):
            self.step(Delta("r0", [0]))
        assert len(self.outputs) == WINDOW


def test_single_tokens_are_sent_as_columns() -> None:
    sender = Sender()
    logprobs: list[PositionLogprobs] = [pack_logprobs([TokenLogprob(5, -0.5, 1)])]
    others = [Delta("r1", [5], logprobs), Delta("r2", [6], finish_reason="length")]
    sender.step(Delta("r0", [4]), *others)
    (outputs,) = sender.outputs
    assert (outputs.handles, outputs.token_ids) == ([10], [4])
    assert outputs.deltas == list(zip((11, 12), others, strict=True))
    assert [sender.outbox.id_of(handle) for handle in (10, 12, 99)] == ["r0", None, None]


def test_several_tokens_are_sent_as_columns_too() -> None:
    sender = Sender()
    sender.step(Delta("r0", [4, 5, 6]), Delta("r1", [7]), Delta("r2", [8, 9]))
    sender.step(Delta("r0", [1]), Delta("r1", [2]))
    several, single = sender.outputs
    assert (several.deltas, several.handles) == ([], [10, 11, 12])
    assert (several.token_ids, several.counts) == ([4, 5, 6, 7, 8, 9], [3, 1, 2])
    assert list(several.tokens_of_handles()) == [[4, 5, 6], [7], [8, 9]]
    assert single.counts == []
    assert list(single.tokens_of_handles()) == [[1], [2]]


def test_nothing_is_sent_without_output() -> None:
    sender = Sender()
    sender.step()
    assert sender.outputs == []


def test_slow_client_gets_merged_deltas() -> None:
    sender = Sender()
    sender.fill()
    for token_id in range(1000):
        sender.step(Delta("r0", [token_id]))
    sender.step(Delta("r1", [7], finish_reason="length"))
    sender.outbox.reply(Reply(3))
    sender.outbox.flush(idle=True)
    assert len(sender.outputs) == WINDOW
    sender.outbox.taken(WINDOW // 2)
    sender.outbox.flush(idle=True)
    last = sender.outputs[-1]
    assert len(sender.outputs) == WINDOW + 1
    assert (last.handles, last.token_ids, last.counts) == ([10], [*range(1000)], [1000])
    assert [(handle, delta.token_ids, delta.finish_reason) for handle, delta in last.deltas] == [
        (11, [7], "length")
    ]
    assert last.replies == [Reply(3)]
    sender.step(Delta("r0", [1]))
    assert sender.outputs[-1].token_ids == [1]


def test_client_cannot_acknowledge_more_than_was_sent() -> None:
    sender = Sender()
    sender.outbox.taken(10**9)
    sender.fill()
    sender.step(Delta("r0", [1]))
    assert len(sender.outputs) == WINDOW


def test_reused_id_does_not_mix_with_unsent_deltas() -> None:
    sender = Sender()
    sender.fill()
    sender.step(Delta("r1", [1], finish_reason="abort"))
    sender.outbox.open("r1", 20)
    sender.step(Delta("r1", [2]))
    sender.outbox.taken(WINDOW)
    sender.outbox.flush(idle=False)
    last = sender.outputs[-1]
    assert [(handle, delta.token_ids) for handle, delta in last.deltas] == [(11, [1])]
    assert (last.handles, last.token_ids) == ([20], [2])


def test_statistics_are_sent_periodically_with_replies_and_when_idle() -> None:
    sender = Sender()
    sender.step(Delta("r0", [1]))
    sender.step(Delta("r0", [2]))
    sender.now = STATS_EVERY
    sender.step(Delta("r0", [3]))
    sender.outbox.reply(Reply(1))
    sender.step()
    sender.step(Delta("r0", [4]))
    sender.step(Delta("r0", [5]), idle=True)
    assert [outputs.stats is not None for outputs in sender.outputs] == [True, False, True, True, False, True]
