"""Figures, tables and plots of hand-made records."""

from __future__ import annotations

import io
import json
import math
import random
import statistics
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from inflight.bench.load_generator import LoadResult, Record
from inflight.bench.plot import draw
from inflight.bench.report import Spread, parse_goodput, summarise
from inflight.bench.terminal import print_runs
from inflight.errors import ParameterError


def record(index: int, sent: float, *times: float, num_tokens: int | None = None, **more: object) -> Record:
    fields: dict[str, object] = {
        "ended": (times or (sent,))[-1] + 0.5,
        "lag": 0.001,
        "num_tokens": len(times) if num_tokens is None else num_tokens,
        "num_prompt_tokens": 10,
        "num_cached_tokens": 3,
        **more,
    }
    return Record(index=index, sent=sent, times=list(times), **fields)  # type: ignore[arg-type]


def failed(index: int, kind: str, detail: str) -> Record:
    return record(index, 101.0, 102.0, error=kind, detail=detail)


RECORDS = [
    record(0, 100.0, 101.0, 101.5, 103.5),
    record(1, 100.5, 100.75, num_tokens=1),
    failed(2, "http_429", "first"),
    failed(3, "http_429", "second"),
    failed(4, "broken", "gone"),
    record(5, 102.0, num_tokens=4),  # tokens without text
]


def result(records: list[Record] = RECORDS, **more: Any) -> LoadResult:
    return LoadResult(**{"records": records, "loop_lags": [0.0], "cpu_share": 0.1, **more})


def test_figures_of_hand_made_records_are_exact() -> None:
    run = summarise(8.0, result())
    assert (run.num_requests, run.num_complete, run.num_failed) == (6, 3, 3)
    assert run.seconds == 4.0
    assert (run.num_output_tokens, run.output_tokens_per_s, run.requests_per_s) == (8, 2.0, 0.75)
    assert (run.num_prompt_tokens, run.num_cached_tokens, run.num_events) == (30, 9, 4)
    assert run.ttft is not None
    assert (run.ttft.p50, run.ttft.max) == (0.5, 1.0)
    assert run.itl is not None
    assert (run.itl.mean, run.itl.max) == (1.25, 2.0)
    assert run.tpot is not None
    assert (run.tpot.max, run.tpot.p50) == (1.25, 0.625)  # one request has a single token, one has no times
    assert run.e2e is not None
    assert run.e2e.max == 4.0
    assert list(run.problems) == ["http_429", "broken"]
    assert (run.problems["http_429"].count, run.problems["http_429"].example) == (2, "first")


def test_spread_has_mean_percentiles_and_maximum() -> None:
    values = [float(value) for value in range(101)]
    random.Random(0).shuffle(values)
    assert Spread.from_values(values) == Spread(
        statistics.fmean(values), 50.0, 90.0, 99.0, 100.0, statistics.pstdev(values)
    )
    assert Spread.from_values([]) is None


def test_json_contains_every_figure() -> None:
    report = json.loads(json.dumps(summarise(math.inf, result()).to_json()))
    assert report["rate"] == "inf"
    assert report["ttft_ms"]["p50"] == 500
    assert report["errors"]["broken"] == {"count": 1, "example": "gone"}
    assert report["warnings"] == []
    nothing = summarise(4.0, result([failed(0, "connect", "no")])).to_json()
    assert nothing["ttft_ms"] is None


@pytest.mark.parametrize(
    ("objectives", "num_good"),
    [
        (["ttft:600"], 2),
        (["ttft:1000"], 3),
        (["tpot:1250"], 3),
        (["tpot:1000"], 2),
        (["ttft:600", "e2el:700"], 1),
        (["e2el:1"], 0),
    ],
)
def test_goodput_counts_requests_that_meet_all_objectives(objectives: list[str], num_good: int) -> None:
    run = summarise(8.0, result(), parse_goodput(objectives))
    assert (run.num_good, run.goodput) == (num_good, num_good / 4.0)
    assert run.to_json()["goodput"] == num_good / 4.0
    assert summarise(8.0, result()).goodput is None


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:x", "ttft:0", "ttft:nan", "speed:5", ""])
def test_invalid_objectives_are_rejected(text: str) -> None:
    with pytest.raises(ParameterError, match=r"goodput is .*: it must be NAME:MILLISECONDS"):
        parse_goodput([text])


def test_saved_figures_have_the_names_of_vllm() -> None:
    fields = summarise(8.0, result(), {"ttft": 1.0}).to_vllm_json()
    assert (fields["completed"], fields["duration"], fields["request_goodput"]) == (3, 4.0, 0.75)
    assert (fields["total_input_tokens"], fields["total_token_throughput"]) == (30, 9.5)
    for metric in ("ttft", "tpot", "itl", "e2el"):
        assert all(f"{key}_{metric}_ms" in fields for key in ("mean", "median", "std", "p99"))
    assert fields["median_ttft_ms"] == 500.0


def test_goodput_is_printed() -> None:
    for rates in ((8.0,), (8.0, 16.0)):
        console = Console(width=140, file=io.StringIO())
        print_runs([summarise(rate, result(), {"ttft": 0.6}) for rate in rates], "", console)
        assert isinstance(console.file, io.StringIO)
        assert "good" in console.file.getvalue()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"cpu_share": 0.97}, "97% of a core"),
        ({"loop_lags": [0.0] * 50 + [0.3] * 50}, "300 ms late"),
        ({"records": [record(0, 1.0, 2.0, lag=0.05)]}, "sent at least 50 ms late"),
    ],
)
def test_overloaded_client_is_reported(more: dict[str, Any], message: str) -> None:
    warnings = summarise(8.0, result(**more)).warnings()
    assert message in warnings[0]
    assert "--processes" in warnings[-1]


def test_burst_causes_no_lag_warning() -> None:
    assert summarise(math.inf, result([record(0, 1.0, 2.0, lag=0.05)])).warnings() == []


def printed(*rates: float) -> str:
    console = Console(width=140, file=io.StringIO())
    print_runs([summarise(rate, result()) for rate in rates], "Title [x]", console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_single_run_is_printed_in_full() -> None:
    text = printed(8.0)
    for words in ("Title [x]", "3 of 6", "TTFT", "ITL", "TPOT", "E2E", "2 failed, http_429: first"):
        assert words in text


def test_several_runs_are_printed_side_by_side() -> None:
    text = printed(8.0, 16.0, math.inf)
    for words in ("8/s", "16/s", "all at once", "500 / 990", "all at once: 1 failed, broken: gone"):
        assert words in text


def shapes(svg: str) -> list[dict[str, str]]:
    return [element.attrib for element in ElementTree.fromstring(svg) if "x" in element.attrib]


def test_plot_shows_every_rate_within_its_bounds() -> None:
    runs = [summarise(rate, result()) for rate in (8.0, 16.0, math.inf)]
    svg = draw(runs, "Title <x>")
    for words in (
        "Time to first token",
        "Inter-token latency",
        "End-to-end latency",
        "Title &lt;x&gt;",
        "all at once",
    ):
        assert words in svg
    width, height = map(float, ElementTree.fromstring(svg).attrib["viewBox"].split()[2:])
    for shape in shapes(svg):
        assert 0 <= float(shape["x"]) <= width
        assert 0 <= float(shape["y"]) <= height
        assert float(shape.get("width", 1)) > 0
        assert float(shape.get("height", 1)) > 0


def test_slower_run_is_drawn_higher() -> None:
    slow = [record(0, 0.0, 4.0, 5.0)]
    runs = [summarise(1.0, result([record(0, 0.0, 1.0, 2.0)])), summarise(2.0, result(slow))]
    medians = [float(shape["y"]) for shape in shapes(draw(runs, "")) if shape.get("height") == "3"]
    assert medians[0] > medians[1]  # y grows downwards


def test_plot_omits_inter_token_latency_without_gaps() -> None:
    run = summarise(8.0, result([record(0, 1.0, 2.0)]))
    assert "Inter-token latency" not in draw([run], "")
