"""The recorder writes down what every slot did in every step, whatever happens, within its limit of memory."""

from __future__ import annotations

import itertools
import logging

import pytest
from hypothesis import settings
from hypothesis.stateful import invariant

from inflight.events import Delta
from inflight.request import RequestOrigin
from inflight.scheduling.batch import Batch, ScheduledStep
from inflight.scheduling.scheduler import NoSpeculation
from inflight.timeline import recorder as recorder_module
from inflight.timeline.chunk_json import chunk_json
from inflight.timeline.chunks import COLUMNS, RecordedRequest, SlotKind, TimelineQuery, decode_chunk
from inflight.timeline.open_runs import OpenRuns, StepOutcome
from inflight.timeline.recorder import Recorder
from inflight.timeline.steps import read_chunks, recorded_steps
from tests.scheduling.guessing import guessing
from tests.scheduling.test_machine import EngineMachine
from tests.support.requests import FakeEngine, make_request
from tests.timeline.cells import NaiveRecorder, cells_of, chunks_of


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


def recording(engine: FakeEngine, **options: int) -> Recorder:
    recorder = Recorder(engine.scheduler.limits, engine.num_blocks, engine.block_size, **options)
    engine.core.recorder = recorder
    return recorder


class RecordedMachine(EngineMachine):
    """The state machine of the scheduler's tests, with a recorder that is watched now and then."""

    recorder: NaiveRecorder | None = None

    @invariant()
    def runs_are_the_cells(self) -> None:
        engine = self.engine
        if self.recorder is None:
            self.recorder = NaiveRecorder(engine.scheduler.limits, engine.num_blocks, engine.block_size)
            engine.core.recorder = self.recorder
            self.num_watched = 0
            self.watched: list[bytes] = []
            self.watched_from = 0
            return
        chunks = chunks_of(self.recorder)
        assert cells_of(run for chunk in chunks for run in chunk.runs()) == sorted(self.recorder.cells)
        described = {info.number for chunk in chunks for info in chunk.requests}
        assert described >= {cell.request for cell in self.recorder.cells}
        for before, after in itertools.pairwise(chunks):
            assert (before.end_step, before.end_event) == (after.first_step, after.first_event)
        self._check_watched()

    def _check_watched(self) -> None:
        """Take what a viewer would get, and let others come and go."""
        assert self.recorder is not None
        data = self.recorder.take()
        if data is not None:
            self.watched.append(data)
        runs = [run for part in self.watched for run in decode_chunk(part).runs()]
        if self.recorder.is_watched:
            expected = [cell for cell in self.recorder.cells if cell.step >= self.watched_from]
            assert cells_of(runs) == sorted(expected)
        self.num_watched += 1
        if self.num_watched % 7 == 0:
            is_watched = self.recorder.is_watched
            self.recorder.watch(not is_watched)
            self.watched = []
            steps = [cell.step for cell in self.recorder.cells]
            self.watched_from = max(steps, default=-1) + 1


TestRecordedMachine = RecordedMachine.TestCase
TestRecordedMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_steady_decoding_is_one_run_per_slot() -> None:
    engine = FakeEngine(num_blocks=200)
    recorder = recording(engine)
    for index in range(4):
        engine.add(make_request([index, 1, 2], 40))
    engine.run()
    (chunk,) = chunks_of(recorder)
    runs = list(chunk.runs())
    assert len(runs) == 8, "a prefill and a run of decodes for each"
    decodes = [run for run in runs if run.kind == SlotKind.DECODE]
    assert all((run.num_steps, run.outputs, run.first_token) == (39, 39, 3) for run in decodes)
    prefills = [run for run in runs if run.kind == SlotKind.PREFILL]
    assert all((run.num_steps, run.tokens_per_step, run.outputs) == (1, 3, 1) for run in prefills)


def test_decodes_with_accepted_drafts_are_one_run() -> None:
    engine = FakeEngine(num_blocks=200, speculation=guessing(1.0, most=2, full=True))
    recorder = recording(engine)
    engine.add(make_request([1, 2, 3], 12))
    engine.run()
    (chunk,) = chunks_of(recorder)
    prefill, decodes = chunk.runs()
    assert (prefill.kind, prefill.num_steps, prefill.outputs) == (SlotKind.PREFILL, 1, 1)
    assert (decodes.kind, decodes.num_steps, decodes.outputs) == (SlotKind.DECODE, 4, 11)
    assert (decodes.first_token, list(decodes.counts)) == (3, [3, 0, 3, 0, 3, 0, 2, 0])
    steps = list(recorded_steps(read_chunks(engine.core.read_timeline, TimelineQuery(0.0))))
    assert [(step.slots[0].start, step.slots[0].num_outputs) for step in steps[1:]] == [
        (3, 3),
        (6, 3),
        (9, 3),
        (12, 2),
    ]
    part = decodes.after(chunk.first_step + 2)
    assert part is not None
    assert (part.first_token, part.outputs, list(part.counts)) == (6, 8, [3, 0, 3, 0, 2, 0])


def test_steps_with_one_token_need_no_counts() -> None:
    engine = FakeEngine(num_blocks=200, speculation=guessing(1.0, most=2, full=True))
    recorder = recording(engine)
    engine.add(make_request([1, 2, 3], 30))
    for _ in range(4):
        engine.step()
    engine.scheduler.speculation = NoSpeculation()
    engine.run()
    (chunk,) = chunks_of(recorder)
    _, decodes = chunk.runs()
    assert decodes.outputs == 29
    assert list(decodes.counts) == [3, 0] * 3
    assert decodes.num_steps == 3 + 20
    assert decodes.token_at(decodes.first_step + decodes.num_steps) == decodes.first_token + 29


def test_accepted_and_refused_drafts_are_recorded_by_entry_and_step() -> None:
    engine = FakeEngine(num_blocks=200, speculation=guessing(0.6))
    recorder = NaiveRecorder(engine.scheduler.limits, engine.num_blocks, engine.block_size)
    engine.core.recorder = recorder
    for index in range(4):
        engine.add(make_request([index, 1, 2], 40))
    engine.run()
    (chunk,) = chunks_of(recorder)
    decodes = [run for run in chunk.runs() if run.kind == SlotKind.DECODE]
    assert [(run.first_token + run.outputs, run.counts != ()) for run in decodes] == [(42, True)] * 4
    cells = {(cell.step, cell.slot): cell for cell in recorder.cells}
    assert {(cell.outputs, cell.refused) for cell in cells.values()} >= {(1, 0), (1, 3), (2, 1), (4, 0)}
    for step in recorded_steps(read_chunks(engine.core.read_timeline, TimelineQuery(0.0))):
        for slot in step.slots:
            cell = cells[step.number, slot.slot]
            assert (slot.num_outputs, slot.num_refused) == (cell.outputs, cell.refused)


def test_drafts_among_the_tokens_of_an_entry_move_no_position() -> None:
    runs: list[tuple[int, ...]] = []
    request = make_request([1, 2, 3], 40)
    info = RecordedRequest(0, "r", 3, 0, 0.0)
    open_runs = OpenRuns(lambda _: info, lambda run, end, outputs: runs.append(run.numbers(end, outputs)))

    def step(number: int, start: int, count: int, token_ids: list[int], refused: int = 0) -> None:
        drafts = {0: [0] * (len(token_ids) - 1 + refused)} if number else {}
        request.token_ids += token_ids
        num_outputs = len(token_ids)
        batch = Batch(number, [0], [start], [count], [True], num_tokens=count, drafts=drafts)
        delta = Delta(request.request_id, token_ids)
        outcome = StepOutcome([delta], (), num_outputs, num_outputs > 1, {0: refused} if refused else {})
        open_runs.record(ScheduledStep(batch, [request]), number, outcome, ())

    step(0, 0, 3, [4])
    step(1, 3, 4, [5, 6], refused=2)  # three drafts: one is right
    step(2, 5, 1, [7])
    step(3, 6, 3, [8], refused=2)
    step(4, 7, 3, [9, 10, 11])
    (run,) = open_runs
    assert (run.first_step, run.first_token, run.next_token(5)) == (1, 3, 10)
    assert run.counts.tolist() == [2, 2, 1, 0, 1, 2, 3, 0]
    assert runs == [(0, 0, SlotKind.PREFILL, 0, 1, 3, 0, 1)]


def test_long_answers_keep_only_the_counts_of_the_last_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "CHUNK", recorder_module.CHUNK._replace(steps=8))
    engine = FakeEngine(num_blocks=200, speculation=guessing(0.6))
    recorder = recording(engine)
    engine.add(make_request([1, 2, 3], 300))
    num_kept = []
    while engine.core.has_work:
        engine.step()
        num_kept += [len(run.counts) for run in recorder._runs]
    assert max(num_kept) < 2 * 8
    runs = [run for chunk in chunks_of(recorder) for run in chunk.runs() if run.kind == SlotKind.DECODE]
    for run, after in itertools.pairwise(runs):
        assert run.token_at(after.first_step) == after.first_token
    assert runs[-1].first_token + runs[-1].outputs == 302


def test_steady_decoding_looks_at_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(num_blocks=200)
    recorder = recording(engine)
    for index in range(4):
        engine.add(make_request([index, 1, 2], 40))
    for _ in range(3):
        engine.step()

    def fail(*_: object) -> None:
        raise AssertionError("a step of decodes looked at its runs")

    monkeypatch.setattr(recorder._runs, "_extend", fail)
    monkeypatch.setattr(recorder, "_record_events", fail)
    for _ in range(30):
        engine.step()


@pytest.mark.parametrize("depth", [1, 2])
def test_only_requests_that_join_or_leave_are_looked_at(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    engine = FakeEngine(num_blocks=200, max_num_seqs=8, pipeline_depth=depth)
    recorder = recording(engine)
    for index in range(8):
        engine.add(make_request([index, 1, 2], 10 + 3 * index))
    for _ in range(4):
        engine.step()
    looked_at: list[str] = []
    extend = recorder._runs._extend

    def counting(request: object, *args: object) -> None:
        looked_at.append(request.request_id)  # type: ignore[attr-defined]
        extend(request, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(recorder._runs, "_extend", counting)
    while engine.core.has_work and len(engine.core.scheduler.pool.running) > 4:
        engine.step()
    assert looked_at == []
    late = engine.add(make_request([9, 9], 5))
    engine.step()
    engine.step()
    engine.step()
    assert set(looked_at) == {late.request_id}


def test_chunks_close_after_their_steps_and_join_without_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "CHUNK", recorder_module.CHUNK._replace(steps=8))
    engine = FakeEngine()
    recorder = recording(engine)
    engine.add(make_request([1, 2], 30))
    engine.run()
    chunks = chunks_of(recorder)
    assert [chunk.num_steps for chunk in chunks] == [8, 8, 8, 6]
    assert all(len(chunk.column(name)) == chunk.num_steps for chunk in chunks for name in COLUMNS)
    assert sum(sum(chunk.column("output")) for chunk in chunks) == 30
    assert [chunk.requests[0].number for chunk in chunks] == [0, 0, 0, 0], "each chunk stands on its own"
    tokens = [run.first_token for chunk in chunks for run in chunk.runs() if run.kind == SlotKind.DECODE]
    assert tokens == [2, 9, 17, 25]


def test_chunks_close_after_their_events_and_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = recorder_module.CHUNK._replace(events=9, runs=6)
    monkeypatch.setattr(recorder_module, "CHUNK", limits)
    engine = FakeEngine(num_blocks=200, max_num_seqs=4)
    recorder = recording(engine)
    for index in range(40):
        engine.add(make_request([index, 2], 1 + index % 5))
    engine.run()
    chunks = chunks_of(recorder)
    assert sum(len(chunk.events) for chunk in chunks) == 120
    most = 2 * 4  # that a step can add: four requests leave and four join
    assert all(len(chunk.events) < limits.events + most for chunk in chunks)
    assert all(len(list(chunk.runs())) < limits.runs + most + 4 for chunk in chunks), "and the open runs"


def test_requests_that_wait_are_described_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "MAX_DESCRIBED", 10)
    monkeypatch.setattr(recorder_module, "CHUNK", recorder_module.CHUNK._replace(events=8))
    engine = FakeEngine(max_num_seqs=1)
    recorder = recording(engine)
    for index in range(45):
        engine.add(make_request([index], 3))
    engine.step()
    snapshots = [decode_chunk(data) for _, data in recorder.page(TimelineQuery(float("inf"))).chunks]
    assert {info.number for chunk in snapshots for info in chunk.requests} >= set(range(45))
    assert all(len(chunk.requests) < 20 for chunk in snapshots)
    assert {chunk.end_event for chunk in snapshots} == {46}, "45 arrived, one was admitted"


def test_ring_drops_its_oldest_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "CHUNK", recorder_module.CHUNK._replace(steps=4))
    engine = FakeEngine(num_blocks=200)
    recorder = recording(engine, max_bytes=4000)
    engine.add(make_request([1, 2], 400))
    engine.run()
    assert recorder.num_bytes <= 4000
    chunks = chunks_of(recorder)
    assert 1 < len(chunks) < 20
    assert chunks[-1].end_step == 400


def test_pages_are_bounded_and_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "CHUNK", recorder_module.CHUNK._replace(steps=4))
    monkeypatch.setattr(recorder_module, "PAGE_BYTES", 1000)
    engine = FakeEngine(num_blocks=200)
    recorder = recording(engine)
    engine.add(make_request([1, 2], 100))
    engine.run()
    page = recorder.page(TimelineQuery(0.0))
    assert sum(len(data) for _, data in page.chunks) < 2000
    assert page.positions
    chunks = chunks_of(recorder)
    assert sum(chunk.num_steps for chunk in chunks) == 100


def test_reading_since_a_moment_leaves_out_earlier_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "CHUNK", recorder_module.CHUNK._replace(steps=4))
    engine = FakeEngine(num_blocks=200)
    recorder = recording(engine)
    engine.add(make_request([1, 2], 40))
    engine.run()
    everything = chunks_of(recorder)
    middle = everything[5].times[0]
    assert next(chunk.first_step for chunk in chunks_of(recorder, middle)) <= everything[5].first_step
    assert len(chunks_of(recorder, middle)) < len(everything)


def test_idle_viewer_learns_what_was_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "UNTAKEN", recorder_module.UNTAKEN._replace(steps=10))
    engine = FakeEngine(num_blocks=200)
    recorder = recording(engine)
    recorder.watch(True)
    request = engine.add(make_request([1, 2], 25))
    engine.run()
    data = recorder.take()
    assert data is not None
    chunk = decode_chunk(data)
    assert (chunk.skipped, chunk.first_step, chunk.num_steps) == (20, 20, 5)
    assert [info.request_id for info in chunk.requests] == [request.request_id]


def test_events_tell_the_life_of_a_request() -> None:
    engine = FakeEngine()
    recorder = recording(engine)
    first = engine.add(make_request([1, 2, 3, 4, 5], 3))
    engine.run()
    second = engine.add(make_request([1, 2, 3, 4, 5], 30))
    engine.step()
    engine.take(engine.core.abort(second.request_id)[1])
    third = engine.add(make_request([7], 30))
    engine.step()
    engine.take(engine.core.abort(third.request_id, "stop")[1])
    events = [
        (event.type, event.request, event.reason, event.cached)
        for chunk in chunks_of(recorder)
        for event in chunk.events
    ]
    numbers = [request.record.number for request in (first, second, third)]
    assert numbers == [0, 1, 2]
    assert events == [
        ("arrive", 0, "", 0),
        ("admit", 0, "", 0),
        ("finish", 0, "length", 0),
        ("arrive", 1, "", 0),
        ("admit", 1, "", 4),
        ("abort", 1, "abort", 0),
        ("arrive", 2, "", 0),
        ("admit", 2, "", 0),
        ("finish", 2, "stop", 0),
    ]


def test_numbers_of_a_restarted_engine_are_new() -> None:
    engine = FakeEngine()
    recorder = recording(engine, generation=2)
    request = engine.add(make_request([1, 2], 3))
    engine.run()
    (chunk,) = chunks_of(recorder)
    assert request.record.number == chunk.first_step == 20_000_000_000


def test_json_hides_the_requests_of_others() -> None:
    engine = FakeEngine()
    recorder = recording(engine)
    origin = RequestOrigin("chatcmpl-1", 1, "team-a", "/v1/chat/completions", "Hello")
    engine.add(make_request([1, 2], 3, origin=origin))
    engine.add(make_request([1, 2], 3, origin=RequestOrigin("chatcmpl-2", 0, "team-b")))
    engine.run()
    (chunk,) = chunks_of(recorder)
    known: set[int] = set()
    data = chunk_json(chunk, "3", 1000.0, known, visible={0})
    assert data["replica"] == "3"
    assert data["requests"] == [
        {
            "number": 0,
            "arrived": pytest.approx(1000.0, abs=0.01),
            "id": "chatcmpl-1",
            "answer": 1,
            "key": "team-a",
            "route": "/v1/chat/completions",
            "prompt_tokens": 2,
            "priority": 0,
            "text": "Hello",
        }
    ]
    assert data["steps"]["step"] == [0, 1, 2]
    assert data["steps"]["others"] == [1, 1, 1]
    assert {run.request for run in data["runs"]} == {event["request"] for event in data["events"]} == {0}
    assert known == set(), "it has ended"
    everything = chunk_json(chunk, "3", 1000.0, set())
    assert everything["steps"]["others"] == [0, 0, 0]
    assert {item["number"] for item in everything["requests"]} == {0, 1}


def test_failed_steps_are_recorded_with_their_message() -> None:
    engine = FakeEngine()
    recorder = recording(engine)
    engine.add(make_request([1, 2], 3))
    engine.add(make_request([3, 4], 3))
    engine.step()

    def broken(_: object) -> None:
        raise RuntimeError("boom")

    collect = engine.runner.collect
    engine.runner.collect = broken  # type: ignore[method-assign,assignment]
    engine.step()
    engine.runner.collect = collect  # type: ignore[method-assign]
    engine.run()
    (chunk,) = chunks_of(recorder)
    assert list(chunk.failed) == [1]
    assert "RuntimeError" in chunk.failed[1]
    assert chunk_json(chunk, "0", 0.0, set(), visible=set())["failed"] == {"1": "the step failed"}
    reasons = [event.reason for event in chunk.events if event.type == "preempt"]
    assert reasons[:2] == ["failure", "failure"]
    assert chunk.column("output")[1] == 0


def test_recorder_that_fails_does_not_break_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    recorder = recording(engine)
    request = engine.add(make_request([1, 2], 6))
    engine.step()

    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(recorder, "step", broken)
    engine.run()
    assert len(engine.outputs[request.request_id]) == 6
    assert not isinstance(engine.core.recorder, Recorder)
    assert engine.core.read_timeline(TimelineQuery(0.0)).chunks == []
