"""The launches of the sampling kernels: a race, a choice, and the log-probabilities of the rows that ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from inflight.events import PositionLogprobs
from inflight.execution.sampling.logprobs import pack_columns
from inflight.execution.sampling.triton.choose import choose_kernel
from inflight.execution.sampling.triton.logprobs import logprobs_kernel, measure_kernel
from inflight.execution.sampling.triton.offers import OFFER
from inflight.execution.sampling.triton.race import ALL, race_kernel, special_race_kernel
from inflight.execution.sampling.triton.rows import DrawRows
from inflight.execution.sampling.triton.workspace import GROUPS_OF_CHUNK, SamplingWorkspace
from inflight.triton_utils.pdl import launch_options, supports_pdl

RACE_WARPS = 8
SPECIAL_PROGRAMS = 8  # for each row


@dataclass(frozen=True, slots=True)
class WantedLogprobs:
    """Which entries want log-probabilities told, and where they go. [S] int32 each, but for `width`, [1]."""

    counts: (
        Tensor  # of the most likely tokens beside the target, at most MAX_LOGPROBS; below 0: nothing is told
    )
    places: Tensor  # which of the results is the entry's
    width: Tensor  # 1 + the most that any entry wants
    results: Tensor  # flat: [places, 3, width] int32, see `logprobs_kernel`


@dataclass(frozen=True, slots=True)
class Draws:
    """The tokens that are drawn together, and where they go.

    rows [S] int32; a negative one is padding, and writes nothing. lengths [S] int32 count the tokens of each row before
    the new one. ids [S] int32. bad [S] int32: 0, or how the entry is bad; its token is then some token of the
    vocabulary.
    """

    rows: Tensor
    lengths: Tensor
    ids: Tensor
    bad: Tensor
    logprobs: WantedLogprobs


@dataclass(frozen=True, slots=True)
class Offered:
    """What all ranks know of the rows that they settle together, see `offers.py`."""

    offers: Tensor  # [S, ranks * OFFER]
    counted: Tensor  # [S, ranks * COUNTED]
    is_counted: Tensor  # [S] int32: not 0 where the row is settled so, and wants log-probabilities


def read_logprobs(results: Tensor, counts: Sequence[int], width: int) -> list[PositionLogprobs]:
    """Results in host memory, of the entries that want `counts`, in the order of their places."""
    columns = results[: 3 * width * len(counts)].view(len(counts), 3, width)
    return pack_columns(columns.numpy(), counts)


def draw(logits: Tensor, draws: Draws, state: DrawRows, tokens: Tensor, workspace: SamplingWorkspace) -> None:
    """Choose token number lengths[i] of row rows[i] from logits[i], and write it to tokens and ids[i].

    logits [S, V] float32, contiguous in the last dimension, are left as they are. tokens [max_rows, max_len] int32.
    """
    workspace.check(logits)
    race(logits, 0, draws, state, workspace, ALL)
    special_race(logits, 0, draws, state, workspace, ALL)
    choose(logits, draws, state, tokens, workspace)
    tell(logits, draws.ids, draws.logprobs, workspace, supports_pdl(logits.device))


def race(
    logits: Tensor,
    first_id: int,
    draws: Draws,
    state: DrawRows,
    workspace: SamplingWorkspace,
    who: tl.constexpr,
) -> None:
    """Over logits [S, n] of the tokens from `first_id` on."""
    pdl = supports_pdl(logits.device)
    race_kernel[(workspace.chunks_of(logits.shape[1]), len(logits))](
        logits,
        draws.rows,
        draws.lengths,
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
        num_warps=RACE_WARPS,
        **launch_options(pdl),
    )


def special_race(
    logits: Tensor,
    first_id: int,
    draws: Draws,
    state: DrawRows,
    workspace: SamplingWorkspace,
    who: tl.constexpr,
) -> None:
    """The same for rows that change their logits or want log-probabilities."""
    pdl = supports_pdl(logits.device)
    special_race_kernel[(min(SPECIAL_PROGRAMS, workspace.chunks_of(logits.shape[1])), len(logits))](
        logits,
        draws.rows,
        draws.lengths,
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
        num_warps=RACE_WARPS,
        **launch_options(pdl),
    )


def choose(
    logits: Tensor,
    draws: Draws,
    state: DrawRows,
    tokens: Tensor,
    workspace: SamplingWorkspace,
    offers: Tensor | None = None,
) -> None:
    """Logits [S, V]; of several ranks, of the rows that their offers [S, ranks * OFFER] do not settle."""
    pdl, vocab_size = supports_pdl(logits.device), logits.shape[1]
    choose_kernel[(len(logits),)](
        logits,
        draws.rows,
        draws.lengths,
        state.table,
        state.forbidden,
        state.seen,
        workspace.changed,
        *workspace.between(),
        workspace.group_list,
        workspace.candidates,
        offers,
        tokens,
        draws.ids,
        draws.bad,
        vocab_size,
        workspace.num_chunks,
        workspace.num_groups,
        logits.stride(0),
        tokens.stride(0),
        CHUNK=GROUPS_OF_CHUNK,
        RANKS=0 if offers is None else offers.shape[1] // OFFER,
        PDL=pdl,
        **workspace.searches(vocab_size),
        **launch_options(pdl),
    )


def score_all(logits: Tensor, targets: Tensor, count: int, workspace: SamplingWorkspace) -> Tensor:
    """The log-probabilities of targets [P] int32 and of the `count` most likely tokens under logits [P, V]: results as
    `read_logprobs` reads them."""
    workspace.check(logits)
    num_positions, vocab_size = logits.shape
    width = 1 + min(count, vocab_size)
    places = torch.arange(num_positions, dtype=torch.int32, device=logits.device)
    results = torch.empty(num_positions * 3 * width, dtype=torch.int32, device=logits.device)
    wanted = WantedLogprobs(
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
        num_warps=RACE_WARPS,
    )
    tell(logits, targets, wanted, workspace, pdl=False)
    return results


def tell(
    logits: Tensor,
    targets: Tensor,
    wanted: WantedLogprobs,
    workspace: SamplingWorkspace,
    pdl: bool,
    offered: Offered | None = None,
) -> None:
    """The log-probabilities of targets [S] and of the most likely tokens."""
    ranks = (None, None, None) if offered is None else (offered.offers, offered.counted, offered.is_counted)
    logprobs_kernel[(len(logits),)](
        logits,
        targets,
        wanted.counts,
        wanted.places,
        wanted.width,
        workspace.raw_tops,
        workspace.raw_masses,
        workspace.raw_group_tops,
        workspace.group_list,
        workspace.candidates,
        *ranks,
        wanted.results,
        logits.shape[1],
        workspace.num_chunks,
        workspace.num_groups,
        logits.stride(0),
        RANKS=0 if offered is None else offered.offers.shape[1] // OFFER,
        PDL=pdl,
        **workspace.searches(logits.shape[1]),
        **launch_options(pdl),
    )
