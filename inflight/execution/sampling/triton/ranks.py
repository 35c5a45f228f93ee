"""The launches of a rank that has the logits of some tokens: what it offers, what all ranks know, and a choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.execution.sampling.triton.draw import (
    Draws,
    Offered,
    choose,
    race,
    special_race,
    tell,
)
from inflight.execution.sampling.triton.offered import COUNTED, count_kernel
from inflight.execution.sampling.triton.offers import OFFER, offer_kernel
from inflight.execution.sampling.triton.race import NOT_SETTLED, SETTLED
from inflight.execution.sampling.triton.rows import DrawRows
from inflight.execution.sampling.triton.workspace import GROUPS_OF_CHUNK, SamplingWorkspace
from inflight.models.decoders.shard import GatheringCollective
from inflight.triton_utils.pdl import launch_options, supports_pdl


@dataclass(frozen=True, slots=True)
class RankTokens:
    """The tokens that a rank has the logits of, and how it reaches the other ranks."""

    first_id: int
    sizes: Sequence[int]  # of all ranks' parts
    collective: GatheringCollective

    def gather(self, x: Tensor, columns: Tensor) -> Tensor:
        """Of as many columns as each rank has: so many of each row, [S] int32."""
        return self.collective.gather(x, [x.shape[1]] * len(self.sizes), columns)


def draw_by_ranks(
    own: Tensor,
    part: RankTokens,
    draws: Draws,
    state: DrawRows,
    tokens: Tensor,
    workspace: SamplingWorkspace,
) -> None:
    """As `draw`, from logits [S, n] of the rank's own tokens. All ranks have the same rows, and draw the same tokens.

    Only of rows that `offers.py` names the logits of the other ranks are read.
    """
    workspace.check(own)
    offered, columns, wanted = _offer(own, part.first_id, draws, state, workspace)
    offers = part.gather(offered, columns)
    logits = part.collective.gather(own, part.sizes, wanted)
    race(logits, 0, draws, state, workspace, NOT_SETTLED)
    special_race(logits, 0, draws, state, workspace, NOT_SETTLED)
    choose(logits, draws, state, tokens, workspace, offers)
    counts, is_counted = _count(own, offers, draws, state, workspace)
    counted = part.gather(counts, is_counted)
    pdl = supports_pdl(own.device)
    tell(logits, draws.ids, draws.logprobs, workspace, pdl, Offered(offers, counted, is_counted))


def _offer(
    own: Tensor, first_id: int, draws: Draws, state: DrawRows, workspace: SamplingWorkspace
) -> tuple[Tensor, Tensor, Tensor]:
    """What this rank offers, [S, OFFER]; how many of these columns each row has, and how many logits of each rank it
    wants, [S] int32 both."""
    race(own, first_id, draws, state, workspace, SETTLED)
    special_race(own, first_id, draws, state, workspace, SETTLED)
    num_entries, vocab_size = own.shape
    offers = torch.empty(num_entries, OFFER, dtype=torch.float32, device=own.device)
    columns, wanted = torch.empty(2, num_entries, dtype=torch.int32, device=own.device)
    pdl = supports_pdl(own.device)
    offer_kernel[(num_entries,)](
        own,
        draws.rows,
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
        offers,
        columns,
        wanted,
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
    return offers, columns, wanted


def _count(
    own: Tensor, offers: Tensor, draws: Draws, state: DrawRows, workspace: SamplingWorkspace
) -> tuple[Tensor, Tensor]:
    """This rank's tokens that are more likely than those drawn, [S, COUNTED]; how many columns each row has, [S] int32:
    none if nothing is to be counted."""
    num_entries, vocab_size = own.shape
    counts = torch.empty(num_entries, COUNTED, dtype=torch.float32, device=own.device)
    columns = torch.empty(num_entries, dtype=torch.int32, device=own.device)
    pdl = supports_pdl(own.device)
    searches = workspace.searches(vocab_size)
    del searches["CHUNKS"]
    count_kernel[(num_entries,)](
        own,
        draws.rows,
        state.table,
        draws.ids,
        offers,
        workspace.raw_group_tops,
        workspace.group_list,
        counts,
        columns,
        vocab_size,
        workspace.num_groups,
        own.stride(0),
        RANKS=offers.shape[1] // OFFER,
        PDL=pdl,
        **searches,
        **launch_options(pdl),
    )
    return counts, columns
