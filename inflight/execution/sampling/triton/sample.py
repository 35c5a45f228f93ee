"""Launches of the sampling kernels: Gumbel-max per chunk, the choice among chunks, and log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from inflight.events import PositionLogprobs
from inflight.execution.sampling.sampler import pack_columns
from inflight.execution.sampling.triton.choose import choose_kernel
from inflight.execution.sampling.triton.gumbel import ALL, gumbel_kernel, special_gumbel_kernel
from inflight.execution.sampling.triton.logprobs import logprobs_kernel, measure_kernel
from inflight.execution.sampling.triton.rank_candidates import CANDIDATE_COLUMNS
from inflight.execution.sampling.triton.rows import TritonSamplingRows
from inflight.execution.sampling.triton.workspace import GROUPS_OF_CHUNK, SamplingWorkspace
from inflight.triton_utils.pdl import launch_options, supports_pdl

GUMBEL_WARPS = 8
SPECIAL_PROGRAMS = 8  # for each row


@dataclass(frozen=True, slots=True)
class LogprobBuffers:
    """Which entries want log-probabilities, and where they are written. [S] int32 each, but for `width`, [1]."""

    counts: (
        Tensor  # most likely tokens to report beside the target, at most MAX_LOGPROBS; negative: none at all
    )
    places: Tensor  # the index of each entry in the results
    width: Tensor  # 1 + the most that any entry wants
    results: Tensor  # flat: [places, 3, width] int32, see `logprobs_kernel`


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The entries that are sampled together, and where their tokens are written.

    rows [S] int32; a negative row is padding and writes nothing. lengths [S] int32: the number of tokens in each row
    before the new one. ids [S] int32. bad [S] int32: 0, or why sampling failed; the token is then arbitrary, but one of
    the vocabulary.
    """

    rows: Tensor
    lengths: Tensor
    ids: Tensor
    bad: Tensor
    logprobs: LogprobBuffers


@dataclass(frozen=True, slots=True)
class RankCandidates:
    """The candidates of all ranks, from which they all sample the same tokens; see `rank_candidates.py`."""

    candidates: Tensor  # [S, ranks * CANDIDATE_COLUMNS]
    counted: Tensor  # [S, ranks * COUNTED]
    is_counted: (
        Tensor  # [S] int32: nonzero where the candidates settle the row and it wants log-probabilities
    )


def read_logprobs(results: Tensor, counts: Sequence[int], width: int) -> list[PositionLogprobs]:
    """Unpack results in host memory: `counts` of the entries that want log-probabilities, in order of their places."""
    columns = results[: 3 * width * len(counts)].view(len(counts), 3, width)
    return pack_columns(columns.numpy(), counts)


def sample_tokens(
    logits: Tensor,
    batch: SamplingBatch,
    state: TritonSamplingRows,
    tokens: Tensor,
    workspace: SamplingWorkspace,
) -> None:
    """Choose token number lengths[i] of row rows[i] from logits[i], and write it to tokens and ids[i].

    logits [S, V] float32, contiguous in the last dimension, are not modified. tokens [max_rows, max_len] int32.
    """
    workspace.check(logits)
    launch_gumbel(logits, 0, batch, state, workspace, ALL)
    launch_special_gumbel(logits, 0, batch, state, workspace, ALL)
    choose(logits, batch, state, tokens, workspace)
    write_logprobs(logits, batch.ids, batch.logprobs, workspace, supports_pdl(logits.device))


def launch_gumbel(
    logits: Tensor,
    first_id: int,
    batch: SamplingBatch,
    state: TritonSamplingRows,
    workspace: SamplingWorkspace,
    who: tl.constexpr,
) -> None:
    """Find the Gumbel-max winner of every chunk of logits [S, n], whose tokens start at `first_id`."""
    pdl = supports_pdl(logits.device)
    gumbel_kernel[(workspace.chunks_of(logits.shape[1]), len(logits))](
        logits,
        batch.rows,
        batch.lengths,
        state.table,
        *workspace.between(),
        logits.shape[1],
        first_id,
        workspace.num_chunks,
        logits.stride(0),
        GROUPS=GROUPS_OF_CHUNK,
        GROUP=workspace.group,
        WHO=who.value,
        PDL=pdl,
        num_warps=GUMBEL_WARPS,
        **launch_options(pdl),
    )


def launch_special_gumbel(
    logits: Tensor,
    first_id: int,
    batch: SamplingBatch,
    state: TritonSamplingRows,
    workspace: SamplingWorkspace,
    who: tl.constexpr,
) -> None:
    """Do the same for rows that modify their logits or want log-probabilities."""
    pdl = supports_pdl(logits.device)
    special_gumbel_kernel[(min(SPECIAL_PROGRAMS, workspace.chunks_of(logits.shape[1])), len(logits))](
        logits,
        batch.rows,
        batch.lengths,
        state.table,
        state.mask,
        state.forbidden,
        state.seen,
        workspace.changed,
        *workspace.between(),
        workspace.raw_tops,
        workspace.raw_masses,
        workspace.raw_group_tops,
        logits.shape[1],
        state.vocab_size,
        first_id,
        workspace.num_chunks,
        logits.stride(0),
        GROUPS=GROUPS_OF_CHUNK,
        GROUP=workspace.group,
        WHO=who.value,
        PDL=pdl,
        num_warps=GUMBEL_WARPS,
        **launch_options(pdl),
    )


def choose(
    logits: Tensor,
    batch: SamplingBatch,
    state: TritonSamplingRows,
    tokens: Tensor,
    workspace: SamplingWorkspace,
    rank_candidates: Tensor | None = None,
) -> None:
    """Choose a token for each row of logits [S, V].

    With several ranks, rows that `rank_candidates` [S, ranks * CANDIDATE_COLUMNS] settle have no logits of their own.
    """
    pdl, vocab_size = supports_pdl(logits.device), logits.shape[1]
    choose_kernel[(len(logits),)](
        logits,
        batch.rows,
        batch.lengths,
        state.table,
        state.forbidden,
        state.seen,
        workspace.changed,
        *workspace.between(),
        workspace.group_list,
        workspace.candidates,
        rank_candidates,
        tokens,
        batch.ids,
        batch.bad,
        vocab_size,
        workspace.num_chunks,
        workspace.num_groups,
        logits.stride(0),
        tokens.stride(0),
        CHUNK=GROUPS_OF_CHUNK,
        RANKS=0 if rank_candidates is None else rank_candidates.shape[1] // CANDIDATE_COLUMNS,
        PDL=pdl,
        **workspace.searches(vocab_size),
        **launch_options(pdl),
    )


def score_all(logits: Tensor, targets: Tensor, count: int, workspace: SamplingWorkspace) -> Tensor:
    """Score targets [P] int32 and the `count` most likely tokens under logits [P, V], packed for `read_logprobs`."""
    workspace.check(logits)
    num_positions, vocab_size = logits.shape
    width = 1 + min(count, vocab_size)
    places = torch.arange(num_positions, dtype=torch.int32, device=logits.device)
    results = torch.empty(num_positions * 3 * width, dtype=torch.int32, device=logits.device)
    buffers = LogprobBuffers(
        torch.full_like(places, width - 1), places, torch.full_like(places[:1], width), results
    )
    measure_kernel[(workspace.num_chunks, num_positions)](
        logits,
        workspace.raw_tops,
        workspace.raw_masses,
        workspace.raw_group_tops,
        vocab_size,
        logits.stride(0),
        GROUPS=GROUPS_OF_CHUNK,
        GROUP=workspace.group,
        num_warps=GUMBEL_WARPS,
    )
    write_logprobs(logits, targets, buffers, workspace, pdl=False)
    return results


def write_logprobs(
    logits: Tensor,
    targets: Tensor,
    buffers: LogprobBuffers,
    workspace: SamplingWorkspace,
    pdl: bool,
    rank_candidates: RankCandidates | None = None,
) -> None:
    """Write the log-probabilities of targets [S] and of the most likely tokens."""
    ranks: tuple[Tensor | None, Tensor | None, Tensor | None] = None, None, None
    num_ranks = 0
    if rank_candidates is not None:
        ranks = rank_candidates.candidates, rank_candidates.counted, rank_candidates.is_counted
        num_ranks = rank_candidates.candidates.shape[1] // CANDIDATE_COLUMNS
    logprobs_kernel[(len(logits),)](
        logits,
        targets,
        buffers.counts,
        buffers.places,
        buffers.width,
        workspace.raw_tops,
        workspace.raw_masses,
        workspace.raw_group_tops,
        workspace.group_list,
        workspace.candidates,
        *ranks,
        buffers.results,
        logits.shape[1],
        workspace.num_chunks,
        workspace.num_groups,
        logits.stride(0),
        RANKS=num_ranks,
        PDL=pdl,
        **workspace.searches(logits.shape[1]),
        **launch_options(pdl),
    )
