"""A runner that computes nothing but checks everything.

Its "model" is a hash: KV memory holds a digest of every token and its position, and the next token is a hash of all the
digests that a row's block table leads to. A wrong block table, a prefix hit on the wrong content, a lost token or a
block given to two requests therefore changes the output. `expected_tokens` returns the right output.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from inflight.events import PositionLogprobs, TokenLogprob, pack_logprobs
from inflight.request import RequestSpec
from inflight.scheduling import Batch, Sampled


def _digest(token_id: int, position: int) -> int:
    return crc32(f"{token_id}@{position}".encode())


def _next_token(digests: Sequence[int], vocab_size: int) -> int:
    return crc32(repr(digests).encode()) % vocab_size


def expected_tokens(
    prompt: Sequence[int], count: int, vocab_size: int = 50, stop_ids: frozenset[int] = frozenset()
) -> list[int]:
    """Return the tokens that the fake model generates for a prompt."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        digests = [_digest(token_id, position) for position, token_id in enumerate(tokens)]
        tokens.append(_next_token(digests, vocab_size))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


def _score(token_id: int, digests: Sequence[int]) -> PositionLogprobs:
    """Return the fake model's logprob of a token after these digests."""
    logprob = -(crc32(repr((token_id, digests)).encode()) % 1000) / 100
    return pack_logprobs([TokenLogprob(token_id, logprob, 1)])


def expected_scores(prompt: Sequence[int]) -> list[PositionLogprobs | None]:
    """Return the fake model's logprobs of a prompt."""
    digests = [_digest(token_id, position) for position, token_id in enumerate(prompt)]
    return [None, *(_score(prompt[end], digests[:end]) for end in range(1, len(prompt)))]


def _pooled(digests: Sequence[Any]) -> bytes:
    return array("f", [crc32(repr(digests).encode()) % 1000, len(digests)]).tobytes()


def expected_vector(prompt: Sequence[int]) -> list[float]:
    """Return the output of the fake model's head for a text."""
    return array(
        "f", _pooled([_digest(token_id, position) for position, token_id in enumerate(prompt)])
    ).tolist()


@dataclass(slots=True)
class _Row:
    request: RequestSpec
    tokens: list[int]
    table: list[int]


class FakeRunner:
    """Implements `Runner` for tests and scheduler benchmarks."""

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int = 50) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.memory: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.rows: dict[int, _Row] = {}
        self.num_computed = 0

    def launch(self, batch: Batch) -> Sampled:
        for row, request in batch.admissions:
            self.rows[row] = _Row(request, list(request.token_ids), [])
        for row, first, block_ids, _ in batch.tables:
            if row in self.rows:
                self.rows[row].table[first:] = block_ids
        entries = list(zip(batch.rows, batch.starts, batch.counts, batch.samples, strict=True))
        for row, start, count, _ in entries:  # a step writes all its KV before it reads any
            self._write(self.rows[row], start, count)
        scores = {
            entry: self._scores(self.rows[row], start, count)
            for entry, (row, start, count, _) in enumerate(entries)
            if self.rows[row].request.params.prompt_logprobs is not None
        }
        token_ids = [
            self._sample(self.rows[row], start + count) if samples else []
            for row, start, count, samples in entries
        ]
        vectors = {
            entry: _pooled(self._digests(self.rows[row], start + count))
            for entry, (row, start, count, _) in enumerate(entries)
            if self.rows[row].request.kind == "pool"
            and start + count == self.rows[row].request.num_prompt_tokens
        }
        return Sampled(
            token_ids,
            prompt_logprobs={entry: logprobs for entry, logprobs in scores.items() if logprobs},
            vectors=vectors,
        )

    def _write(self, row: _Row, start: int, count: int) -> None:
        for position in range(start, start + count):
            block_id = row.table[position // self.block_size]
            self.memory[block_id][position % self.block_size] = _digest(row.tokens[position], position)
        self.num_computed += count

    def _digests(self, row: _Row, length: int) -> list[Any]:
        size = self.block_size
        return [self.memory[row.table[p // size]][p % size] for p in range(length)]

    def _scores(self, row: _Row, start: int, count: int) -> list[PositionLogprobs]:
        """Return the logprobs of the prompt tokens that this chunk predicts."""
        last = min(start + count, row.request.num_prompt_tokens - 1)
        return [_score(row.tokens[end], self._digests(row, end)) for end in range(start + 1, last + 1)]

    def _sample(self, row: _Row, length: int) -> list[int]:
        assert length == len(row.tokens), "a step samples only after a row's last token"
        digests = self._digests(row, length)
        row.tokens.append(_next_token(digests, self.vocab_size))
        return row.tokens[-1:]

    def collect(self, handle: Sampled) -> Sampled:
        return handle

    def close(self) -> None:
        self.rows.clear()
