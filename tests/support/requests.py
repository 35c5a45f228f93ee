"""Engines over the fake runner, in one line."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from inflight.engine.client import ModelFacts
from inflight.engine.core import EngineCore
from inflight.events import Delta, PositionLogprobs
from inflight.kv.block_manager import BlockManager
from inflight.kv.layout import KVLayout
from inflight.kv.prefix_cache import ChainHashCache, PrefixCache
from inflight.request import Request
from inflight.sampling_params import SamplingParams
from inflight.scheduling.policy import Policy, make_policy
from inflight.scheduling.request_pool import Limits
from inflight.scheduling.scheduler import Scheduler, Speculation
from tests.support.fake_runner import FakeRunner
from tests.support.steps import StepRecord, observe

_ids = itertools.count()


def make_request(
    prompt: list[int], max_tokens: int = 4, request_id: str | None = None, **fields: object
) -> Request:
    params = fields.pop("params", None) or SamplingParams(max_tokens=max_tokens, temperature=0)
    name = request_id or f"r{next(_ids)}"
    return Request.create(name, list(prompt), params, max_tokens, **fields)  # type: ignore[arg-type]


@dataclass
class FakeEngine:
    """An engine core over the fake runner that remembers all that happened."""

    policy: str | Callable[[], Policy] = "continuous"
    num_blocks: int = 32
    block_size: int = 4
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 64
    max_kv_tokens: int = 1 << 30
    pipeline_depth: int = 1
    num_stages: int = 1
    caching: bool = True
    windows: tuple[int | None, ...] = (None,)
    snapshot_blocks: int = 0
    make_runner: Callable[[int, KVLayout], FakeRunner] = FakeRunner
    speculation: Speculation | None = None
    records: list[StepRecord] = field(default_factory=list)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    scores: dict[str, list[PositionLogprobs | None]] = field(default_factory=dict)
    vectors: dict[str, bytes] = field(default_factory=dict)
    finished: dict[str, Delta] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.layout = layout = KVLayout(self.block_size, self.windows, self.snapshot_blocks)
        cache = ChainHashCache(layout) if self.caching else PrefixCache()
        limits = Limits(self.max_num_seqs, self.max_num_batched_tokens, self.max_kv_tokens, self.num_stages)
        blocks = BlockManager(self.num_blocks, layout, cache)
        self.policy_given = make_policy(self.policy)  # the engine's own looks at its answers
        self.scheduler = Scheduler(limits, self.policy_given, blocks, speculation=self.speculation)
        self.runner = self.make_runner(self.num_blocks, layout)
        ticks = itertools.count()
        self.core = EngineCore(
            self.scheduler, self.runner, self.pipeline_depth, clock=lambda: next(ticks) * 1e-6
        )
        observe(self.core, self.records.append)

    @property
    def facts(self) -> ModelFacts:
        limits = (self.max_num_seqs, self.max_num_batched_tokens)
        return ModelFacts(
            "fake", 50, 4096, (), {}, None, "cpu", "none", self.num_blocks, self.block_size, *limits
        )

    def add(self, request: Request) -> Request:
        self.core.add(request)
        self.outputs[request.request_id] = []
        return request

    def take(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            self.outputs[delta.request_id] += delta.token_ids
            if delta.prompt_logprobs is not None:
                assert delta.request_id not in self.scores, "a prompt's logprobs come once"
                self.scores[delta.request_id] = delta.prompt_logprobs
            if delta.vector is not None:
                self.vectors[delta.request_id] = delta.vector
            if delta.finish_reason:
                assert delta.request_id not in self.finished, "a request ends once"
                self.finished[delta.request_id] = delta

    def step(self) -> None:
        self.take(self.core.step())

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError(f"not done after {max_steps} steps")
