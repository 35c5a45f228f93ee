"""The launches of the sampling kernels: a race, a choice, and the log-probabilities of the rows that ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight.errors import EngineError
from inflight.events import PositionLogprobs
from inflight.execution.sampling.logprobs import position
from inflight.execution.sampling.triton.choose import choose_kernel
from inflight.execution.sampling.triton.logprobs import logprobs_kernel, measure_kernel
from inflight.execution.sampling.triton.offers import OFFER, offer_kernel
from inflight.execution.sampling.triton.race import (
    ALL,
    NOT_SETTLED,
    SETTLED,
    race_kernel,
    special_race_kernel,
)
from inflight.execution.sampling.triton.rows import DrawRows
from inflight.triton_utils.pdl import launch_options, supports_pdl

# A group of 64 logits is two cache lines of bfloat16; a row of more groups than this would not fit registers.
MIN_GROUP = 64
MAX_GROUPS = 4096
GROUPS_OF_CHUNK = 64
RACE_WARPS = 8
SPECIAL_PROGRAMS = 8  # for each row
CHOOSE_WARPS = 16
TILE_LOGITS = 4096  # that a search looks at together
CANDIDATES = 256
MAX_LOGPROBS = CANDIDATES // 2  # told of one position


@dataclass(frozen=True, slots=True)
class SamplingWorkspace:
    """What one launch leaves for the next, for at most `max_entries` entries."""

    group: int  # tokens of a group
    chunk_scores: Tensor  # [max_entries, num_chunks] float32
    chunk_ids: Tensor  # [max_entries, num_chunks] int32
    chunk_tops: Tensor  # [max_entries, num_chunks] float32
    chunk_masses: Tensor  # [max_entries, num_chunks] float32
    group_tops: Tensor  # [max_entries, num_groups] float32
    raw_tops: Tensor  # this and the next two: the same of logits that nothing was changed in
    raw_masses: Tensor
    raw_group_tops: Tensor
    changed: Tensor  # [max_entries, vocab_size] float32
    group_list: Tensor  # [max_entries, num_groups] int32
    candidates: Tensor  # [max_entries, 4 * CANDIDATES] int32

    @classmethod
    def allocate(
        cls, max_entries: int, vocab_size: int, device: torch.device | str, group: int | None = None
    ) -> SamplingWorkspace:
        """`group` is a power of two, chosen to fit the vocabulary by default."""
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
        """What a race leaves for the choice."""
        return self.chunk_scores, self.chunk_ids, self.chunk_tops, self.chunk_masses, self.group_tops

    def searches(self) -> dict[str, int]:
        """What the kernels that search are compiled for."""
        return {
            "CHUNKS": triton.next_power_of_2(self.num_chunks),
            "GROUPS": triton.next_power_of_2(self.num_groups),
            "GROUP": self.group,
            "TILE": max(1, TILE_LOGITS // self.group),
            "CANDIDATES": CANDIDATES,
            "num_warps": CHOOSE_WARPS,
        }


@dataclass(frozen=True, slots=True)
class WantedLogprobs:
    """Which entries want log-probabilities told, and where they go. [S] int32 each, but for `width`, [1]."""

    counts: (
        Tensor  # of the most likely tokens beside the target, at most MAX_LOGPROBS; below 0: nothing is told
    )
    places: Tensor  # which of the results is the entry's
    width: Tensor  # 1 + the most that any entry wants
    results: Tensor  # flat: [places, 3, width] int32, see `logprobs_kernel`


def read_logprobs(results: Tensor, counts: Sequence[int], width: int) -> list[PositionLogprobs]:
    """Results in host memory, of the entries that want `counts`, in the order of their places."""
    columns = results[: 3 * width * len(counts)].view(len(counts), 3, width)
    ids, ranks = columns[:, 0].tolist(), columns[:, 2].tolist()
    logprobs = columns[:, 1].contiguous().view(torch.float32).tolist()
    return [
        position(ids[place][: 1 + count], logprobs[place], ranks[place]) for place, count in enumerate(counts)
    ]


def draw(
    logits: Tensor,
    rows: Tensor,
    lengths: Tensor,
    state: DrawRows,
    tokens: Tensor,
    out_ids: Tensor,
    out_bad: Tensor,
    workspace: SamplingWorkspace,
    logprobs: WantedLogprobs,
    offers: Tensor | None = None,
) -> None:
    """Choose token number lengths[i] of row rows[i] from logits[i], and write it to tokens and out_ids[i].

    logits [S, V] float32, contiguous in the last dimension, are left as they are.
    rows [S] int32; a negative one is padding, and writes nothing. lengths [S] int32 count the tokens of each row before
    the new one. tokens [max_rows, max_len] int32. out_ids [S] int32. out_bad [S] int32: 0, or how the entry is bad; its
    token is then some token of the vocabulary. offers [S, ranks * OFFER]: what all ranks offer, if there are several;
    logits of rows that `offer` did not want are then not looked at.
    """
    workspace.check(logits)
    num_entries, vocab_size = logits.shape
    between = workspace.between()
    raw = (workspace.raw_tops, workspace.raw_masses, workspace.raw_group_tops)
    pdl = supports_pdl(logits.device)
    _race(logits, 0, rows, lengths, state, workspace, ALL if offers is None else NOT_SETTLED)
    special_race_kernel[(min(SPECIAL_PROGRAMS, workspace.num_chunks), num_entries)](
        logits,
        rows,
        lengths,
        state.table,
        state.mask,
        state.forbidden,
        state.seen,
        workspace.changed,
        *between,
        *raw,
        vocab_size,
        workspace.num_chunks,
        logits.stride(0),
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
        state.table,
        state.forbidden,
        state.seen,
        workspace.changed,
        *between,
        workspace.group_list,
        workspace.candidates,
        offers,
        tokens,
        out_ids,
        out_bad,
        vocab_size,
        workspace.num_chunks,
        workspace.num_groups,
        logits.stride(0),
        tokens.stride(0),
        CHUNK=GROUPS_OF_CHUNK,
        RANKS=0 if offers is None else offers.shape[1] // OFFER,
        PDL=pdl,
        **workspace.searches(),
        **launch_options(pdl),
    )
    _tell(logits, out_ids, logprobs, workspace, pdl)


def offer(
    logits: Tensor,
    first_id: int,
    rows: Tensor,
    lengths: Tensor,
    state: DrawRows,
    workspace: SamplingWorkspace,
) -> tuple[Tensor, Tensor]:
    """What a rank offers that has logits [S, n] of the tokens from `first_id` on: [S, OFFER] float32. And of which rows
    all logits are wanted: [S] int32."""
    workspace.check(logits)
    _race(logits, first_id, rows, lengths, state, workspace, SETTLED)
    num_entries = len(logits)
    offers = torch.empty(num_entries, OFFER, dtype=torch.float32, device=logits.device)
    wanted = torch.empty(num_entries, dtype=torch.int32, device=logits.device)
    num_chunks, pdl = _num_chunks(logits, workspace), supports_pdl(logits.device)
    offer_kernel[(num_entries,)](
        rows,
        state.table,
        workspace.chunk_scores,
        workspace.chunk_ids,
        workspace.chunk_tops,
        offers,
        wanted,
        num_chunks,
        CHUNKS=triton.next_power_of_2(num_chunks),
        PDL=pdl,
        num_warps=1,
        **launch_options(pdl),
    )
    return offers, wanted


def _race(
    logits: Tensor,
    first_id: int,
    rows: Tensor,
    lengths: Tensor,
    state: DrawRows,
    workspace: SamplingWorkspace,
    who: tl.constexpr,
) -> None:
    pdl = supports_pdl(logits.device)
    race_kernel[(_num_chunks(logits, workspace), len(logits))](
        logits,
        rows,
        lengths,
        state.table,
        *workspace.between(),
        logits.shape[1],
        first_id,
        logits.stride(0),
        GROUPS=GROUPS_OF_CHUNK,
        GROUP=workspace.group,
        WHO=who.value,
        PDL=pdl,
        num_warps=RACE_WARPS,
        **launch_options(pdl),
    )


def _num_chunks(logits: Tensor, workspace: SamplingWorkspace) -> int:
    num_chunks: int = triton.cdiv(logits.shape[1], workspace.group * GROUPS_OF_CHUNK)
    return num_chunks


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
    _tell(logits, targets, wanted, workspace, pdl=False)
    return results


def _tell(
    logits: Tensor, targets: Tensor, wanted: WantedLogprobs, workspace: SamplingWorkspace, pdl: bool
) -> None:
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
        wanted.results,
        logits.shape[1],
        workspace.num_chunks,
        workspace.num_groups,
        logits.stride(0),
        PDL=pdl,
        **workspace.searches(),
        **launch_options(pdl),
    )
