"""A runner that returns several tokens per step, as one with speculative decoding would."""

from __future__ import annotations

from typing import Any

from inflight.kv.layout import KVLayout
from inflight.scheduling.batch import Batch, Sampled
from tests.support.fake_runner import FakeRunner, expected_tokens


class SeveralRunner(FakeRunner):
    """The fake runner three tokens ahead. Only the first of them has its own step: the KV of the others is
    computed by the next one."""

    def _sample(self, row: Any, length: int) -> list[int]:
        first = super()._sample(row, length)
        more = [self._ahead(row) for _ in range(2)]
        return [*first, *more]

    def _ahead(self, row: Any) -> int:
        token_id = expected_tokens(row.tokens, 1, self.vocab_size, layout=self.layout)[0]
        row.tokens.append(token_id)
        return token_id


class VerifyingRunner(SeveralRunner):
    """The same, but it writes the KV of the accepted tokens too, as far as the row's blocks reach."""

    def __init__(self, num_blocks: int, layout: KVLayout) -> None:
        super().__init__(num_blocks, layout)
        self.written: list[tuple[str, int]] = []  # request ids and positions

    def _write(self, row: Any, start: int, count: int) -> None:
        super()._write(row, start, count)
        self.written += [(row.request.request_id, position) for position in range(start, start + count)]

    def launch(self, batch: Batch) -> Sampled:
        sampled = super().launch(batch)
        for entry, token_ids in enumerate(sampled.token_ids):
            if len(token_ids) > 1:
                row, start = self.rows[batch.rows[entry]], batch.starts[entry] + batch.counts[entry]
                capacity = len(row.tables[0]) * self.block_size - start
                sampled.num_written[entry] = count = max(0, min(len(token_ids) - 1, capacity))
                self._write(row, start, count)
        return sampled
