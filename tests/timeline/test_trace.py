"""The trace: read back, it has every output token of every request once, in order, on one slot at a time."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from inflight import LLM, SamplingParams
from inflight.request import Request, RequestOrigin
from inflight.timeline import recorder as recorder_module
from inflight.timeline.chunk_json import chunk_json
from inflight.timeline.recorder import Recorder
from inflight.timeline.trace import recording_of, trace_of, write_recording
from tests.scheduling.guessing import guessing
from tests.support.requests import FakeEngine, make_request
from tests.timeline.cells import chunks_of


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


def recording(recorder: Recorder, replica: str = "0") -> dict[str, Any]:
    known: set[int] = set()
    return recording_of([chunk_json(chunk, replica, 1e9, known) for chunk in chunks_of(recorder)])


def eventful_run(depth: int, odds: float | None = None) -> tuple[FakeEngine, Recorder, list[Request]]:
    """A run with little memory, which makes preemptions, with aborts, two answers each and a failed step."""
    engine = FakeEngine(
        num_blocks=14,
        block_size=4,
        max_num_seqs=6,
        max_num_batched_tokens=16,
        pipeline_depth=depth,
        speculation=None if odds is None else guessing(odds),
    )
    recorder = Recorder(engine.scheduler.limits, engine.num_blocks, engine.block_size)
    engine.core.recorder = recorder
    requests = []
    for index in range(8):
        for answer in range(2):
            origin = RequestOrigin(f"request-{index}", answer)
            prompt = [index, answer, *range(1 + index)]
            stop_ids = frozenset({3, 17}) if index % 3 == 0 else frozenset[int]()
            requests.append(engine.add(make_request(prompt, 6 + 3 * index, origin=origin, stop_ids=stop_ids)))
    collect, calls = engine.runner.collect, 0

    def failing(handle: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 12:
            raise RuntimeError("boom")
        return collect(handle)

    engine.runner.collect = failing  # type: ignore[method-assign]
    for step in range(1000):
        if not engine.core.has_work:
            break
        engine.step()
        if step in (7, 30):
            running = engine.scheduler.pool.running
            if running:
                engine.take(engine.core.abort(running[-1].request_id)[1])
    return engine, recorder, requests


@pytest.mark.parametrize(("depth", "odds"), [(1, None), (2, None), (1, 0.6)])
def test_trace_has_every_output_token_once_in_order_on_one_slot(
    depth: int, odds: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "CHUNK", recorder_module.CHUNK._replace(steps=16))
    engine, recorder, requests = eventful_run(depth, odds)
    assert engine.scheduler.pool.num_preemptions > 2
    assert engine.core.stats().num_failed_steps
    path = tmp_path / "run.json.gz"
    write_recording(recording(recorder), path)
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    slices = sorted((event for event in events if event["ph"] == "X"), key=lambda event: event["ts"])
    tokens: dict[int, list[int]] = {}
    busy_until: dict[int, float] = {}
    for event in slices:
        if event["cat"] not in ("decode", "prefill", "held"):
            continue
        args = event["args"]
        number, outputs = args["request"], args["outputs"]
        tokens.setdefault(number, []).extend(range(args["first_output"], args["first_output"] + outputs))
        assert event["ts"] >= busy_until.get(number, 0.0) - 0.01, "a request is on one slot at a time"
        busy_until[number] = event["ts"] + event["dur"]
    for request in requests:
        expected = list(range(len(engine.outputs[request.request_id])))
        assert tokens.get(request.record.number, []) == expected
    ended = {last.finish_reason for last in engine.finished.values()}
    assert {"stop", "length", "abort"} <= ended
    assert any(event["name"] == "step failed" for event in events)


@pytest.mark.parametrize("depth", [1, 2])
def test_trace_is_valid_chrome_json(depth: int) -> None:
    _, recorder, _ = eventful_run(depth)
    trace = json.loads(json.dumps(trace_of(recording(recorder))))
    assert trace["displayTimeUnit"] == "ms"
    tracks: dict[tuple[int, int], float] = {}
    spans: dict[str, list[str]] = {}
    for event in trace["traceEvents"]:
        assert {"ph", "name", "pid", "tid"} <= event.keys()
        assert event["ph"] in "XbeCiM"
        if event["ph"] != "M":
            assert event["ts"] >= 1e15
    for event in sorted((e for e in trace["traceEvents"] if e["ph"] == "X"), key=lambda e: e["ts"]):
        track = event["pid"], event["tid"]
        assert event["dur"] >= 0
        assert event["ts"] >= tracks.get(track, 0.0) - 0.01, "slices of a track do not overlap"
        tracks[track] = event["ts"] + event["dur"]
    for event in trace["traceEvents"]:
        if event["ph"] == "b":
            spans.setdefault(event["id"], []).append(event["name"])
        elif event["ph"] == "e":
            assert spans[event["id"]].pop() == event["name"], "spans are nested"
    assert not any(spans.values()), "every span ends"


def test_each_replica_is_a_process() -> None:
    _, recorder, _ = eventful_run(1)
    both = recording_of([*recording(recorder, "0")["chunks"], *recording(recorder, "1")["chunks"]])
    names = [
        event["args"]["name"] for event in trace_of(both)["traceEvents"] if event["name"] == "process_name"
    ]
    assert names == ["replica 0", "replica 1"]


@pytest.mark.parametrize("depth", [1, 2])
def test_causes_of_every_request_add_up_to_its_latency(depth: int) -> None:
    engine, recorder, _ = eventful_run(depth)
    events = [event for chunk in chunks_of(recorder) for event in chunk.events]
    arrived = {event.request: event.at for event in events if event.type == "arrive"}
    ended = {event.request: event.at for event in events if event.type in ("finish", "abort")}
    assert arrived.keys() == ended.keys()
    for last in engine.finished.values():
        assert last.record is not None
        latency = ended[last.record.number] - arrived[last.record.number]
        assert last.record.breakdown.total == pytest.approx(latency, rel=0.01)


def test_llm_writes_its_run_when_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "run.json.gz"
    with LLM(num_blocks=64, record=path, show_progress=False) as llm:
        llm.generate(
            ["Once upon a time", "The sea"], SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False
        )
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    outputs = sum(event["args"]["outputs"] for event in events if event.get("cat") in ("decode", "prefill"))
    assert outputs == 16


def test_recording_can_be_written_as_a_page(tmp_path: Path) -> None:
    _, recorder, requests = eventful_run(1)
    path = tmp_path / "run.html"
    write_recording(recording(recorder), path)
    text = path.read_text(encoding="utf-8")
    data = text.partition('id="recording">')[2].partition("</script>")[0]
    runs = [run for chunk in json.loads(data)["chunks"] for run in chunk["runs"]]
    assert {run[1] for run in runs} == {
        request.record.number for request in requests if request.record.admitted_at
    }
    assert "http" not in text.partition("<script")[0]
