"""The engine loop: pipelining, records and failed steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest

from inflight.errors import DeviceLostError, QueueFullError
from inflight.events import PositionLogprobs, RequestFailure, TokenLogprob, pack_logprobs, unpack_logprobs
from inflight.request import Request
from inflight.sampling_params import SamplingParams
from inflight.scheduling.batch import Batch, Sampled, ScheduledStep
from inflight.scheduling.policies.continuous import Continuous
from inflight.scheduling.policy import Policy
from tests.support.fake_runner import expected_tokens
from tests.support.requests import FakeEngine, make_request


@pytest.mark.parametrize("depth", [1, 2])
def test_pipeline_depth_is_the_number_of_steps_in_flight(depth: int) -> None:
    engine = FakeEngine(pipeline_depth=depth)
    engine.add(make_request([1, 2], 5))
    launched: list[int] = []
    collected: list[int] = []
    launch, collect = engine.runner.launch, engine.runner.collect

    def counting_launch(batch: Batch) -> Sampled:
        launched.append(batch.step)
        return launch(batch)

    def counting_collect(handle: Sampled) -> Sampled:
        collected.append(len(launched))
        return collect(handle)

    engine.runner.launch = counting_launch  # type: ignore[method-assign]
    engine.runner.collect = counting_collect  # type: ignore[method-assign]
    engine.run()
    assert collected[0] == depth
    assert len(collected) == len(launched) == 5, "no step beyond max_tokens is launched at any depth"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("where", ["launch", "collect"])
def test_failed_step_ends_the_request_that_was_alone_in_it(depth: int, where: str) -> None:
    engine = FakeEngine(pipeline_depth=depth, max_num_seqs=1)
    first, second = (engine.add(make_request([index] * 6, 8)) for index in range(2))
    original = getattr(engine.runner, where)
    calls = 0

    def broken(argument: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("device lost")
        return original(argument)

    setattr(engine.runner, where, broken)
    engine.run()
    assert engine.finished[first.request_id].finish_reason == "error"
    assert "RuntimeError" in (engine.finished[first.request_id].error or "")
    assert engine.outputs[second.request_id] == expected_tokens([1] * 6, 8)
    assert engine.scheduler.pool.usage().num_used == 0


@pytest.mark.parametrize("where", ["launch", "collect"])
def test_lost_device_stops_the_loop(where: str) -> None:
    """The error reaches the caller of the loop: a new process may have more luck, another step will not."""
    engine = FakeEngine()
    engine.add(make_request([1, 2], 5))

    def lost(_: object) -> None:
        raise DeviceLostError("gone")

    setattr(engine.runner, where, lost)
    with pytest.raises(DeviceLostError, match="gone"):
        engine.run()


@pytest.mark.parametrize("error", [DeviceLostError("gone"), RuntimeError("out of memory")])
def test_lost_engine_can_be_closed(error: Exception) -> None:
    """Steps are in flight that will never end, or that fail."""
    engine = FakeEngine(pipeline_depth=3)
    engine.add(make_request([1, 2], 5))
    engine.core.step()
    engine.core.step()

    def lost(_: object) -> None:
        raise error

    engine.runner.collect = lost  # type: ignore[method-assign,assignment]
    engine.core.close()
    assert not engine.runner.rows


def test_device_lost_behind_a_failed_step_stops_the_loop() -> None:
    engine = FakeEngine(pipeline_depth=2)
    engine.add(make_request([1, 2], 5))
    errors = iter([RuntimeError("first"), DeviceLostError("gone")])

    def lost(_: object) -> None:
        raise next(errors)

    engine.runner.collect = lost  # type: ignore[method-assign,assignment]
    with pytest.raises(DeviceLostError, match="gone"):
        engine.run()


def test_others_survive_a_failed_step_with_their_tokens() -> None:
    """A request outside the failed batch keeps what it has and computes its memory anew."""
    engine = FakeEngine(max_num_seqs=4, max_num_batched_tokens=4)
    early = engine.add(make_request([1] * 3, 12))
    for _ in range(3):
        engine.step()
    late = engine.add(make_request([2] * 30, 2))
    engine.step()
    step = ScheduledStep(Batch(99), [late])
    engine.take(engine.scheduler.fail(step, "boom", 0.0))
    last = engine.finished[late.request_id]
    assert (last.error, last.error_code) == ("boom", "step_failed")
    engine.run()
    assert engine.outputs[early.request_id] == expected_tokens([1] * 3, 12)
    assert early.record.num_preemptions == 1


NOT_FINITE = RequestFailure("logits_not_finite", "logits are not finite")


def test_failed_entry_ends_only_its_request() -> None:
    engine = FakeEngine()
    bad, good = engine.add(make_request([1], 4)), engine.add(make_request([2], 4))
    collect = engine.runner.collect

    def poisoned(handle: Sampled) -> Sampled:
        result = collect(handle)
        return Sampled(result.token_ids, errors={0: NOT_FINITE} if len(result.token_ids) == 2 else {})

    engine.runner.collect = poisoned  # type: ignore[method-assign]
    engine.run()
    last = engine.finished[bad.request_id]
    assert last.finish_reason == "error"
    assert (last.error, last.error_code) == ("logits are not finite", "logits_not_finite")
    assert engine.outputs[good.request_id] == expected_tokens([2], 4)


def test_full_queue_rejects_requests() -> None:
    engine = FakeEngine(max_num_seqs=1)
    engine.core.max_queue = 2
    for index in range(3):  # one can run at once
        engine.add(make_request([index]))
    with pytest.raises(QueueFullError, match=r"max_queue is 2, plus 1 .* \(max_num_seqs\)"):
        engine.core.add(make_request([9]))
    engine.step()
    with pytest.raises(QueueFullError, match=r"2 requests are waiting, and max_queue is 2; each"):
        engine.core.add(make_request([9]))
    engine.run()


def test_free_rows_extend_the_queue_unless_another_resource_is_short() -> None:
    engine = FakeEngine(max_num_seqs=8, num_blocks=4, block_size=4)
    engine.core.max_queue = 1
    requests = [engine.add(make_request([index] * 12, 4)) for index in range(3)]
    engine.step()
    assert engine.core.stats().num_waiting == 2  # memory is short, so free rows do not help
    with pytest.raises(QueueFullError, match="2 requests are waiting"):
        engine.core.add(make_request([9]))
    for request in requests:
        engine.core.abort(request.request_id)
    for index in range(9):  # nothing is known to be short any more
        engine.add(make_request([index]))
    with pytest.raises(QueueFullError):
        engine.core.add(make_request([9]))
    engine.run()


def test_every_step_has_a_record() -> None:
    engine = FakeEngine(max_num_batched_tokens=8)
    request = engine.add(make_request(list(range(12)), 3))
    engine.run()
    slots = [record.slots[0] for record in engine.records]
    assert [(slot.start, slot.num_tokens, slot.samples, slot.decodes) for slot in slots] == [
        (0, 8, False, False),
        (8, 4, True, False),
        (12, 1, True, True),
        (13, 1, True, True),
    ]
    assert engine.records[0].admitted_ids == (request.request_id,)
    assert engine.records[-1].finished_ids == (request.request_id,)
    kv = engine.records[1].kv
    assert (kv.num_used, kv.num_tokens, kv.waste) == (3, 12, 0.0)
    record = engine.finished[request.request_id].record
    assert record is not None
    assert record.first_token_at is not None
    assert record.finished_at is not None
    assert record.arrived_at < record.first_token_at < record.finished_at
    assert (record.num_prompt_tokens, record.num_output_tokens) == (12, 3)


def test_prompt_logprobs_arrive_once_and_survive_preemption() -> None:
    """Chunks give them piece by piece; a preempted prompt starts over without doubling them."""
    engine = FakeEngine(max_num_batched_tokens=4, num_blocks=16)
    params = SamplingParams(prompt_logprobs=0, max_tokens=2)
    request = engine.add(make_request(list(range(9)), 2, params=params))
    launch = engine.runner.launch

    def with_logprobs(batch: Batch) -> Sampled:
        result = launch(batch)
        for index, (start, count) in enumerate(zip(batch.starts, batch.counts, strict=True)):
            last = min(start + count, 8)
            logprobs: list[PositionLogprobs] = [
                pack_logprobs([TokenLogprob(i, -1.0, 1)]) for i in range(start + 1, last + 1)
            ]
            if logprobs:
                result.prompt_logprobs[index] = logprobs
        return result

    engine.runner.launch = with_logprobs  # type: ignore[method-assign]
    engine.step()
    assert len(request.prompt_logprobs) == 5
    engine.scheduler._preempt(request, ScheduledStep(Batch(0)), "memory")
    deltas = [delta for _ in range(8) for delta in engine.core.step()]
    kept = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs]
    assert len(kept) == 1
    assert [None if position is None else unpack_logprobs(position)[0].token_id for position in kept[0]] == [
        None,
        *range(1, 9),
    ]


def test_prompt_logprobs_of_a_prompt_preempted_with_its_last_chunk_in_flight() -> None:
    engine = FakeEngine(pipeline_depth=2, num_blocks=16)
    params = SamplingParams(prompt_logprobs=0, max_tokens=3)
    request = engine.add(make_request([1, 2, 3], 3, params=params))
    launch = engine.runner.launch

    def with_logprobs(batch: Batch) -> Sampled:
        result = launch(batch)
        if batch.starts[0] == 0:
            result.prompt_logprobs[0] = [pack_logprobs([TokenLogprob(i, -1.0, 1)]) for i in (2, 3)]
        return result

    engine.runner.launch = with_logprobs  # type: ignore[method-assign]
    assert engine.core.step() == [], "the prompt is in flight"
    engine.scheduler._preempt(request, ScheduledStep(Batch(0)), "memory")
    deltas = [delta for _ in range(8) for delta in engine.core.step()]
    kept = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs]
    assert [
        [position and unpack_logprobs(position)[0].token_id for position in positions] for positions in kept
    ] == [[None, 2, 3]]


def test_finished_request_stays_finished_when_its_surplus_step_fails() -> None:
    answer = expected_tokens([1, 2, 3], 10)
    engine = FakeEngine("static", pipeline_depth=2, num_blocks=64)
    stopped = engine.add(make_request([1, 2, 3], 10, stop_ids=frozenset({answer[4]})))
    other = engine.add(make_request([7], 12))
    collect, calls = engine.runner.collect, 0

    def broken(handle: Sampled) -> Sampled:
        nonlocal calls
        calls += 1
        if calls == 6:  # the step that computes a token after the stop
            raise RuntimeError("device lost")
        return collect(handle)

    engine.runner.collect = broken  # type: ignore[method-assign]
    engine.run()
    assert engine.finished[stopped.request_id].finish_reason == "stop"
    assert engine.outputs[stopped.request_id] == answer[:5]
    assert engine.outputs[other.request_id] == expected_tokens([7], 12)


def test_preemptions_of_an_empty_schedule_are_recorded() -> None:
    class Turns(Policy):
        """Preempts the younger of two requests as soon as another waits."""

        def yields(self, running: Sequence[Request]) -> Sequence[Request]:
            return running[1:]

    engine = FakeEngine(Turns, max_num_seqs=2, pipeline_depth=2)
    requests = [engine.add(make_request([index] * 4, 6)) for index in range(3)]
    engine.run()
    preemptions = [one for record in engine.records for one in record.preempted]
    assert len(preemptions) == sum(request.record.num_preemptions for request in requests) > 0
    assert engine.core.stats().num_preemptions == len(preemptions)
    assert {one.reason for one in preemptions} == {"policy"}


def test_next_step_records_preemptions_of_an_empty_schedule() -> None:
    engine = FakeEngine(partial(Continuous, headroom=0), num_blocks=2, block_size=4, caching=False)
    first, second = (engine.add(make_request([index] * 4, 3)) for index in range(2))
    engine.step()
    first.num_tokens = first.num_computed  # as if all of its tokens were computed: it needs nothing
    engine.scheduler.pool.running.sort(key=lambda request: -request.arrival)
    assert engine.scheduler.schedule(0.0) is None
    first.num_tokens += 1
    assert second.record.num_preemptions == 1
    assert engine.core.stats().num_preemptions == 1
    engine.run()
    preemptions = [one for record in engine.records for one in record.preempted]
    assert preemptions == [(second.request_id, "memory")]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("where", ["launch", "collect"])
def test_failed_step_has_a_record(depth: int, where: str) -> None:
    engine = FakeEngine(pipeline_depth=depth)
    requests = [engine.add(make_request([index] * 6, 4)) for index in range(2)]
    original = getattr(engine.runner, where)
    calls = iter([False, False, True])

    def broken(argument: object) -> object:
        if next(calls, False):
            raise RuntimeError("device lost")
        return original(argument)

    setattr(engine.runner, where, broken)
    engine.run()
    failed = [record for record in engine.records if record.error]
    assert [record.step for record in failed] == {1: [2], 2: [1, 2] if where == "launch" else [2, 3]}[depth]
    assert all(record.error == f"RuntimeError in step {2}" for record in failed)
    assert {slot.request_id for slot in failed[0].slots} == {request.request_id for request in requests}
    stats = engine.core.stats()
    assert stats.num_failed_steps == len(failed)
    assert stats.num_steps == len(engine.records) - len(failed)
    preemptions = [one for record in engine.records for one in record.preempted]
    assert stats.num_preemptions == len(preemptions) == sum(one.record.num_preemptions for one in requests)
    assert {one.request_id for one in preemptions if one.reason == "failure"} == {
        one.request_id for one in requests
    }


def test_record_of_a_failed_step_names_the_requests_it_ended() -> None:
    engine = FakeEngine()
    alone = engine.add(make_request([1], 4))
    engine.runner.launch = None  # type: ignore[assignment,method-assign]
    engine.run()
    assert [record.finished_ids for record in engine.records] == [(alone.request_id,)]
    assert engine.records[0].error == "TypeError in step 0"


@pytest.mark.parametrize("depth", [1, 2])
def test_records_have_the_times_of_a_step(depth: int) -> None:
    engine = FakeEngine(pipeline_depth=depth)
    for index in range(3):
        engine.add(make_request([index] * 3, 4))
        engine.step()
    engine.run()
    for record in engine.records:
        times = record.times
        assert times.scheduled_at < times.launched_at <= times.device_began_at
        assert times.device_began_at < times.finished_at < times.updated_at
    ends = [record.finished_at for record in engine.records]
    assert all(
        later.times.device_began_at >= end for end, later in zip(ends, engine.records[1:], strict=False)
    )
