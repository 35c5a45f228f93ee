"""Sampling on a rank that has the logits of only part of the vocabulary: candidates, exchange, choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.execution.sampling.triton.gumbel import NOT_SETTLED, SETTLED
from inflight.execution.sampling.triton.rank_candidates import (
    CANDIDATE_COLUMNS,
    COUNTED,
    count_kernel,
    rank_candidates_kernel,
)
from inflight.execution.sampling.triton.rows import TritonSamplingRows
from inflight.execution.sampling.triton.sample import (
    GROUPS_OF_CHUNK,
    RankCandidates,
    SamplingBatch,
    SamplingWorkspace,
    choose,
    launch_gumbel,
    write_logprobs,
)
from inflight.models.decoders.spec import GatheringCollective
from inflight.triton_utils.pdl import launch_options, supports_pdl


@dataclass(frozen=True, slots=True)
class RankTokens:
    """The part of the vocabulary whose logits this rank has, and the collective that reaches the other ranks."""

    first_id: int
    sizes: Sequence[int]  # number of tokens of each rank
    collective: GatheringCollective

    def gather(self, x: Tensor, columns: Tensor) -> Tensor:
        """Gather x, equally wide on all ranks; only columns[i] columns of row i are read. columns [S] int32"""
        return self.collective.gather(x, [x.shape[1]] * len(self.sizes), columns)


def sample_by_ranks(
    own: Tensor,
    part: RankTokens,
    batch: SamplingBatch,
    state: TritonSamplingRows,
    tokens: Tensor,
    workspace: SamplingWorkspace,
) -> None:
    """Sample like `sample_tokens`, from logits [S, n] of this rank's tokens. All ranks choose the same tokens.

    The other ranks' logits are read only for rows that candidates cannot settle, see `rank_candidates.py`.
    """
    workspace.check(own)
    own_candidates, columns, num_logits = _find_candidates(own, part.first_id, batch, state, workspace)
    rank_candidates = part.gather(own_candidates, columns)
    logits = part.collective.gather(own, part.sizes, num_logits)
    launch_gumbel(logits, 0, batch, state, workspace, NOT_SETTLED)
    choose(logits, batch, state, tokens, workspace, rank_candidates)
    counts, is_counted = _count_more_likely(own, rank_candidates, batch, state, workspace)
    counted = part.gather(counts, is_counted)
    pdl = supports_pdl(own.device)
    write_logprobs(
        logits,
        batch.ids,
        batch.logprobs,
        workspace,
        pdl,
        RankCandidates(rank_candidates, counted, is_counted),
    )


def _find_candidates(
    own: Tensor, first_id: int, batch: SamplingBatch, state: TritonSamplingRows, workspace: SamplingWorkspace
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's candidates [S, CANDIDATE_COLUMNS], the number of valid columns of each row, and the number of
    logits that each row needs from every rank, [S] int32 both."""
    launch_gumbel(own, first_id, batch, state, workspace, SETTLED)
    num_entries, vocab_size = own.shape
    rank_candidates = torch.empty(num_entries, CANDIDATE_COLUMNS, dtype=torch.float32, device=own.device)
    columns, num_logits = torch.empty(2, num_entries, dtype=torch.int32, device=own.device)
    pdl = supports_pdl(own.device)
    rank_candidates_kernel[(num_entries,)](
        own,
        batch.rows,
        state.table,
        workspace.changed,
        workspace.chunk_scores,
        workspace.chunk_ids,
        workspace.chunk_tops,
        workspace.group_tops,
        workspace.raw_tops,
        workspace.raw_masses,
        workspace.raw_group_tops,
        workspace.group_list,
        workspace.candidates,
        rank_candidates,
        columns,
        num_logits,
        vocab_size,
        first_id,
        workspace.num_chunks,
        workspace.num_groups,
        own.stride(0),
        CHUNK=GROUPS_OF_CHUNK,
        PDL=pdl,
        **workspace.searches(vocab_size),
        **launch_options(pdl),
    )
    return rank_candidates, columns, num_logits


def _count_more_likely(
    own: Tensor,
    rank_candidates: Tensor,
    batch: SamplingBatch,
    state: TritonSamplingRows,
    workspace: SamplingWorkspace,
) -> tuple[Tensor, Tensor]:
    """Count this rank's tokens that are more likely than the sampled ones, [S, COUNTED].

    Also return the number of valid columns of each row, [S] int32: 0 where no count is needed.
    """
    num_entries, vocab_size = own.shape
    counts = torch.empty(num_entries, COUNTED, dtype=torch.float32, device=own.device)
    columns = torch.empty(num_entries, dtype=torch.int32, device=own.device)
    pdl = supports_pdl(own.device)
    searches = workspace.searches(vocab_size)
    del searches["CHUNKS"]
    count_kernel[(num_entries,)](
        own,
        batch.rows,
        state.table,
        batch.ids,
        rank_candidates,
        workspace.raw_group_tops,
        workspace.group_list,
        counts,
        columns,
        vocab_size,
        workspace.num_groups,
        own.stride(0),
        RANKS=rank_candidates.shape[1] // CANDIDATE_COLUMNS,
        PDL=pdl,
        **searches,
        **launch_options(pdl),
    )
    return counts, columns
