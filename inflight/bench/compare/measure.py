"""Run a workload under one strategy, record every step, and reduce the run to figures."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np

from inflight.bench.compare.timeline import request_label
from inflight.bench.compare.workload import Job
from inflight.engine.core import EngineCore
from inflight.errors import EngineError
from inflight.events import Delta
from inflight.loading.engine import LoadedEngine
from inflight.request import Request, RequestOrigin
from inflight.sampling_params import SamplingParams
from inflight.timeline.chunks import TimelineQuery
from inflight.timeline.steps import RecordedStep, read_chunks, recorded_steps
from inflight.timeline.trace import read_recording

WARM_UP_TOKENS = 4
MAX_RECORD_BYTES = 1 << 30  # of a recording
MIN_PAUSE = 0.001  # seconds without work between two steps

Progress = Callable[[int], None]  # called with the number of finished requests


@dataclass(slots=True)
class RequestRun:
    """One request under one strategy. Times are seconds after the start."""

    request_id: str
    num_prompt_tokens: int
    token_ids: list[int]  # the answer
    arrived_at: float
    first_token_at: float
    last_token_at: float


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded run. Times are seconds after the start."""

    steps: list[RecordedStep]
    # When each step began: at the end of the previous one, or when work arrived after a pause.
    begins: list[float]
    ends: list[float]
    chunks: list[dict[str, Any]]  # as in the format of `GET /v1/steps`, see `recorded_chunks`

    @classmethod
    def read(cls, core: EngineCore, strategy: str, origin: float) -> Recording:
        """Read what a core has recorded since its run began at `origin`."""
        steps = list(recorded_steps(read_chunks(core.read_timeline, TimelineQuery(origin))))
        ends = [step.times.finished_at - origin for step in steps]
        begins = []
        for step, before in zip(steps, [0.0, *ends], strict=False):
            arrived_at = min((slot.request.arrived - origin for slot in step.slots), default=0.0)
            begins.append(arrived_at if arrived_at > before + MIN_PAUSE else before)
        return cls(steps, begins, ends, recorded_chunks(core, strategy, origin))


@dataclass(slots=True)
class StrategyRun:
    """A recorded run of one strategy."""

    strategy: str
    num_slots: int
    requests: list[RequestRun]
    recording: Recording
    gpu_utilization: float | None = None  # share of the time; None without a GPU


def measure(
    engine: LoadedEngine, jobs: list[Job], strategy: str, num_slots: int, progress: Progress | None = None
) -> StrategyRun:
    """Run the jobs under a strategy, on a fresh engine core with the same weights."""
    core = engine.use(policy=strategy, max_num_seqs=num_slots)
    _warm_up(core, engine)
    requests = [
        with_origin(
            engine.frontend.input_processor.requests(job.request_id, job.prompt_ids, job.params)[1][0],
            index,
            job.title,
        )
        for index, job in enumerate(jobs)
    ]
    core.record(max_bytes=MAX_RECORD_BYTES)
    origin, _ = serve(core, [job.arrives_at for job in jobs], requests, progress or (lambda _: None))
    recording = Recording.read(core, strategy, origin)
    utilization = busy_share(recording) if engine.platform.device.type == "cuda" else None
    runs = [_request_run(job, request, origin) for job, request in zip(jobs, requests, strict=True)]
    return StrategyRun(strategy, num_slots, runs, recording, utilization)


def with_origin(request: Request, index: int, title: str) -> Request:
    """Return the request with the letter and the title that people see."""
    return Request(replace(request.spec, origin=RequestOrigin(request_label(index), text=title)))


def recorded_chunks(core: EngineCore, strategy: str, origin: float) -> list[dict[str, Any]]:
    """Return the timeline of a run in the format of `GET /v1/steps`, with the strategy in place of the replica.

    Times are seconds after the start, and the first step is step 0: those of the warm-up do not count.
    """
    chunks: list[dict[str, Any]] = read_recording(core.read_timeline, -origin)["chunks"]
    first_step = min(step for chunk in chunks for step in chunk["steps"]["step"])
    for chunk in chunks:
        chunk["replica"] = strategy
        chunk["steps"]["step"] = [step - first_step for step in chunk["steps"]["step"]]
        chunk["runs"] = [run._replace(first_step=run.first_step - first_step) for run in chunk["runs"]]
        for event in chunk["events"]:
            if "step" in event:
                event["step"] -= first_step
    return chunks


def busy_share(recording: Recording) -> float:
    """Return the share of the time in which the device computed a step."""
    busy = sum(step.times.finished_at - step.times.device_began_at for step in recording.steps)
    return busy / recording.ends[-1]


def serve(
    core: EngineCore, times: list[float], requests: list[Request], progress: Progress
) -> tuple[float, list[Delta]]:
    """Add requests when they are due and step while there is work.

    This is an open loop: arrivals do not wait for answers. Returns when it began and the last delta of each request, in
    the order in which the requests ended.
    """
    due = deque(zip(times, requests, strict=True))
    last_deltas: list[Delta] = []
    origin = core.clock()
    while due or core.has_work:
        now = core.clock() - origin
        while due and due[0][0] <= now:
            core.add(due.popleft()[1])
        if core.has_work:
            ended = [delta for delta in core.step() if delta.finish_reason is not None]
            if ended:
                last_deltas += ended
                progress(len(last_deltas))
        else:
            time.sleep(due[0][0] - now)
    return origin, last_deltas


def _request_run(job: Job, request: Request, origin: float) -> RequestRun:
    record = request.record
    if record.finish_reason not in ("stop", "length"):
        raise EngineError(
            f"request {job.request_id} ({job.title!r}) ended with finish reason {record.finish_reason!r}"
        )
    assert record.first_token_at is not None
    assert record.last_token_at is not None
    return RequestRun(
        job.request_id,
        request.num_prompt_tokens,
        request.token_ids[request.num_prompt_tokens :],
        job.arrives_at,
        record.first_token_at - origin,
        record.last_token_at - origin,
    )


def _warm_up(core: EngineCore, engine: LoadedEngine) -> None:
    """Run a few tokens so that no strategy pays for the first step of a process or an engine."""
    rng = Random(0)
    size = min(WARM_UP_TOKENS, engine.frontend.max_model_len - WARM_UP_TOKENS)
    ids = [rng.randrange(engine.frontend.input_processor.vocab_size) for _ in range(max(size, 1))]
    params = SamplingParams(max_tokens=WARM_UP_TOKENS, ignore_eos=True, seed=0)
    core.add(engine.frontend.input_processor.requests("warm-up", ids, params)[1][0])
    while core.has_work:
        core.step()
    core.reset_prefix_cache()


# ---- figures ----


@dataclass(frozen=True, slots=True)
class Figures:
    """A run in numbers; times are seconds.

    Time to first token and latency are measured from a request's arrival and include queueing. Latency ends with the
    last token of the answer, even if the policy keeps the finished request in its slot.
    """

    total_time: float
    num_output_tokens: int
    tokens_per_second: float
    mean_ttft: float
    p99_ttft: float
    p50_latency: float
    p99_latency: float
    slot_use: float  # share of slot-steps (steps x slots) that produced a token which the answer keeps
    kv_waste: float  # share of the positions in used KV blocks that hold no token, averaged over steps
    num_steps: int
    gpu_utilization: float | None


def compute_figures(run: StrategyRun) -> Figures:
    requests, steps = run.requests, run.recording.steps
    ttft = [request.first_token_at - request.arrived_at for request in requests]
    latency = [request.last_token_at - request.arrived_at for request in requests]
    total_time = max(request.last_token_at for request in requests)
    num_tokens = sum(len(request.token_ids) for request in requests)
    return Figures(
        total_time=total_time,
        num_output_tokens=num_tokens,
        tokens_per_second=num_tokens / total_time,
        mean_ttft=float(np.mean(ttft)),
        p99_ttft=float(np.percentile(ttft, 99)),
        p50_latency=float(np.percentile(latency, 50)),
        p99_latency=float(np.percentile(latency, 99)),
        slot_use=num_tokens / (len(steps) * run.num_slots),
        kv_waste=float(np.mean([step.kv_waste for step in steps])),
        num_steps=len(steps),
        gpu_utilization=run.gpu_utilization,
    )
