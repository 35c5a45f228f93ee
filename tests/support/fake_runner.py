"""A runner that computes nothing but checks everything.

Its "model" is a hash: KV memory holds a digest of every token and its position for each block table, the recurrent
state is a digest of all tokens so far, and the next token is a hash of all that the last token can see: the digests
that a row's tables lead to, within their windows, and the row's state. A wrong block table, a prefix hit on the wrong
content, a lost token, a block given to two requests or a state of other tokens therefore changes the output.
`expected_tokens` returns the right output.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from inflight.events import PositionLogprobs, TokenLogprob, pack_logprobs
from inflight.kv.layout import KVLayout
from inflight.request import RequestSpec
from inflight.scheduling.batch import Batch, Sampled

PLAIN = KVLayout(1)  # one table that keeps all tokens; the size of its blocks changes no token


def _digest(token_id: int, position: int, table: int = 0) -> int:
    return crc32(f"{token_id}@{position}#{table}".encode() if table else f"{token_id}@{position}".encode())


def _next_state(state: int, token_id: int) -> int:
    return crc32(f"{state},{token_id}".encode())


def _next_token(seen: Sequence[Any], vocab_size: int) -> int:
    return crc32(repr(seen).encode()) % vocab_size


def _seen(tables: Sequence[Sequence[Any]], state: int | None) -> Sequence[Any]:
    """Return all that a token sees: the digests in each table, and the state."""
    return tables[0] if len(tables) == 1 and state is None else [*tables, state]


def _window(length: int, window: int | None) -> range:
    """Return the positions that the last of `length` tokens sees."""
    return range(0 if window is None else max(0, length - window), length)


def _all_seen(tokens: Sequence[int], layout: KVLayout) -> Iterator[Sequence[Any]]:
    """Yield what the last token of each prefix of these tokens sees, from the first token on."""
    state = 0
    for length, token_id in enumerate(tokens, 1):
        state = _next_state(state, token_id)
        tables = [
            [_digest(tokens[position], position, table) for position in _window(length, window)]
            for table, window in enumerate(layout.windows)
        ]
        yield _seen(tables, state if layout.snapshot_blocks else None)


def expected_tokens(
    prompt: Sequence[int],
    count: int,
    vocab_size: int = 50,
    stop_ids: frozenset[int] = frozenset(),
    layout: KVLayout = PLAIN,
) -> list[int]:
    """Return the tokens that the fake model generates for a prompt."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        *_, seen = _all_seen(tokens, layout)
        tokens.append(_next_token(seen, vocab_size))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


def _score(token_id: int, seen: Sequence[Any]) -> PositionLogprobs:
    """Return the fake model's logprob of a token after all that is seen."""
    logprob = -(crc32(repr((token_id, seen)).encode()) % 1000) / 100
    return pack_logprobs([TokenLogprob(token_id, logprob, 1)])


def expected_scores(prompt: Sequence[int], layout: KVLayout = PLAIN) -> list[PositionLogprobs | None]:
    """Return the fake model's logprobs of a prompt."""
    scored = zip(prompt[1:], _all_seen(prompt, layout), strict=False)
    return [None, *(_score(token_id, seen) for token_id, seen in scored)]


def _pooled(seen: Sequence[Any]) -> bytes:
    return array("f", [crc32(repr(seen).encode()) % 1000, len(seen)]).tobytes()


def expected_vector(prompt: Sequence[int]) -> list[float]:
    """Return the output of the fake model's head for a text."""
    *_, seen = _all_seen(prompt, PLAIN)
    return array("f", _pooled(seen)).tolist()


@dataclass(slots=True)
class _Row:
    request: RequestSpec
    tokens: list[int]
    tables: list[list[int]]
    states: dict[int, Any] = field(default_factory=dict)  # by number of tokens: those of the last entry


class FakeRunner:
    """Implements `Runner` for tests and scheduler benchmarks."""

    def __init__(self, num_blocks: int, layout: KVLayout, vocab_size: int = 50) -> None:
        self.layout = layout
        self.block_size = layout.block_size
        self.vocab_size = vocab_size
        self.memory: list[list[Any]] = [[None] * layout.block_size for _ in range(num_blocks)]
        self.rows: dict[int, _Row] = {}
        self.states: dict[int, Any] = {}  # the recurrent state of each row
        self.num_computed = 0

    def launch(self, batch: Batch) -> Sampled:
        for row, request in batch.admissions:
            self.rows[row] = _Row(request, list(request.token_ids), [[] for _ in self.layout.windows])
        for row, first, block_ids, table in batch.tables:
            if row in self.rows:
                ids = self.rows[row].tables[table]
                ids[first:] = [-1] * (first - len(ids)) + block_ids
        for row, block_ids in batch.restores:
            self.states[row] = self._load_state(block_ids)
        for row, block_ids in batch.saves:
            self._store_state(block_ids, self.states[row])
        for entry, draft in batch.drafts.items():
            assert batch.counts[entry] == 1 + len(draft), "a decode computes its token and its drafts"
            self.rows[batch.rows[entry]].tokens += draft
        entries = list(zip(batch.rows, batch.starts, batch.counts, batch.samples, strict=True))
        for row, start, count, _ in entries:  # a step writes all its KV before it reads any
            self._advance_state(row, start, count)
            self._write(self.rows[row], start, count)
        for entry, position, block_ids in batch.captures:
            start, count = batch.starts[entry], batch.counts[entry]
            assert start < position < start + count, "a state is captured inside an entry"
            self._store_state(block_ids, self.rows[batch.rows[entry]].states[position])
        scores = {
            entry: self._scores(self.rows[row], start, count)
            for entry, (row, start, count, _) in enumerate(entries)
            if self.rows[row].request.params.prompt_logprobs is not None
        }
        token_ids = [
            self._verify(row, start + count, batch.drafts.get(entry, [])) if samples else []
            for entry, (row, start, count, samples) in enumerate(entries)
        ]
        vectors = {
            entry: _pooled(self._visible(self.rows[row], start + count))
            for entry, (row, start, count, _) in enumerate(entries)
            if self.rows[row].request.task == "pool"
            and start + count == self.rows[row].request.num_prompt_tokens
        }
        return Sampled(
            token_ids,
            prompt_logprobs={entry: logprobs for entry, logprobs in scores.items() if logprobs},
            vectors=vectors,
            drafts={
                entry: self._guess(self.rows[batch.rows[entry]], count)
                for entry, count in enumerate(batch.wanted_drafts)
                if count
            },
        )

    # ---- memory ----

    def _write(self, row: _Row, start: int, count: int) -> None:
        for table, block_ids in enumerate(row.tables):
            for position in range(start, start + count):
                block_id, offset = block_ids[position // self.block_size], position % self.block_size
                assert block_id >= 0, "a token needs a block"
                self.memory[block_id][offset] = _digest(row.tokens[position], position, table)
        self.num_computed += count

    def _advance_state(self, number: int, start: int, count: int) -> None:
        if not self.layout.snapshot_blocks:
            return
        row, state = self.rows[number], self.states[number] if start else 0
        row.states = {}
        for position in range(start, start + count):
            state = row.states[position + 1] = _next_state(state, row.tokens[position])
        self.states[number] = state

    def _store_state(self, block_ids: Sequence[int], state: Any) -> None:
        assert len(block_ids) == self.layout.snapshot_blocks
        for part, block_id in enumerate(block_ids):
            self.memory[block_id][0] = state, part

    def _load_state(self, block_ids: Sequence[int]) -> Any:
        parts = [self.memory[block_id][0] for block_id in block_ids]
        state = parts[0][0] if isinstance(parts[0], tuple) else None
        return state if parts == [(state, part) for part in range(len(parts))] else repr(parts)

    def _visible(self, row: _Row, length: int) -> Sequence[Any]:
        size, memory = self.block_size, self.memory
        tables = [
            [memory[block_ids[p // size]][p % size] for p in _window(length, window)]
            for block_ids, window in zip(row.tables, self.layout.windows, strict=True)
        ]
        return _seen(tables, row.states[length] if self.layout.snapshot_blocks else None)

    # ---- results ----

    def _scores(self, row: _Row, start: int, count: int) -> list[PositionLogprobs]:
        """Return the logprobs of the prompt tokens that this chunk predicts."""
        last = min(start + count, row.request.num_prompt_tokens - 1)
        return [_score(row.tokens[end], self._visible(row, end)) for end in range(start + 1, last + 1)]

    def _verify(self, number: int, length: int, draft: Sequence[int]) -> list[int]:
        """Sample after a row's last token, and after each draft that was sampled before it."""
        row = self.rows[number]
        assert length == len(row.tokens), "a step samples only after a row's last token"
        known = length - len(draft)
        sampled: list[int] = []
        for guess in (*draft, None):
            sampled.append(_next_token(self._visible(row, known + len(sampled)), self.vocab_size))
            if sampled[-1] != guess:
                break
        row.tokens[known:] = sampled
        if draft and self.layout.snapshot_blocks:
            self.states[number] = row.states[known + len(sampled) - 1]
        return sampled

    def _guess(self, row: _Row, count: int) -> list[int]:
        """Guess what follows all tokens of a row, rightly for the most part."""
        end, request = len(row.tokens), row.request
        assert end + count <= request.num_prompt_tokens + request.max_tokens, "guesses end with the request"
        for position in range(end - 1, end + count - 2):  # the guesses from which others are made
            for block_ids in row.tables:
                assert block_ids[position // self.block_size] >= 0, "a guess needs a block"
        right = expected_tokens(row.tokens, count, self.vocab_size, layout=self.layout)
        return [token if crc32(repr(right[: i + 1]).encode()) % 4 else 0 for i, token in enumerate(right)]

    def collect(self, handle: Sampled) -> Sampled:
        return handle

    def close(self) -> None:
        self.rows.clear()
