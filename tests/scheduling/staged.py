"""A runner with pipeline stages: a token in flight is not known yet when the next step begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inflight.kv.layout import KVLayout
from inflight.scheduling.batch import Batch, Sampled
from tests.support.fake_runner import FakeRunner


class StagedRunner(FakeRunner):
    """The fake runner, but a step that computes a token that was not collected yet is an error."""

    def __init__(self, num_blocks: int, layout: KVLayout) -> None:
        super().__init__(num_blocks, layout)
        self.batches: list[Batch] = []
        self._in_flight: dict[int, list[tuple[Any, int]]] = {}  # by handle: rows, and positions in them
        self._drawn: list[tuple[Any, int]] = []

    def launch(self, batch: Batch) -> Sampled:
        self._drawn = []
        handle = super().launch(batch)
        self._in_flight[id(handle)] = self._drawn
        self.batches.append(batch)
        return handle

    def collect(self, handle: Sampled) -> Sampled:
        del self._in_flight[id(handle)]
        return super().collect(handle)

    def _verify(self, number: int, length: int, draft: Sequence[int]) -> list[int]:
        assert not draft, "a token that is not known yet has no drafts"
        self._drawn.append((self.rows[number], length))
        return super()._verify(number, length, draft)

    def _write(self, row: Any, start: int, count: int) -> None:
        for drawn in self._in_flight.values():
            for other, position in drawn:
                assert other is not row or not start <= position < start + count, "that token is in flight"
        super()._write(row, start, count)
