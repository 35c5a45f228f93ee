"""Log-probabilities of tokens under the raw logits: before any temperature, penalty or mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.events import PositionLogprobs, TokenLogprob
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
        """One tuple a position: the target first, then the most likely tokens that are not the target."""
        columns = (self.token_ids.tolist(), self.logprobs.tolist(), self.ranks.tolist())
        return [
            position(ids[: 1 + count], logprobs, ranks)
            for ids, logprobs, ranks, count in zip(*columns, self.counts, strict=True)
        ]


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


def position(token_ids: list[int], logprobs: list[float], ranks: list[int]) -> PositionLogprobs:
    """The target first, then the most likely tokens that are not the target."""
    target, *best = map(TokenLogprob, token_ids, logprobs, ranks)
    return (target, *(candidate for candidate in best if candidate.token_id != target.token_id))
