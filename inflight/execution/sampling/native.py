"""Sampling by the compiled library: row parameters are packed on admission, and each step is one call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.errors import EngineError
from inflight.events import PositionLogprobs
from inflight.execution.sampling.interface import (
    LogprobTensors,
    RowNumbers,
    Samples,
    first_mask,
    has_penalties,
    host_masks,
)
from inflight.execution.sampling.sampler import Sampler, SamplingRows
from inflight.layers.native.library import Library, native_library
from inflight.request import RequestSpec

# `Row` in layers/native/adjust.h, which documents each field: `RowNumbers`, six of them floats, then the rest.
_FLOATS = RowNumbers._fields[:6]
_INTS = (
    *RowNumbers._fields[6:],
    *("num_logprobs", "penalises", "num_stops", "num_biases", "num_bad_words"),
)
_POINTERS = ("mask", "stops", "bias_ids", "biases", "bad_words")
ROW = np.dtype(
    [(name, np.float32) for name in _FLOATS]
    + [(name, np.int32) for name in _INTS]
    + [(name, np.int64) for name in _POINTERS],
    align=True,
)


class NativeSamplingRows:
    """Permanent sampling parameters of `max_rows` rows, as the library reads them."""

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.num_logprobs: dict[int, int] = {}  # by row, for rows that want logprobs
        self._table = np.zeros(max_rows, ROW)
        self.host_masks = host_masks(max_rows, vocab_size)
        self._lists: dict[int, tuple[NDArray[np.generic], ...]] = {}  # arrays that the rows point to

    def set(self, row: int, request: RequestSpec) -> None:
        """Assign `request` to `row`."""
        params = request.params
        self.num_logprobs.pop(row, None)
        if params.logprobs is not None:
            self.num_logprobs[row] = min(params.logprobs, self.vocab_size)
        bias = {i: value for i, value in (params.logit_bias or {}).items() if i < self.vocab_size}
        stops = self._known(request.stop_ids) if params.min_tokens > 0 else []
        words = [word for word in request.bad_word_ids if word and len(self._known(word)) == len(word)]
        self._lists[row] = lists = (
            first_mask(params, self.vocab_size),
            np.array(stops, dtype=np.int32),
            np.array([*bias], dtype=np.int32),
            np.array([*bias.values()], dtype=np.float32),
            np.array([part for word in words for part in (len(word), *word)], dtype=np.int32),
        )
        self._table[row] = (
            *RowNumbers.from_request(request, self.vocab_size),
            self.num_logprobs.get(row, -1),
            has_penalties(params),
            len(stops),
            len(bias),
            len(words),
            *(part.ctypes.data if part.size else 0 for part in lists),
        )

    def set_masks(self, rows: Sequence[int]) -> None:
        """Let these rows sample next what their masks in `host_masks` allow."""
        for row in rows:
            self._lists[row][0][:] = self.host_masks[row]

    def lift_masks(self, rows: Sequence[int]) -> None:
        """Let these constrained rows sample any token, until `set_masks`."""
        for row in rows:
            self._lists[row][0][:] = -1

    def address(self, rows: Iterable[int]) -> int:
        """Return the address of the table, after checking that these rows hold requests."""
        for row in rows:
            if row not in self._lists:
                raise EngineError(f"row {row} cannot sample: it holds no request (call set() first)")
        return self._table.ctypes.data

    def _known(self, ids: Iterable[int]) -> list[int]:
        # Ids outside the vocabulary can never be sampled, and the library does not check for them.
        return [i for i in ids if 0 <= i < self.vocab_size]


class NativeSampler:
    """`Sampler` in one call of the library. Threads take whole rows: a row's result does not depend on the others."""

    def __init__(self, library: Library, state: NativeSamplingRows) -> None:
        self.state = state
        self._library = library

    def sample(self, logits: Tensor, rows: Sequence[int], lengths: Tensor, tokens: Tensor) -> Samples:
        """Choose token number lengths[i] of row rows[i] from logits[i].

        logits [S, V] float32, contiguous, are overwritten. lengths [S] int32 or int64 count the tokens of
        each row before the new one. tokens [max_rows, max_len] int32 hold them.
        """
        table = self.state.address(rows)
        _check(logits, self.state.vocab_size)
        if tokens.dtype != torch.int32 or tokens.stride(1) != 1:
            raise EngineError(
                f"tokens are {tokens.dtype} with strides {tokens.stride()}: they must be dense int32"
            )
        num_logprobs = self.state.num_logprobs
        entries = tuple(i for i, row in enumerate(rows) if row in num_logprobs) if num_logprobs else ()
        counts = tuple(num_logprobs[rows[i]] for i in entries)
        logprobs = _empty_logprobs(counts) if entries else None
        row_ids = torch.tensor(rows, dtype=torch.int64)
        lengths = lengths.to(torch.int64).contiguous()
        token_ids = torch.empty(len(rows), dtype=torch.int64)
        bad = torch.empty(len(rows), dtype=torch.uint8)
        self._library.sample(
            logits.data_ptr(),
            *logits.shape,
            table,
            row_ids.data_ptr(),
            lengths.data_ptr(),
            tokens.data_ptr(),
            tokens.stride(0),
            token_ids.data_ptr(),
            bad.data_ptr(),
            *_pointers(logprobs),
            self._library.threads,
        )
        positions = [] if logprobs is None else logprobs.pack()
        return Samples(token_ids.tolist(), bad.tolist(), dict(zip(entries, positions, strict=True)))

    def score_prompt(self, logits: Tensor, target_ids: Tensor, num: int) -> list[PositionLogprobs]:
        """Score the prompt tokens target_ids [P] int64 and the top `num` under logits [P, V] that predict them."""
        _check(logits, self.state.vocab_size)
        target_ids = target_ids.contiguous()
        logprobs = _empty_logprobs((min(num, self.state.vocab_size),) * len(logits))
        to = *_pointers(logprobs), self._library.threads
        self._library.token_logprobs(logits.data_ptr(), *logits.shape, target_ids.data_ptr(), *to)
        return logprobs.pack()


def _empty_logprobs(counts: tuple[int, ...]) -> LogprobTensors:
    shape = (len(counts), 1 + max(counts, default=0))
    ids, ranks = torch.empty(2, *shape, dtype=torch.int64)
    return LogprobTensors(ids, torch.empty(shape), ranks, counts)


def _pointers(to: LogprobTensors | None) -> tuple[int | None, int | None, int | None, int]:
    """Return where the library writes logprobs, and how many per position."""
    if to is None:
        return None, None, None, 0
    return to.token_ids.data_ptr(), to.logprobs.data_ptr(), to.ranks.data_ptr(), to.ranks.shape[1]


def _check(logits: Tensor, vocab_size: int) -> None:
    if logits.dtype != torch.float32 or not logits.is_contiguous() or logits.shape[1] != vocab_size:
        raise EngineError(
            f"logits are {logits.dtype} {list(logits.shape)} with strides {logits.stride()}: "
            f"they must be contiguous float32 [S, {vocab_size}]"
        )


def cpu_sampler(max_rows: int, vocab_size: int) -> NativeSampler | Sampler:
    """Return the compiled sampler, or the one in torch where the library cannot be built."""
    library = native_library()
    if library is None:
        return Sampler(SamplingRows(max_rows, vocab_size))
    return NativeSampler(library, NativeSamplingRows(max_rows, vocab_size))
