"""Log-probabilities of tokens under the raw logits: before any temperature, penalty or mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.events import PositionLogprobs
from inflight.execution.sampling.candidates import row_tiles, top_candidates


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """P positions with a target each, then the N most likely tokens in order, of equals the lower id."""

    token_ids: Tensor  # [P, 1 + N] int64
    logprobs: Tensor  # [P, 1 + N] float32
    ranks: Tensor  # [P, 1 + N] int64: 1 + the number of tokens with a strictly greater logit
    counts: tuple[int, ...]  # how many of the N each position wants

    def fetch(self) -> LogprobTensors:
        """The same in host memory, once the device has come this far."""
        return LogprobTensors(fetch(self.token_ids), fetch(self.logprobs), fetch(self.ranks), self.counts)

    def to_host(self) -> list[PositionLogprobs]:
        """Pack each position, as `events.pack_logprobs` does: the target first, then the most likely tokens."""
        columns = np.empty((len(self.counts), 3, self.token_ids.shape[1]), np.int32)
        columns[:, 0], columns[:, 2] = self.token_ids.numpy(), self.ranks.numpy()
        columns[:, 1] = self.logprobs.numpy().view(np.int32)
        return pack_columns(columns, self.counts)


def fetch(tensor: Tensor) -> Tensor:
    """Start copying to host memory without waiting. On a CPU the tensor itself."""
    if tensor.device.type != "cuda":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def score(logits: Tensor, target_ids: Tensor, counts: tuple[int, ...]) -> LogprobTensors:
    """Targets [P] int64 and the most likely tokens of raw logits [P, V]; `counts` may not exceed V."""
    shape = (len(logits), 1 + max(counts, default=0))
    token_ids = torch.empty(shape, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(shape, dtype=torch.float32, device=logits.device)
    ranks = torch.empty_like(token_ids)
    token_ids[:, 0] = target_ids
    for tile in row_tiles(logits):
        _score_tile(logits[tile], token_ids[tile], logprobs[tile], ranks[tile])
    return LogprobTensors(token_ids, logprobs, ranks, counts)


def _score_tile(logits: Tensor, token_ids: Tensor, logprobs: Tensor, ranks: Tensor) -> None:
    """Fill in everything but the targets, which are the first column of `token_ids`."""
    ranks[:, 0] = 1 + (logits > logits.gather(1, token_ids[:, :1])).sum(-1)
    num = token_ids.shape[1] - 1
    if num:
        values, token_ids[:, 1:] = top_candidates(logits, num)
        # Whatever is greater than one of the best is itself one of them.
        ranks[:, 1:] = 1 + (values[:, None, :] > values[:, :, None]).sum(-1)  # [P, N, N] -> [P, N]
    logprobs.copy_(logits.log_softmax(-1).gather(1, token_ids))


def pack_columns(columns: NDArray[np.int32], counts: Sequence[int]) -> list[PositionLogprobs]:
    """Pack positions that want `counts` of the most likely tokens beside the target.

    columns [P, 3, 1 + N]: ids, log-probabilities as bits and ranks, the target's first.
    """
    width = columns.shape[2]
    if min(counts, default=0) < width - 1:
        return [
            position[:, : 1 + count].astype("<i4").tobytes()
            for position, count in zip(columns, counts, strict=True)
        ]
    data, size = columns.astype("<i4", copy=False).tobytes(), 12 * width
    return [data[start : start + size] for start in range(0, len(data), size)]
