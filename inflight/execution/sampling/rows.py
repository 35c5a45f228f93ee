"""Sampling parameters of each row for the torch sampler, and plans of which entries of a step use which feature.

Numbers are on the device, lists and flags on the host. In a plan, an `entry` is a row of the step's logits [S, V]. A
place (entry, token id) is stored flat, as entry * V + token_id, so that one indexed operation reaches the logits of
many requests.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from inflight.errors import EngineError
from inflight.execution.sampling.interface import RowNumbers, has_penalties, host_masks, is_greedy
from inflight.request import RequestSpec

# A row with top_k sorts the smallest of these numbers of candidates that holds its k. The width depends only
# on the row's own k: a neighbour with a larger k must not change the order of its sums.
CANDIDATE_WIDTHS = (128, 1024, 8192)

_NUM_FLOATS = 6
_NUM_INTS = 6
_ROW = struct.Struct(f"={_NUM_FLOATS}f{_NUM_INTS}i")


@dataclass(frozen=True, slots=True)
class RowTraits:
    """The features that a row uses. Id lists are int64 on the device, ready to be concatenated."""

    greedy: bool
    width: int  # candidates to sort for top_k; 0: no top_k
    nucleus: bool  # top_p without top_k
    min_p: bool
    penalties: bool
    logprobs: int | None
    allowed_ids: Tensor | None  # [n]
    mask: Tensor | None  # [V] bool, for constrained rows: written at every step
    bias_ids: Tensor | None  # [n]
    bias_values: Tensor | None  # [n] float32
    stop_ids: Tensor | None  # [n], forbidden while the row is shorter than min_length
    bad_words: Tensor | None  # [n, longest], padded with -1 on the left


class SamplingRows:
    """Permanent sampling parameters of `max_rows` rows.

    `RowNumbers` are the columns of one small matrix of 32-bit words, [max_rows, 12], so that admitting a request takes
    one copy.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device | str) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.version = 0  # changes whenever a row does
        self._table = torch.zeros(max_rows, _NUM_FLOATS + _NUM_INTS, dtype=torch.int32, device=self.device)
        self._traits: list[RowTraits | None] = [None] * max_rows
        self.host_masks = host_masks(max_rows, vocab_size)
        floats = self._table[:, :_NUM_FLOATS].view(torch.float32)
        self.temperature, self.log_min_p, self.top_p = floats[:, :3].unbind(1)
        self.repetition_penalty, self.frequency_penalty, self.presence_penalty = floats[:, 3:].unbind(1)
        ints = self._table[:, _NUM_FLOATS:]
        self.seed_low, self.seed_high, self.top_k = ints[:, :3].unbind(1)
        self.num_prompt_tokens, self.min_length, self.argmax = ints[:, 3:].unbind(1)

    def set(self, row: int, request: RequestSpec) -> None:
        """Assign `request` to `row`."""
        numbers = RowNumbers.of(request, self.vocab_size)
        self._traits[row] = self._read_traits(request, numbers.top_k)
        self.version += 1
        words = bytearray(_ROW.pack(*numbers))
        self._table[row] = self._to_device(torch.frombuffer(words, dtype=torch.int32))

    def clear(self, row: int) -> None:
        """Free `row`. Its data on the device stays until the next `set`, but nothing reads it."""
        self._traits[row] = None
        self.version += 1

    def set_masks(self, rows: Sequence[int]) -> None:
        """Let these rows sample next what their masks in `host_masks` allow."""
        bits = self.host_masks[list(rows)]
        chosen = np.unpackbits(bits.view(np.uint8), axis=1, count=self.vocab_size, bitorder="little")
        for row, tokens in zip(rows, torch.from_numpy(chosen), strict=True):
            mask = self.traits(row).mask
            assert mask is not None
            mask.copy_(tokens)

    def traits(self, row: int) -> RowTraits:
        traits = self._traits[row]
        if traits is None:
            raise EngineError(f"row {row} cannot sample: it holds no request (call set() first)")
        return traits

    def upload(self, values: Sequence[Any], dtype: torch.dtype) -> Tensor:
        """Return a list as a tensor on the device, without waiting for the device."""
        return self._to_device(torch.tensor(values, dtype=dtype))

    def _to_device(self, tensor: Tensor) -> Tensor:
        # Torch caches pinned memory, and reuses none that a copy may still be reading.
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor

    def _read_traits(self, request: RequestSpec, top_k: int) -> RowTraits:
        params = request.params
        greedy = is_greedy(params)
        bias = {i: value for i, value in (params.logit_bias or {}).items() if 0 <= i < self.vocab_size}
        allowed = params.allowed_token_ids
        has_minimum = params.min_tokens > 0
        is_masked = params.structured_outputs is not None
        return RowTraits(
            greedy=greedy,
            width=self._width(top_k) if top_k and not greedy else 0,
            nucleus=params.top_p < 1 and not top_k and not greedy,
            min_p=params.min_p > 0 and not greedy,
            penalties=has_penalties(params),
            logprobs=None if params.logprobs is None else min(params.logprobs, self.vocab_size),
            allowed_ids=None if allowed is None else self._ids(allowed),
            mask=torch.ones(self.vocab_size, dtype=torch.bool, device=self.device) if is_masked else None,
            bias_ids=self._ids(bias) if bias else None,
            bias_values=self.upload(list(bias.values()), torch.float32) if bias else None,
            stop_ids=self._ids(sorted(request.stop_ids)) if has_minimum and request.stop_ids else None,
            bad_words=self._bad_words(request.bad_word_ids),
        )

    def _width(self, top_k: int) -> int:
        widths = (width for width in CANDIDATE_WIDTHS if top_k <= width < self.vocab_size)
        return next(widths, self.vocab_size)

    def _ids(self, ids: Iterable[int]) -> Tensor:
        # Ids outside the vocabulary can never be sampled; in a flat index they would hit another row.
        return self.upload([i for i in ids if 0 <= i < self.vocab_size], torch.int64)

    def _bad_words(self, words: Sequence[Sequence[int]]) -> Tensor | None:
        words = [word for word in words if word and all(0 <= i < self.vocab_size for i in word)]
        if not words:
            return None
        longest = max(map(len, words))
        return self.upload([[-1] * (longest - len(word)) + list(word) for word in words], torch.int64)


@dataclass(frozen=True, slots=True)
class Allowed:
    """Entries that may sample only the tokens at `places`."""

    entries: Tensor  # [A]
    places: Tensor  # [n]


@dataclass(frozen=True, slots=True)
class BadWords:
    """Word i forbids `places[i]` while the last outputs of its entry are `prefixes[i]`."""

    entries: Tensor  # [n]
    places: Tensor  # [n], of the last token of each word
    prefixes: Tensor  # [n, longest - 1], padded with -1 on the left


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """The entries that use each feature; None where no entry does."""

    rows: Tensor  # [S] int64
    greedy: Tensor | None  # entries
    dense: Tensor | None  # entries that sample from the whole vocabulary
    top_k: dict[int, Tensor]  # candidates to sort -> entries
    nucleus: Tensor | None  # entries with top_p alone
    min_p: bool  # an entry of dense or nucleus uses min_p
    penalties: Tensor | None  # entries
    allowed: Allowed | None
    masks: dict[int, Tensor]  # [V] bool, by entry
    bad_words: BadWords | None
    stops: tuple[Tensor, Tensor] | None  # entries [n] and places [n]
    bias: tuple[Tensor, Tensor] | None  # places [n] and values [n]
    logprobs: Tensor | None  # entries with logprobs
    logprob_entries: tuple[int, ...] = ()  # the same, on the host
    logprob_counts: tuple[int, ...] = ()  # the number of most likely tokens of each

    @property
    def adjusts(self) -> bool:
        """Whether some logits change before a token is chosen."""
        parts = (self.allowed, self.bad_words, self.stops, self.bias, self.penalties)
        return bool(self.masks) or any(part is not None for part in parts)


def make_plan(state: SamplingRows, rows: Sequence[int]) -> SamplingPlan:
    return _Planner(state, [state.traits(row) for row in rows]).plan(rows)


@dataclass(slots=True)
class _Planner:
    state: SamplingRows
    traits: list[RowTraits]
    top_k: dict[int, list[int]] = field(default_factory=dict)

    def plan(self, rows: Sequence[int]) -> SamplingPlan:
        for entry, traits in enumerate(self.traits):
            if traits.width:
                self.top_k.setdefault(traits.width, []).append(entry)
        dense = [i for i, t in enumerate(self.traits) if not (t.greedy or t.width or t.nucleus)]
        logprobs = [(i, t.logprobs) for i, t in enumerate(self.traits) if t.logprobs is not None]
        return SamplingPlan(
            rows=self.state.upload(rows, torch.int64),
            greedy=self._entries([i for i, t in enumerate(self.traits) if t.greedy]),
            dense=self._entries(dense),
            top_k={width: self._index(entries) for width, entries in self.top_k.items()},
            nucleus=self._entries([i for i, t in enumerate(self.traits) if t.nucleus]),
            min_p=any(t.min_p and not t.width for t in self.traits),
            penalties=self._entries([i for i, t in enumerate(self.traits) if t.penalties]),
            allowed=self._allowed(),
            masks={i: t.mask for i, t in enumerate(self.traits) if t.mask is not None},
            bad_words=self._bad_words(),
            stops=self._stops(),
            bias=self._bias(),
            logprobs=self._entries([i for i, _ in logprobs]),
            logprob_entries=tuple(i for i, _ in logprobs),
            logprob_counts=tuple(count for _, count in logprobs),
        )

    def _index(self, entries: list[int]) -> Tensor:
        return self.state.upload(entries, torch.int64)

    def _entries(self, entries: list[int]) -> Tensor | None:
        return self._index(entries) if entries else None

    def _places(self, ids: dict[int, Tensor]) -> Tensor:
        vocab_size = self.state.vocab_size
        return torch.cat([entry * vocab_size + token_ids for entry, token_ids in ids.items()])

    def _owners(self, ids: dict[int, Tensor]) -> Tensor:
        """Return the entry of each place."""
        return self._index([entry for entry, token_ids in ids.items() for _ in range(len(token_ids))])

    def _allowed(self) -> Allowed | None:
        ids = {i: t.allowed_ids for i, t in enumerate(self.traits) if t.allowed_ids is not None}
        return Allowed(self._index(list(ids)), self._places(ids)) if ids else None

    def _stops(self) -> tuple[Tensor, Tensor] | None:
        ids = {i: t.stop_ids for i, t in enumerate(self.traits) if t.stop_ids is not None}
        return (self._owners(ids), self._places(ids)) if ids else None

    def _bias(self) -> tuple[Tensor, Tensor] | None:
        ids = {i: t.bias_ids for i, t in enumerate(self.traits) if t.bias_ids is not None}
        values = [t.bias_values for t in self.traits if t.bias_values is not None]
        return (self._places(ids), torch.cat(values)) if ids else None

    def _bad_words(self) -> BadWords | None:
        words = {i: t.bad_words for i, t in enumerate(self.traits) if t.bad_words is not None}
        if not words:
            return None
        longest = max(table.shape[1] for table in words.values())
        prefixes = [pad(t[:, :-1], (longest - t.shape[1], 0), value=-1) for t in words.values()]
        places = self._places({entry: table[:, -1] for entry, table in words.items()})
        return BadWords(self._owners(words), places, torch.cat(prefixes))
