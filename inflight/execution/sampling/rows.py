"""What each row asks of the sampler: numbers on the device, lists and flags on the host."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inflight.errors import EngineError
from inflight.execution.sampling.randomness import seed_words
from inflight.request import Request

# Below this a temperature is greedy: float32 logits divided by less would overflow.
MIN_TEMPERATURE = 1e-5
# The smallest normal float32: a penalty that underflowed to 0 would divide 0 by 0.
MIN_REPETITION_PENALTY = 2.0**-126
# A row with top_k sorts as many candidates as the first of these that holds its k. The width follows from
# the row's own k alone: its sums must not run over more places because a neighbour asked for more.
CANDIDATE_WIDTHS = (128, 1024, 8192)

_FLOATS = ("temperature", "log_min_p", "top_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
_INTS = ("seed_low", "seed_high", "top_k", "num_prompt_tokens", "min_length")


@dataclass(frozen=True, slots=True)
class RowTraits:
    """Which features a row uses. Id lists are int64 on the device, ready to be concatenated."""

    greedy: bool
    width: int  # candidates to sort for top_k; 0: no top_k
    nucleus: bool  # top_p without top_k
    min_p: bool
    penalties: bool
    logprobs: int | None
    allowed_ids: Tensor | None  # [n]
    bias_ids: Tensor | None  # [n]
    bias_values: Tensor | None  # [n] float32
    stop_ids: Tensor | None  # [n], forbidden while the row is shorter than min_length
    bad_words: Tensor | None  # [n, longest], padded with -1 on the left


class SamplingRows:
    """Permanent sampling parameters of `max_rows` rows.

    Each parameter is a column of one of two small matrices, so that admitting a request is two copies.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device | str) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.version = 0  # changes whenever a row does
        self._floats = torch.zeros(max_rows, len(_FLOATS), dtype=torch.float32, device=self.device)
        self._ints = torch.zeros(max_rows, len(_INTS), dtype=torch.int32, device=self.device)
        self._traits: list[RowTraits | None] = [None] * max_rows
        self.temperature, self.log_min_p, self.top_p = self._floats[:, :3].unbind(1)
        self.repetition_penalty, self.frequency_penalty, self.presence_penalty = self._floats[:, 3:].unbind(1)
        self.seed_low, self.seed_high, self.top_k = self._ints[:, :3].unbind(1)
        self.num_prompt_tokens, self.min_length = self._ints[:, 3:].unbind(1)

    def set(self, row: int, request: Request) -> None:
        """`request` takes `row`."""
        params = request.params
        greedy = params.temperature < MIN_TEMPERATURE
        top_k = params.top_k if 0 < params.top_k < self.vocab_size else 0
        floats = (
            1.0 if greedy else params.temperature,
            math.log(params.min_p) if params.min_p > 0 else -math.inf,
            params.top_p,
            max(params.repetition_penalty, MIN_REPETITION_PENALTY),
            params.frequency_penalty,
            params.presence_penalty,
        )
        min_length = request.num_prompt_tokens + min(params.min_tokens, request.max_tokens)
        ints = (*seed_words(request.seed), top_k, request.num_prompt_tokens, min_length)
        self._floats[row] = self.upload(floats, torch.float32)
        self._ints[row] = self.upload(ints, torch.int32)
        self._traits[row] = self._read_traits(request, greedy, top_k)
        self.version += 1

    def clear(self, row: int) -> None:
        """`row` is free. What the device holds stays until the next `set`: nothing reads it."""
        self._traits[row] = None
        self.version += 1

    def traits(self, row: int) -> RowTraits:
        found = self._traits[row]
        if found is None:
            raise EngineError(f"row {row} was asked to sample but holds no request: call set() first")
        return found

    def upload(self, values: Sequence[Any], dtype: torch.dtype) -> Tensor:
        """A list as a tensor on the device, without waiting for what the device is doing."""
        tensor = torch.tensor(values, dtype=dtype)
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor

    def _read_traits(self, request: Request, greedy: bool, top_k: int) -> RowTraits:
        params = request.params
        bias = {i: value for i, value in (params.logit_bias or {}).items() if 0 <= i < self.vocab_size}
        allowed = params.allowed_token_ids
        waits = params.min_tokens > 0
        return RowTraits(
            greedy=greedy,
            width=self._width(top_k) if top_k and not greedy else 0,
            nucleus=params.top_p < 1 and not top_k and not greedy,
            min_p=params.min_p > 0 and not greedy,
            penalties=params.repetition_penalty != 1
            or params.frequency_penalty != 0
            or params.presence_penalty != 0,
            logprobs=None if params.logprobs is None else min(params.logprobs, self.vocab_size),
            allowed_ids=None if allowed is None else self._ids(allowed),
            bias_ids=self._ids(bias) if bias else None,
            bias_values=self.upload(list(bias.values()), torch.float32) if bias else None,
            stop_ids=self._ids(sorted(request.stop_ids)) if waits and request.stop_ids else None,
            bad_words=self._bad_words(request.bad_word_ids),
        )

    def _width(self, top_k: int) -> int:
        widths = (width for width in CANDIDATE_WIDTHS if top_k <= width < self.vocab_size)
        return next(widths, self.vocab_size)

    def _ids(self, ids: Iterable[int]) -> Tensor:
        # An id outside the vocabulary can never be sampled. Let through, it would hit a neighbour's row.
        return self.upload([i for i in ids if 0 <= i < self.vocab_size], torch.int64)

    def _bad_words(self, words: Sequence[Sequence[int]]) -> Tensor | None:
        words = [word for word in words if word and all(0 <= i < self.vocab_size for i in word)]
        if not words:
            return None
        longest = max(map(len, words))
        return self.upload([[-1] * (longest - len(word)) + list(word) for word in words], torch.int64)
