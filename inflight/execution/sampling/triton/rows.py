"""Sampling parameters of each row in device memory: numbers, mask bits, lists, and state that its steps update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.execution.sampling.interface import WORD, RowNumbers, first_mask, has_penalties
from inflight.execution.sampling.triton.row_table import (
    ARGMAX,
    BIAS,
    FORBID,
    LOGPROBS,
    MASK,
    PENALTIES,
    ROW,
    WORDS,
    start_rows_kernel,
)
from inflight.request import RequestSpec

START_SIZE = 2048
STOP_RULE = -1  # in place of a rule's length: see `row_table.py`


@dataclass(frozen=True, slots=True)
class _Lists:
    """A row's lists in device memory, held as long as kernels may read the row."""

    bias: Tensor | None
    rules: Tensor | None


class TritonSamplingRows:
    """Permanent rows for the kernels of this package. Nothing here waits for the device."""

    def __init__(
        self, max_rows: int, vocab_size: int, device: torch.device | str, max_draft_masks: int = 0
    ) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        words = -(-vocab_size // WORD)
        # [max_rows, WORDS]: see `row_table.py`.
        self.table = torch.zeros(max_rows, WORDS.value, dtype=torch.int32, device=self.device)
        # The masks of rows, then those of samples behind drafts.
        self.draft_masks_at = max_rows
        self.mask = torch.zeros(max_rows + max_draft_masks, words, dtype=torch.int32, device=self.device)
        self.forbidden = torch.zeros(max_rows, words, dtype=torch.int32, device=self.device)
        self.seen = torch.zeros(max_rows, words * WORD, dtype=torch.int16, device=self.device)
        self._sent_masks = torch.zeros(
            max_rows, words, dtype=torch.int32, pin_memory=self.device.type == "cuda"
        )
        self.host_masks: NDArray[np.int32] = self._sent_masks.numpy()
        # The number of most likely tokens each row reports; -1: no log-probabilities.
        self._num_logprobs = np.full(max_rows, -1, dtype=np.int32)
        self._num_rows_with_logprobs = 0
        self._lists: dict[int, _Lists] = {}
        self.stateful: set[int] = set()  # rows with penalties or rules, whose steps update device state

    def set_many(self, admissions: Sequence[tuple[int, RequestSpec]], tokens: Tensor) -> None:
        """Assign each request to its row; the last one wins if a row occurs twice. `tokens` is [max_rows, max_len]."""
        if not admissions:
            return
        latest = dict(admissions)
        had_logprobs = self._num_logprobs[[*latest]] >= 0
        packed = b"".join(self._pack(row, request) for row, request in latest.items())
        self._num_rows_with_logprobs += int((self._num_logprobs[[*latest]] >= 0).sum() - had_logprobs.sum())
        words = self._to_device(np.frombuffer(packed, dtype=np.int32)).view(len(latest), -1)
        self.table.index_copy_(0, self._to_device(np.array([*latest], dtype=np.int64)), words)
        started = [(row, len(request.token_ids)) for row, request in latest.items() if row in self.stateful]
        if started:
            self._start(started, tokens)

    def warm_up(self, tokens: Tensor) -> None:
        """Compile the kernel that the first row with penalties or rules needs, on a row that it leaves unchanged."""
        self._start([(0, 0)], tokens)

    def _start(self, started: Sequence[tuple[int, int]], tokens: Tensor) -> None:
        """Initialize the device state of rows with penalties or rules, given as (row, number of tokens)."""
        rows, lengths = self._to_device(np.array(started, dtype=np.int32).T.copy())
        start_rows_kernel[(len(started),)](
            rows,
            lengths,
            self.table,
            tokens,
            self.forbidden,
            self.seen,
            self.vocab_size,
            tokens.stride(0),
            SIZE=START_SIZE,
            num_warps=8,
        )

    def logprob_counts(self, rows: NDArray[np.int32]) -> NDArray[np.int32] | None:
        """Return how many most likely tokens each row reports, or negative for none; None if no row wants any."""
        if self._num_rows_with_logprobs == 0:
            return None
        counts = self._num_logprobs[rows]
        return counts if (counts >= 0).any() else None

    def _pack(self, row: int, request: RequestSpec) -> bytes:
        params = request.params
        numbers = RowNumbers.from_request(request, self.vocab_size)
        bias, rules = self._bias(request), _rules_of(request, self.vocab_size)
        lists = _Lists(
            None if bias is None else self._to_device(bias),
            self._to_device(_columns(rules)) if rules else None,
        )
        self._lists[row] = lists
        penalises = has_penalties(params)
        (self.stateful.add if penalises or rules else self.stateful.discard)(row)
        flags = PENALTIES.value * penalises
        mask = first_mask(params, self.vocab_size)
        if mask.size:
            flags |= MASK.value
            if params.structured_outputs is None:
                self.mask[row] = self._to_device(mask)
        flags |= BIAS.value * (bias is not None) | FORBID.value * bool(rules)
        flags |= LOGPROBS.value * (params.logprobs is not None)
        num_logprobs = -1 if params.logprobs is None else min(params.logprobs, self.vocab_size)
        self._num_logprobs[row] = num_logprobs
        return ROW.pack(
            *numbers[: ARGMAX.value],
            numbers.argmax,
            flags,
            numbers.num_prompt_tokens,
            numbers.min_length,
            num_logprobs,
            0 if bias is None else len(bias) // 2,
            len(rules),
            0 if lists.bias is None else lists.bias.data_ptr(),
            0 if lists.rules is None else lists.rules.data_ptr(),
        )

    def set_masks(self, rows: Sequence[int]) -> None:
        """Let these rows sample next what their masks in `host_masks` allow."""
        first, end = min(rows), max(rows) + 1
        sent = self._sent_masks[first:end]
        if len(rows) == end - first:
            self.mask[first:end].copy_(sent, non_blocking=True)
            return
        indices = self._to_device(np.array(rows, dtype=np.int64))
        received = sent.to(self.device, non_blocking=True)
        self.mask.index_copy_(0, indices, received[indices - first])

    def _bias(self, request: RequestSpec) -> NDArray[np.int32] | None:
        biases = sorted((request.params.logit_bias or {}).items())
        known = [(i, value) for i, value in biases if 0 <= i < self.vocab_size]
        if not known:
            return None
        ids = np.array([i for i, _ in known], dtype=np.int32)
        return np.concatenate((ids, np.array([value for _, value in known], dtype=np.float32).view(np.int32)))

    def _to_device(self, array: NDArray[np.generic]) -> Tensor:
        # Torch caches pinned memory, and reuses none that a copy may still be reading.
        tensor = torch.from_numpy(array.copy())
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor


_Rule = tuple[int, int, Sequence[int]]  # the forbidden token, the length of its prefix, the prefix


def _columns(rules: list[_Rule]) -> NDArray[np.int32]:
    """Lay out the rules in the columns that `row_table.py` reads."""
    prefixes = [prefix for _, _, prefix in rules]
    offsets = np.cumsum([0, *map(len, prefixes)])[:-1]
    flat = [token_id for prefix in prefixes for token_id in prefix]
    lasts, lengths = ([rule[column] for rule in rules] for column in (0, 1))
    return np.array([*lasts, *lengths, *offsets, *flat], dtype=np.int32)


def _rules_of(request: RequestSpec, vocab_size: int) -> list[_Rule]:
    """Return the request's rules, without those whose ids are outside the vocabulary."""
    rules: list[_Rule] = []
    if request.params.min_tokens > 0:
        rules += [(i, STOP_RULE, ()) for i in sorted(request.stop_ids) if 0 <= i < vocab_size]
    # Sorted by length: rules are compared in blocks, and a block takes as long as its longest rule.
    for word in sorted(request.bad_word_ids, key=len):
        if word and all(0 <= i < vocab_size for i in word):
            rules.append((word[-1], len(word) - 1, word[:-1]))
    return rules
