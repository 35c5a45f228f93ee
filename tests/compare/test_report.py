from __future__ import annotations

import json
from dataclasses import fields

import pytest

from inflight.compare.figures import Figures
from inflight.compare.measure import measure
from inflight.compare.report import Comparison, compare, summarise
from inflight.compare.workload import Arrival, Workload, build_jobs
from inflight.errors import EngineError
from inflight.loading import LoadedEngine
from inflight.sampling_params import SamplingParams
from tests.compare.conftest import NUM_REQUESTS, NUM_SLOTS


def test_the_three_strategies_give_identical_tokens(engine: LoadedEngine) -> None:
    jobs = build_jobs(Workload(num_requests=12, max_tokens=40, seed=5), engine)
    runs = [measure(engine, jobs, name, 5) for name in ("sequential", "static", "continuous")]
    answers = [[request.token_ids for request in run.requests] for run in runs]
    assert answers[0] == answers[1] == answers[2]
    assert len({tuple(answer) for answer in answers[0]}) > 6  # they are answers, not one and the same
    assert summarise(runs, jobs, Workload(), "").identical_tokens
    runs[1].requests[3].token_ids[-1] += 1
    assert not summarise(runs, jobs, Workload(), "").identical_tokens


def test_a_comparison_is_one_of_like_with_like(comparison: Comparison) -> None:
    assert comparison.identical_tokens
    found = {name: result.figures for name, result in comparison.results.items()}
    assert list(found) == ["sequential", "static", "continuous"]
    assert len({figures.num_output_tokens for figures in found.values()}) == 1
    # What the schedule alone decides, whatever the machine.
    assert found["sequential"].num_steps > found["static"].num_steps > found["continuous"].num_steps
    assert found["sequential"].slot_use < found["static"].slot_use < found["continuous"].slot_use <= 1
    assert found["static"].kv_waste > found["continuous"].kv_waste
    assert comparison.results["continuous"].speedup == 1


def test_json_carries_every_figure_and_the_picture(comparison: Comparison) -> None:
    found = json.loads(json.dumps(comparison.to_json()))
    assert found["num_requests"] == NUM_REQUESTS
    assert found["batch_size"] == NUM_SLOTS
    assert found["identical_tokens"] is True
    for name, result in comparison.results.items():
        figures = found["strategies"][name]
        assert set(figures) == {field.name for field in fields(Figures)} | {"speedup_of_reference"}
        assert figures["gpu_utilization"] is None
        timeline = found["timelines"][name]
        assert len(timeline["step_ends"]) == figures["num_steps"]
        assert timeline["pauses"] == []
        slots, _, _, firsts, lasts, tokens = zip(*timeline["spans"], strict=True)
        assert max(slots) < NUM_SLOTS
        assert min(firsts) == 0
        assert max(lasts) == figures["num_steps"]
        assert sum(tokens) == result.figures.num_output_tokens


def test_an_open_loop_waits_for_arrivals(engine: LoadedEngine) -> None:
    workload = Workload(4, Arrival(rate=30.0), max_tokens=3, seed=2)
    found = compare(engine, workload, ["continuous"], num_slots=2)
    times = workload.arrival.times(4, seed=2)
    timeline = found.timelines[0]
    # The first step cannot begin before the first request has come.
    assert timeline.begins[0] >= times[0]
    assert found.results["continuous"].figures.total_time >= times[-1]
    assert found.results["continuous"].figures.mean_ttft > 0
    assert found.reference == "continuous"
    assert found.to_json()["timelines"]["continuous"]["pauses"][0][0] == 0


def test_the_engine_cannot_be_replaced_under_its_requests(engine: LoadedEngine) -> None:
    core = engine.use(policy="continuous", max_num_seqs=3)
    assert core.scheduler.limits.max_num_seqs == 3
    core.add(engine.input_processor.requests("x", [5, 6, 7], SamplingParams(max_tokens=2))[1][0])
    with pytest.raises(EngineError, match="only when it is idle"):
        engine.use(policy="static")
    core.abort("x")
    replaced = engine.use(policy="static")
    assert replaced is engine.core
    assert replaced is not core
    assert not core.runner.forward.caches  # type: ignore[attr-defined]  # its memory was given back


def test_another_reference_where_continuous_does_not_run(engine: LoadedEngine) -> None:
    found = compare(engine, Workload(3, lengths="ragged", max_tokens=4), ["sequential", "fair"], num_slots=2)
    assert found.reference == "fair"
    assert found.results["fair"].speedup == 1
