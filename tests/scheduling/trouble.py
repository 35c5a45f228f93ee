"""An engine whose steps fail on purpose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from inflight.request import Request
from tests.e2e.breaking import PoisonedRunner, begins_with
from tests.support.fake_runner import expected_tokens
from tests.support.requests import FakeEngine, make_request
from tests.support.seen import SeenBatch

POISON = 49  # begins a prompt
POISONOUS = begins_with(POISON)


class Trouble:
    """An engine whose bad steps raise, and ruin the whole memory; remembers who was in which step."""

    def __init__(
        self, fault: Callable[[SeenBatch], bool] = POISONOUS, method: str = "launch", **options: Any
    ) -> None:
        self.engine = FakeEngine(**options)
        self.policy = self.engine.scheduler.policy
        self.fault = fault
        self.steps: list[list[str]] = []
        self.num_failures = 0
        self.expected: dict[str, list[int]] = {}
        PoisonedRunner(self.engine.core, self._watch, method)

    def _watch(self, batch: SeenBatch) -> bool:
        self.steps.append([request.request_id for request in batch.requests])
        if not self.fault(batch):
            return False
        self.num_failures += 1
        ruin_memory(self.engine)
        return True

    def add(self, prompt: Sequence[int], max_tokens: int, name: str | None = None, **fields: Any) -> Request:
        request = self.engine.add(make_request(list(prompt), max_tokens, name, **fields))
        self.expected[request.request_id] = expected_tokens(prompt, max_tokens, stop_ids=request.stop_ids)
        return request

    def check(self, *, failed: set[str]) -> None:
        """Run until all is done: these ended with an error, all others have what they should have."""
        self.engine.run()
        assert {name for name, last in self.engine.finished.items() if last.error} == failed
        for name, whole in self.expected.items():
            tokens = self.engine.outputs[name]
            assert tokens == (whole[: len(tokens)] if name in failed else whole)
            assert self.engine.finished[name].finish_reason == "error" or name not in failed
        usage = self.engine.scheduler.pool.usage()
        assert (usage.num_used, usage.num_tokens) == (0, 0)
        self.engine.scheduler.pool.check()


def ruin_memory(engine: FakeEngine) -> None:
    for block in engine.runner.memory:
        block[:] = [666] * len(block)
