"""One strategy over the workload, watched."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from inflight.compare.gpu import GpuMonitor
from inflight.compare.workload import Job
from inflight.engine import EngineCore
from inflight.errors import EngineError
from inflight.events import Delta, StepRecord
from inflight.loading import LoadedEngine
from inflight.request import Request
from inflight.sampling_params import SamplingParams

WARM_UP_TOKENS = 4

Progress = Callable[[int], None]  # requests finished so far


@dataclass(slots=True)
class RequestRun:
    """One request's life under one strategy; times are seconds after the start."""

    request_id: str
    num_prompt_tokens: int
    token_ids: list[int]  # the answer
    arrived_at: float
    first_token_at: float
    last_token_at: float


@dataclass(slots=True)
class StrategyRun:
    """What was seen of one strategy."""

    strategy: str
    num_slots: int
    requests: list[RequestRun]
    steps: list[StepRecord]
    begins: list[float]  # of the steps, in seconds after the start
    ends: list[float]
    gpu_utilization: float | None = None  # share of the time; None without a GPU


@dataclass(slots=True)
class StepWatch:
    """Keeps the steps and when they began: at the end of the one before, or when work came after a pause."""

    origin: float = 0.0
    resumed_at: float = 0.0
    steps: list[StepRecord] = field(default_factory=list)
    begins: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    def __call__(self, record: StepRecord) -> None:
        self.steps.append(record)
        self.begins.append(max(self.resumed_at, self.ends[-1] if self.ends else 0.0))
        self.ends.append(record.finished_at - self.origin)


def measure(
    engine: LoadedEngine, jobs: list[Job], strategy: str, num_slots: int, progress: Progress | None = None
) -> StrategyRun:
    """Run the jobs under a strategy on an engine of its own over the same weights."""
    core = engine.use(policy=strategy, max_num_seqs=num_slots)
    _warm_up(core, engine)
    requests = [
        engine.input_processor.requests(job.request_id, job.prompt_ids, job.params)[1][0] for job in jobs
    ]
    watch = StepWatch()
    core.observers.append(watch)
    device = engine.platform.device
    with GpuMonitor(device.index or 0 if device.type == "cuda" else None) as monitor:
        serve(core, [job.arrives_at for job in jobs], requests, watch, progress or (lambda _: None))
    utilization = monitor.utilization
    if utilization is None and device.type == "cuda":
        utilization = _busy_share(watch)
    return StrategyRun(
        strategy,
        num_slots,
        [_request_run(job, request, watch.origin) for job, request in zip(jobs, requests, strict=True)],
        watch.steps,
        watch.begins,
        watch.ends,
        utilization,
    )


def _busy_share(watch: StepWatch) -> float:
    """Share of the time that the steps themselves took, for a run too short for the driver's readings."""
    busy = sum(record.finished_at - record.began_at for record in watch.steps)
    return busy / watch.ends[-1]


def serve(
    core: EngineCore, times: list[float], requests: list[Request], watch: StepWatch, progress: Progress
) -> list[Delta]:
    """Add requests when they are due and step while there is work. An open loop: arrivals wait for no answer.
    Returns the last delta of each, in the order in which they ended."""
    due = deque(zip(times, requests, strict=True))
    ended: list[Delta] = []
    watch.origin = core.clock()
    while due or core.has_work:
        now = core.clock() - watch.origin
        while due and due[0][0] <= now:
            core.add(due.popleft()[1])
        if core.has_work:
            newly_ended = [delta for delta in core.step() if delta.finish_reason is not None]
            if newly_ended:
                ended += newly_ended
                progress(len(ended))
        else:
            time.sleep(due[0][0] - now)
            watch.resumed_at = core.clock() - watch.origin
    return ended


def _request_run(job: Job, request: Request, origin: float) -> RequestRun:
    record = request.record
    if record.finish_reason not in ("stop", "length"):
        raise EngineError(f"request {job.request_id} ({job.title!r}) ended with {record.finish_reason!r}")
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
    """What only the first step of a process or an engine pays is no strategy's fault."""
    rng = Random(0)
    size = min(WARM_UP_TOKENS, engine.max_model_len - WARM_UP_TOKENS)
    ids = [rng.randrange(engine.input_processor.vocab_size) for _ in range(max(size, 1))]
    params = SamplingParams(max_tokens=WARM_UP_TOKENS, ignore_eos=True, seed=0)
    core.add(engine.input_processor.requests("warm-up", ids, params)[1][0])
    while core.has_work:
        core.step()
    core.scheduler.blocks.drop_cache()
