"""An engine on a clock that only steps move: how long they last is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inflight.engine.core import EngineCore
from inflight.kv.block_manager import BlockManager
from inflight.kv.layout import KVLayout
from inflight.kv.prefix_cache import PrefixCache
from inflight.scheduling.batch import Batch, Sampled
from inflight.scheduling.policy import TokenBudget, make_policy
from inflight.scheduling.request_pool import Limits
from inflight.scheduling.scheduler import Scheduler
from tests.support.fake_runner import FakeRunner
from tests.support.requests import make_request
from tests.support.steps import StepRecord, observe

MAX_TOKENS = 4096
BASE, EACH = 4.0, 0.02  # milliseconds: of any step, and of each of its tokens


class TimedRunner(FakeRunner):
    """A device that is done with a step when its time is over, and rounds steps up to sizes."""

    def __init__(self, num_blocks: int, block_size: int, sizes: Sequence[int]) -> None:
        super().__init__(num_blocks, KVLayout(block_size))
        self.sizes = sizes
        self.host = 0.0  # seconds that a launch takes
        self.num_gaps = 0  # launches that came too late to keep the device busy
        self.now = self.free_at = 0.0

    def launch(self, batch: Batch) -> Any:
        self.now += self.host
        self.num_gaps += self.now > self.free_at
        size = next((size for size in self.sizes if size >= batch.num_tokens), batch.num_tokens)
        self.free_at = max(self.free_at, self.now) + timed(size)
        return super().launch(batch), self.free_at

    def collect(self, handle: Any) -> Sampled:
        sampled, done_at = handle
        self.now = max(self.now, done_at)
        return super().collect(sampled)


@dataclass
class Timed:
    """An engine over such a device."""

    token_budget: TokenBudget
    depth: int = 1
    sizes_of_steps: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.runner = TimedRunner(2048, 16, self.sizes_of_steps)
        blocks = BlockManager(2048, KVLayout(16), PrefixCache())
        limits = Limits(64, MAX_TOKENS, 1 << 30)
        scheduler = Scheduler(limits, make_policy("continuous"), blocks, self.token_budget)
        self.core = EngineCore(scheduler, self.runner, self.depth, clock=lambda: self.runner.now)
        self.records: list[StepRecord] = []
        observe(self.core, self.records.append)
        self.outputs: dict[str, list[int]] = {}

    def add(self, num_prompt: int, max_tokens: int) -> str:
        request = make_request([i % 40 for i in range(num_prompt)], max_tokens)
        self.core.add(request)
        return request.request_id

    def step(self) -> None:
        for delta in self.core.step():
            self.outputs.setdefault(delta.request_id, []).extend(delta.token_ids)

    def sizes(self) -> list[int]:
        return [sum(slot.num_tokens for slot in record.slots) for record in self.records]


def timed(num_tokens: int) -> float:
    return (BASE + EACH * num_tokens) / 1000
