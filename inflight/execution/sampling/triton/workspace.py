"""Device memory through which the sampling kernels pass intermediate results."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from inflight.errors import EngineError
from inflight.execution.sampling.triton.gumbel import FEW

# A group of 64 logits is two cache lines of bfloat16; a row of more groups than this would not fit registers.
MIN_GROUP = 64
MAX_GROUPS = 4096
GROUPS_OF_CHUNK = 64
CHOOSE_WARPS = 16
TILE_LOGITS = 4096  # logits per iteration of a search
CANDIDATES = 2 * FEW.value
MAX_LOGPROBS = FEW.value  # reported per position


@dataclass(frozen=True, slots=True)
class SamplingWorkspace:
    """Intermediate results of at most `max_entries` entries."""

    group: int  # tokens of a group
    chunk_scores: Tensor  # [max_entries, num_chunks] float32
    chunk_ids: Tensor  # [max_entries, num_chunks] int32
    chunk_tops: Tensor  # [max_entries, num_chunks] float32
    chunk_masses: Tensor  # [max_entries, num_chunks] float32
    group_tops: Tensor  # [max_entries, num_groups] float32
    raw_tops: Tensor  # this and the next two: the same for the unmodified logits
    raw_masses: Tensor
    raw_group_tops: Tensor
    changed: Tensor  # [max_entries, vocab_size] float32
    group_list: Tensor  # [max_entries, num_groups] int32
    candidates: Tensor  # [max_entries, 4 * CANDIDATES] int32

    @classmethod
    def allocate(
        cls, max_entries: int, vocab_size: int, device: torch.device | str, group: int | None = None
    ) -> SamplingWorkspace:
        """Allocate the buffers. `group` is a power of two; by default it is chosen to fit the vocabulary."""
        group = group or max(MIN_GROUP, triton.next_power_of_2(triton.cdiv(vocab_size, MAX_GROUPS)))
        num_chunks = triton.cdiv(vocab_size, group * GROUPS_OF_CHUNK)
        num_groups = num_chunks * GROUPS_OF_CHUNK

        def space(width: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(max_entries, width, dtype=dtype, device=device)

        return cls(
            group=group,
            chunk_scores=space(num_chunks),
            chunk_ids=space(num_chunks, torch.int32),
            chunk_tops=space(num_chunks),
            chunk_masses=space(num_chunks),
            group_tops=space(num_groups),
            raw_tops=space(num_chunks),
            raw_masses=space(num_chunks),
            raw_group_tops=space(num_groups),
            changed=space(vocab_size),
            group_list=space(num_groups, torch.int32),
            candidates=space(4 * CANDIDATES, torch.int32),
        )

    def check(self, logits: Tensor) -> None:
        num_entries, vocab_size = logits.shape
        max_entries, num_groups = self.group_tops.shape
        if num_entries > max_entries or vocab_size > num_groups * self.group:
            raise EngineError(
                f"logits are {num_entries} x {vocab_size}: the workspace is for at most "
                f"{max_entries} x {num_groups * self.group}"
            )

    @property
    def num_chunks(self) -> int:
        return self.chunk_scores.shape[1]

    @property
    def num_groups(self) -> int:
        return self.group_tops.shape[1]

    def between(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the buffers that the Gumbel-max kernels write and the choice reads."""
        return self.chunk_scores, self.chunk_ids, self.chunk_tops, self.chunk_masses, self.group_tops

    def chunks_of(self, vocab_size: int) -> int:
        """Return the number of chunks of `vocab_size` tokens."""
        num_chunks: int = triton.cdiv(vocab_size, self.group * GROUPS_OF_CHUNK)
        return num_chunks

    def searches(self, vocab_size: int) -> dict[str, int]:
        """Return the compile-time arguments of kernels that search `vocab_size` tokens."""
        chunks = triton.next_power_of_2(self.chunks_of(vocab_size))
        return {
            "CHUNKS": chunks,
            "GROUPS": chunks * GROUPS_OF_CHUNK,
            "GROUP": self.group,
            "TILE": max(1, TILE_LOGITS // self.group),
            "CANDIDATES": CANDIDATES,
            "num_warps": CHOOSE_WARPS,
        }
