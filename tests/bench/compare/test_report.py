from __future__ import annotations

import json
from dataclasses import fields

import pytest

from inflight.bench.compare.arrivals import Arrival
from inflight.bench.compare.measure import Figures, measure
from inflight.bench.compare.report import Comparison, compare, summarise
from inflight.bench.compare.workload import Workload, build_jobs
from inflight.errors import EngineError
from inflight.loading.engine import LoadedEngine
from inflight.sampling_params import SamplingParams
from tests.bench.compare.conftest import NUM_REQUESTS, NUM_SLOTS


def test_strategies_produce_identical_tokens(engine: LoadedEngine) -> None:
    jobs = build_jobs(Workload(num_requests=12, max_tokens=40, seed=5), engine)
    runs = [measure(engine, jobs, name, 5) for name in ("sequential", "static", "continuous")]
    answers = [[request.token_ids for request in run.requests] for run in runs]
    assert answers[0] == answers[1] == answers[2]
    assert len({tuple(answer) for answer in answers[0]}) > 6  # the answers differ from each other
    assert summarise(runs, jobs, Workload(), "").identical_tokens
    runs[1].requests[3].token_ids[-1] += 1
    assert not summarise(runs, jobs, Workload(), "").identical_tokens


def test_strategies_differ_only_in_scheduling(comparison: Comparison) -> None:
    assert comparison.identical_tokens
    figures = {name: result.figures for name, result in comparison.results.items()}
    assert list(figures) == ["sequential", "static", "continuous"]
    assert len({item.num_output_tokens for item in figures.values()}) == 1
    # These follow from the schedule alone, on any machine.
    assert figures["sequential"].num_steps > figures["static"].num_steps > figures["continuous"].num_steps
    assert figures["sequential"].slot_use < figures["static"].slot_use < figures["continuous"].slot_use <= 1
    assert figures["static"].kv_waste > figures["continuous"].kv_waste
    assert comparison.results["continuous"].speedup == 1


def test_json_contains_every_figure_and_timeline(comparison: Comparison) -> None:
    report = json.loads(json.dumps(comparison.to_json()))
    assert report["num_requests"] == NUM_REQUESTS
    assert report["batch_size"] == NUM_SLOTS
    assert report["identical_tokens"] is True
    for name, result in comparison.results.items():
        figures = report["strategies"][name]
        assert set(figures) == {field.name for field in fields(Figures)} | {"speedup_of_reference"}
        assert figures["gpu_utilization"] is None
        timeline = report["timelines"][name]
        assert len(timeline["step_ends"]) == figures["num_steps"]
        assert timeline["pauses"] == []
        slots, _, _, firsts, lasts, tokens = zip(*timeline["spans"], strict=True)
        assert max(slots) < NUM_SLOTS
        assert min(firsts) == 0
        assert max(lasts) == figures["num_steps"]
        assert sum(tokens) == result.figures.num_output_tokens


def test_open_loop_waits_for_arrivals(engine: LoadedEngine) -> None:
    workload = Workload(4, Arrival(rate=30.0), max_tokens=3, seed=2)
    comparison = compare(engine, workload, ["continuous"], num_slots=2)
    times = workload.arrival.times(4, seed=2)
    timeline = comparison.timelines[0]
    # The first step cannot begin before the first request has arrived.
    assert timeline.begins[0] >= times[0]
    assert comparison.results["continuous"].figures.total_time >= times[-1]
    assert comparison.results["continuous"].figures.mean_ttft > 0
    assert comparison.reference == "continuous"
    assert comparison.to_json()["timelines"]["continuous"]["pauses"][0][0] == 0


def test_engine_core_is_replaced_only_when_idle(engine: LoadedEngine) -> None:
    core = engine.use(policy="continuous", max_num_seqs=3)
    assert core.scheduler.limits.max_num_seqs == 3
    core.add(engine.frontend.input_processor.requests("x", [5, 6, 7], SamplingParams(max_tokens=2))[1][0])
    with pytest.raises(EngineError, match="can only be changed while it is idle"):
        engine.use(policy="static")
    core.abort("x")
    replaced = engine.use(policy="static")
    assert replaced is engine.core
    assert replaced is not core
    assert not core.runner.cache.lanes  # type: ignore[attr-defined]  # its memory was freed


def test_last_strategy_is_the_reference_without_continuous(engine: LoadedEngine) -> None:
    comparison = compare(
        engine, Workload(3, lengths="ragged", max_tokens=4), ["sequential", "fair"], num_slots=2
    )
    assert comparison.reference == "fair"
    assert comparison.results["fair"].speedup == 1
