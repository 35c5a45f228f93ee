"""Whose entries a batch has, as any runner can know: from the admissions."""

from __future__ import annotations

from dataclasses import dataclass

from inflight.request import RequestSpec
from inflight.scheduling.batch import Batch


@dataclass(frozen=True)
class SeenBatch:
    """A batch together with the requests in its rows."""

    batch: Batch
    requests: list[RequestSpec]

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def step(self) -> int:
        return self.batch.step

    @property
    def ends(self) -> list[int]:
        """The number of tokens of each request that have KV after this step."""
        return [start + count for start, count in zip(self.batch.starts, self.batch.counts, strict=True)]


class SeenRows:
    def __init__(self) -> None:
        self._requests: dict[int, RequestSpec] = {}

    def see(self, batch: Batch) -> SeenBatch:
        self._requests.update(batch.admissions)
        return SeenBatch(batch, [self._requests[row] for row in batch.rows])
