"""Sampling parameters of each row: numbers on the device, lists and flags on the host."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.errors import EngineError
from inflight.execution.sampling.parameters import WORD, RowNumbers, has_penalties, is_greedy
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

    def mask_buffer(self, num_rows: int) -> NDArray[np.int32]:
        """Return a buffer [num_rows, words] to fill and pass to `set_masks`."""
        return np.empty((num_rows, -(-self.vocab_size // WORD)), dtype=np.int32)

    def set_masks(self, rows: Sequence[int], bits: NDArray[np.int32]) -> None:
        """Set the tokens that masked rows may sample next: bits [len(rows), words]."""
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
