"""The launches of the sampling kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from inflight.errors import EngineError
from inflight.execution.sampling.rows import SamplingRows
from inflight.execution.sampling.triton.choose import choose_kernel
from inflight.execution.sampling.triton.race import race_kernel
from inflight.triton_utils.pdl import launch_options, supports_pdl

# A group of 64 logits is two cache lines of bfloat16; a row of more groups than this would not fit registers.
MIN_GROUP = 64
MAX_GROUPS = 4096
GROUPS_OF_CHUNK = 64
RACE_WARPS = 8
CHOOSE_WARPS = 8
# Groups of logits that a search looks into at once.
TILE = 32


@dataclass(frozen=True, slots=True)
class SamplingWorkspace:
    """What the first launch leaves for the second, for at most `max_entries` entries."""

    group: int  # tokens of a group
    chunk_scores: Tensor  # [max_entries, num_chunks] float32
    chunk_ids: Tensor  # [max_entries, num_chunks] int32
    chunk_tops: Tensor  # [max_entries, num_chunks] float32
    chunk_masses: Tensor  # [max_entries, num_chunks] float32
    group_tops: Tensor  # [max_entries, num_groups] float32
    group_list: Tensor  # [max_entries, num_groups] int32

    @classmethod
    def allocate(
        cls, max_entries: int, vocab_size: int, device: torch.device | str, group: int | None = None
    ) -> SamplingWorkspace:
        """`group` is a power of two, chosen to fit the vocabulary by default."""
        group = group or max(MIN_GROUP, triton.next_power_of_2(triton.cdiv(vocab_size, MAX_GROUPS)))
        num_chunks = triton.cdiv(vocab_size, group * GROUPS_OF_CHUNK)

        def space(width: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(max_entries, width, dtype=dtype, device=device)

        return cls(
            group=group,
            chunk_scores=space(num_chunks, torch.float32),
            chunk_ids=space(num_chunks, torch.int32),
            chunk_tops=space(num_chunks, torch.float32),
            chunk_masses=space(num_chunks, torch.float32),
            group_tops=space(num_chunks * GROUPS_OF_CHUNK, torch.float32),
            group_list=space(num_chunks * GROUPS_OF_CHUNK, torch.int32),
        )


def draw(
    logits: Tensor,
    rows: Tensor,
    lengths: Tensor,
    state: SamplingRows,
    tokens: Tensor,
    out_ids: Tensor,
    out_bad: Tensor,
    workspace: SamplingWorkspace,
) -> None:
    """Choose token number lengths[i] of row rows[i] from logits[i], and write it to tokens and out_ids[i].

    logits [S, V] float32, bfloat16 or float16, contiguous in the last dimension, are left as they are.
    rows [S] int32 are plain (`is_plain`), or negative: such an entry is padding and writes nothing.
    lengths [S] int32 count the tokens of each row before the new one. tokens [max_rows, max_len] int32.
    out_ids [S] int32. out_bad [S], bool or an integer type: the logits were not finite, and the token is
    some token of the vocabulary.
    """
    num_entries, vocab_size = logits.shape
    num_chunks, (max_entries, num_groups) = workspace.chunk_scores.shape[1], workspace.group_tops.shape
    if num_entries > max_entries or vocab_size > num_groups * workspace.group:
        raise EngineError(
            f"logits are {num_entries} x {vocab_size}: the workspace is for at most "
            f"{max_entries} x {num_groups * workspace.group}"
        )
    columns = (
        state.temperature,
        state.log_min_p,
        state.top_p,
        state.seed_low,
        state.seed_high,
        state.top_k,
        state.argmax,
    )
    between = (
        workspace.chunk_scores,
        workspace.chunk_ids,
        workspace.chunk_tops,
        workspace.chunk_masses,
        workspace.group_tops,
    )
    logits_stride, table_stride = logits.stride(0), state.temperature.stride(0)
    pdl = supports_pdl(logits.device)
    race_kernel[(num_chunks, num_entries)](
        logits,
        rows,
        lengths,
        *columns,
        *between,
        vocab_size,
        logits_stride,
        table_stride,
        GROUPS=GROUPS_OF_CHUNK,
        GROUP=workspace.group,
        PDL=pdl,
        num_warps=RACE_WARPS,
        **launch_options(pdl),
    )
    choose_kernel[(num_entries,)](
        logits,
        rows,
        lengths,
        *columns,
        *between,
        workspace.group_list,
        tokens,
        out_ids,
        out_bad,
        vocab_size,
        num_chunks,
        num_groups,
        logits_stride,
        table_stride,
        tokens.stride(0),
        CHUNKS=triton.next_power_of_2(num_chunks),
        GROUPS=triton.next_power_of_2(num_groups),
        GROUP=workspace.group,
        TILE=TILE,
        PDL=pdl,
        num_warps=CHOOSE_WARPS,
        **launch_options(pdl),
    )
