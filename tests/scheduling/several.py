"""A runner that returns several tokens per step, as one with speculative decoding would."""

from __future__ import annotations

from typing import Any
from zlib import crc32

from inflight.kv.layout import KVLayout
from inflight.scheduling.batch import Batch, Sampled
from tests.support.fake_runner import FakeRunner, expected_tokens


class SeveralRunner(FakeRunner):
    """The fake runner three tokens ahead. Only the first of them has a step of its own: the KV of the others is
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
                sampled.num_written[entry] = count = min(len(token_ids) - 1, self._room(row, start))
                self._write(row, start, count)
        return sampled

    def _room(self, row: Any, start: int) -> int:
        """Return how many tokens from a position on the row's blocks have room for."""
        return max(0, len(row.tables[0]) * self.block_size - start)


class DraftingRunner(VerifyingRunner):
    """Drafts up to three tokens, of which the first ones are right: how many differs by request and step. It writes
    the KV of all of them, and refuses the wrong ones."""

    def _sample(self, row: Any, length: int) -> list[int]:
        return FakeRunner._sample(self, row, length)

    def launch(self, batch: Batch) -> Sampled:
        sampled = FakeRunner.launch(self, batch)
        for entry, token_ids in enumerate(sampled.token_ids):
            if token_ids:
                row, start = self.rows[batch.rows[entry]], batch.starts[entry] + batch.counts[entry]
                num_drafted, num_right = _drafts(row.tokens)
                num_drafted = min(num_drafted, self._room(row, start))
                num_right = min(num_right, num_drafted)
                token_ids += [self._ahead(row) for _ in range(num_right)]
                sampled.num_written[entry], sampled.num_refused[entry] = num_right, num_drafted - num_right
                self._write(row, start, num_right)
                self._spoil(row, start + num_right, num_drafted - num_right)
        return sampled

    def _spoil(self, row: Any, start: int, count: int) -> None:
        """Write the KV of wrong tokens."""
        for block_ids in row.tables:
            for position in range(start, start + count):
                self.memory[block_ids[position // self.block_size]][position % self.block_size] = "refused"


def _drafts(tokens: list[int]) -> tuple[int, int]:
    """Return how many tokens are drafted after these, and how many of them are right."""
    number = crc32(repr(tokens).encode())
    return number % 4, number // 4 % 4
