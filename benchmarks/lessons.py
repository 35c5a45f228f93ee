"""The effects that docs/continuous-batching.md explains, measured one by one on the built-in model.

    python -m benchmarks.lessons [curve] [chunks] [prefix] [--svg FILE] [--json]

curve:   a burst of 64 chats over the number of slots: throughput against the time a reader waits between tokens.
chunks:  a long prompt arrives while eight requests decode: the longest gap that the eight notice, by chunk size.
prefix:  sixteen questions about one long text, one after another: time to first token with and without the cache.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.report import show
from inflight.bench.compare.measure import compute_figures, measure
from inflight.bench.compare.timeline import ticks
from inflight.bench.compare.workload import Workload, build_jobs
from inflight.config import EngineConfig
from inflight.loading.engine import LoadedEngine
from inflight.loading.load import load_engine
from inflight.request import Request
from inflight.sampling_params import SamplingParams
from inflight.timeline.chunks import TimelineQuery
from inflight.timeline.steps import read_chunks, recorded_steps

SLOTS = (1, 2, 4, 8, 16, 32, 64)
CHUNKS = (1600, 256, 64, 16)
LONG_PROMPT = 1500


def curve(engine: LoadedEngine) -> list[dict[str, Any]]:
    jobs = build_jobs(Workload(num_requests=64), engine)
    rows = []
    for slots in SLOTS:
        run = measure(engine, jobs, "continuous", slots)
        gaps = [
            (request.last_token_at - request.first_token_at) / (len(request.token_ids) - 1)
            for request in run.requests
            if len(request.token_ids) > 1
        ]
        found = asdict(compute_figures(run))
        rows.append({"slots": slots, "between_tokens_ms": statistics.fmean(gaps) * 1e3, **found})
    return rows


def _request(engine: LoadedEngine, name: str, prompt: list[int], max_tokens: int) -> Request:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return engine.frontend.input_processor.requests(name, prompt, params)[1][0]


def _prompt(index: int, length: int) -> list[int]:
    return [(index * 7919 + position * 104729) % 2000 + 3 for position in range(length)]


def chunks(engine: LoadedEngine) -> list[dict[str, Any]]:
    rows = []
    for chunk in CHUNKS:
        core = engine.use(policy="continuous", max_num_seqs=16, max_num_batched_tokens=chunk)
        core.record()
        for index in range(8):
            core.add(_request(engine, f"reader-{index}", _prompt(index, 8), 200))
        for _ in range(40):
            core.step()
        begun = core.stats().num_steps
        long = _request(engine, "long", _prompt(99, LONG_PROMPT), 1)
        core.add(long)
        while core.has_work:
            core.step()
        steps = list(recorded_steps(read_chunks(core.read_timeline, TimelineQuery(0.0))))
        ends = [
            step.times.finished_at
            for step in steps[begun - 1 :]
            if any(slot.request.request_id == "reader-0" for slot in step.slots)
        ]
        gaps = [(later - earlier) * 1e3 for earlier, later in pairwise(ends)]
        assert long.record.first_token_at is not None
        rows.append(
            {
                "chunk": chunk,
                "longest_gap_ms": max(gaps),
                "median_gap_ms": statistics.median(gaps),
                "long_prompt_first_token_ms": (long.record.first_token_at - long.record.arrived_at) * 1e3,
            }
        )
    return rows


def prefix(_: LoadedEngine) -> list[dict[str, Any]]:
    rows = []
    text = _prompt(5, LONG_PROMPT)
    for caching in (False, True):
        engine = load_engine(EngineConfig.create(enable_prefix_caching=caching, max_num_batched_tokens=2048))
        waits = []
        for index in range(16):
            request = _request(engine, str(index), [*text, *_prompt(index, 16)], 4)
            engine.core.add(request)
            while engine.core.has_work:
                engine.core.step()
            assert request.record.first_token_at is not None
            waits.append((request.record.first_token_at - request.record.arrived_at) * 1e3)
        stats = engine.core.stats()
        hits = stats.num_prefix_hits / stats.num_prefix_queries if stats.num_prefix_queries else 0.0
        rows.append(
            {
                "prefix_cache": "on" if caching else "off",
                "first_ms": waits[0],
                "later_median_ms": statistics.median(waits[1:]),
                "hits": hits,
            }
        )
        engine.close()
    return rows


def draw_curve(rows: list[dict[str, Any]]) -> str:
    """Throughput over the time between tokens, one point a number of slots."""
    width, height, left, bottom = 640, 360, 70, 50
    most_ms = max(row["between_tokens_ms"] for row in rows) * 1.1
    most_speed = max(row["tokens_per_second"] for row in rows) * 1.15

    def place(row: dict[str, Any]) -> tuple[float, float]:
        x = left + row["between_tokens_ms"] / most_ms * (width - left - 20)
        y = height - bottom - row["tokens_per_second"] / most_speed * (height - bottom - 20)
        return x, y

    points = [place(row) for row in rows]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    marks = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"/><text x="{x + 8:.1f}" y="{y + 16:.1f}">{row["slots"]} slots</text>'
        for row, (x, y) in zip(rows, points, strict=True)
    )
    marks += "".join(
        f'<text x="{left - 8}" y="{place({"between_tokens_ms": 0, "tokens_per_second": speed})[1] + 4:.1f}" '
        f'text-anchor="end">{speed:,.0f}</text>'
        for speed in ticks(most_speed, 6)
    )
    marks += "".join(
        f'<text x="{place({"between_tokens_ms": ms, "tokens_per_second": 0})[0]:.1f}" y="{height - bottom + 18}" '
        f'text-anchor="middle">{ms:g}</text>'
        for ms in ticks(most_ms, 10)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12" fill="#444"><rect width="{width}" height="{height}" fill="#fff"/>'
        f'<path d="M{left},20V{height - bottom}H{width - 20}" fill="none" stroke="#999"/>'
        f'<polyline points="{line}" fill="none" stroke="#3b6fd4" stroke-width="2"/>{marks}'
        f'<text x="{left}" y="14">output tokens/s</text>'
        f'<text x="{width - 20}" y="{height - 12}" text-anchor="end">ms between two tokens of one answer</text></svg>\n'
    )


# What of each lesson is printed: title and shape, by name. docs/continuous-batching.md has the same titles.
COLUMNS = {
    "curve": {
        "slots": ("slots", "{}"),
        "tokens_per_second": ("output tokens/s", "{:,.0f}"),
        "between_tokens_ms": ("ms between tokens", "{:.1f}"),
        "mean_ttft": ("time to first token, mean", "{:.2f} s"),
        "p50_latency": ("latency, p50", "{:.2f} s"),
        "slot_use": ("slot use", "{:.0%}"),
    },
    "chunks": {
        "chunk": ("tokens per step", "{:,}"),
        "longest_gap_ms": ("longest gap", "{:.0f} ms"),
        "median_gap_ms": ("typical gap", "{:.1f} ms"),
        "long_prompt_first_token_ms": ("time to first token of the long prompt", "{:.0f} ms"),
    },
    "prefix": {
        "prefix_cache": ("prefix cache", "{}"),
        "first_ms": ("first question", "{:.0f} ms"),
        "later_median_ms": ("next fifteen, median", "{:.0f} ms"),
        "hits": ("cached tokens", "{:.0%}"),
    },
}
LESSONS = {"curve": curve, "chunks": chunks, "prefix": prefix}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("lessons", nargs="*", help=f"of {', '.join(LESSONS)}; all without any")
    parser.add_argument("--svg", type=Path, help="draw the curve into this file")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    chosen = options.lessons or list(LESSONS)
    unknown = set(chosen) - set(LESSONS)
    if unknown:
        parser.error(f"unknown lesson {', '.join(sorted(unknown))}: choose from {', '.join(LESSONS)}")
    engine = load_engine(EngineConfig.create(enable_prefix_caching=False, max_num_batched_tokens=2048))
    data = {name: LESSONS[name](engine) for name in chosen}
    if options.svg is not None and "curve" in data:
        options.svg.write_text(draw_curve(data["curve"]))
    if options.json:
        show("", (), (), True, {"benchmark": "lessons", **data})
        return
    for name, rows in data.items():
        columns = COLUMNS[name]
        cells = [[shape.format(row[key]) for key, (_, shape) in columns.items()] for row in rows]
        show(name, [title for title, _ in columns.values()], cells, False, {})


if __name__ == "__main__":
    main()
