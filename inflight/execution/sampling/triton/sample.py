"""Launches of the sampling kernels: Gumbel-max per chunk, the choice among chunks, log-probabilities; their memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight.errors import EngineError
from inflight.events import PositionLogprobs
from inflight.execution.sampling.interface import pack_columns
from inflight.execution.sampling.triton.choose import choose_kernel
from inflight.execution.sampling.triton.gumbel import FEW, gumbel_kernel, special_gumbel_kernel
from inflight.execution.sampling.triton.logprobs import logprobs_kernel, measure_kernel
from inflight.execution.sampling.triton.row_table import FLAGS, STATEFUL, WORDS
from inflight.execution.sampling.triton.rows import TritonSamplingRows
from inflight.layers.triton_utils.pdl import launch_options, supports_pdl

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

    def searches(self) -> dict[str, int]:
        """Return the compile-time arguments of kernels that search the vocabulary."""
        chunks = triton.next_power_of_2(self.num_chunks)
        return {
            "CHUNKS": chunks,
            "GROUPS": chunks * GROUPS_OF_CHUNK,
            "GROUP": self.group,
            "TILE": max(1, TILE_LOGITS // self.group),
            "CANDIDATES": CANDIDATES,
            "num_warps": CHOOSE_WARPS,
        }


GUMBEL_WARPS = 8
SPECIAL_PROGRAMS = 8  # for each row


@dataclass(frozen=True, slots=True)
class LogprobBuffers:
    """The entries that want log-probabilities, and where these are written. [S] int32 each, but for `width`, [1]."""

    # Most likely tokens to report beside the target, at most MAX_LOGPROBS; negative: none at all.
    counts: Tensor
    places: Tensor  # the index of each entry in the results
    width: Tensor  # 1 + the most that any entry wants
    results: Tensor  # flat: [places, 3, width] int32, see `logprobs_kernel`


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The entries that are sampled together, and where their tokens are written.

    rows [S] int32; a negative row is padding and writes nothing. lengths [S] int32: the number of tokens in each row
    before the new one. ids [S] int32. bad [S] int32: 0, or why sampling failed; the token is then arbitrary, but one of
    the vocabulary. masks [S] int32: where each mask is in `TritonSamplingRows.mask`; None or negative: at its row.
    """

    rows: Tensor
    lengths: Tensor
    ids: Tensor
    bad: Tensor
    logprobs: LogprobBuffers | None  # None: the tokens are only guesses, which become no part of their rows
    masks: Tensor | None = None


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
    drafts: Tensor | None = None,
    places: int = 1,
) -> None:
    """Choose token number lengths[i] of row rows[i] from logits[i], and write it to tokens and ids[i].

    logits [S, V] float32, contiguous in the last dimension, are not modified. tokens [max_rows, max_len] int32.

    A row may occur several times in succession: sample i then follows the token drafts[i] (-1 at a row's first one),
    and means nothing if sample i - 1 is another token, or nothing. Rows with penalties or rules, whose state changes
    with every token, take up to `places` samples one after another, and only as long as drafts are right.
    """
    workspace.check(logits)
    pdl = supports_pdl(logits.device)
    if drafts is None or places == 1:
        _launch_gumbel(logits, batch, state, workspace, pdl)
        _choose(logits, batch, state, tokens, workspace, pdl)
    else:
        active = torch.empty(2, len(batch.rows), dtype=torch.int32, device=logits.device)
        for place in range(places):
            # Kernels that are launched early would read `active` too early.
            part = replace(batch, rows=active[place % 2])
            _take_turns(batch, drafts, state, active[(place + 1) % 2], part.rows, place)
            _launch_gumbel(logits, part, state, workspace, pdl=False)
            _choose(logits, part, state, tokens, workspace, pdl=False)
    if batch.logprobs is not None:
        _write_logprobs(logits, batch.ids, batch.logprobs, workspace, pdl)


TURNS_SIZE = 256


def _take_turns(
    batch: SamplingBatch,
    drafts: Tensor,
    state: TritonSamplingRows,
    before: Tensor,
    active: Tensor,
    place: int,
) -> None:
    """Write to `active` [S] the rows of the samples whose turn it is, and -1 for the others. `before`: those of the
    last turn."""
    num_samples = len(batch.rows)
    _take_turns_kernel[(triton.cdiv(num_samples, TURNS_SIZE),)](
        batch.rows, drafts, state.table, before, batch.ids, batch.bad, active, num_samples,
        FIRST=place == 0, SIZE=TURNS_SIZE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_samples"])
def _take_turns_kernel(
    rows, drafts, table, before, ids, bad, active, num_samples, FIRST: tl.constexpr, SIZE: tl.constexpr
):
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    row = tl.load(rows + i, mask=i < num_samples, other=-1)
    draft = tl.load(drafts + i, mask=row >= 0, other=-1)
    flags = tl.load(table + row.to(tl.int64) * WORDS + FLAGS, mask=row >= 0, other=0)
    in_turns = (flags & STATEFUL) != 0
    if FIRST:
        taken = ~in_turns | (draft < 0)
    else:
        follows = in_turns & (draft >= 0) & (i > 0)
        was_active = tl.load(before + i - 1, mask=follows, other=-1) >= 0
        is_right = tl.load(ids + i - 1, mask=follows, other=-1) == draft
        is_bad = tl.load(bad + i - 1, mask=follows, other=1) != 0
        taken = follows & was_active & is_right & ~is_bad
    tl.store(active + i, tl.where(taken, row, -1), mask=i < num_samples)


def _launch_gumbel(
    logits: Tensor, batch: SamplingBatch, state: TritonSamplingRows, workspace: SamplingWorkspace, pdl: bool
) -> None:
    """Find the Gumbel-max winner of every chunk of logits [S, V].

    The second launch does it for rows that modify their logits or want log-probabilities.
    """
    vocab_size = logits.shape[1]
    constants = {
        "GROUPS": GROUPS_OF_CHUNK,
        "GROUP": workspace.group,
        "PDL": pdl,
        "num_warps": GUMBEL_WARPS,
        **launch_options(pdl),
    }
    gumbel_kernel[(workspace.num_chunks, len(logits))](
        logits,
        batch.rows,
        batch.lengths,
        state.table,
        *workspace.between(),
        vocab_size,
        workspace.num_chunks,
        logits.stride(0),
        **constants,
    )
    special_gumbel_kernel[(min(SPECIAL_PROGRAMS, workspace.num_chunks), len(logits))](
        logits,
        batch.rows,
        batch.lengths,
        state.table,
        batch.rows if batch.masks is None else batch.masks,
        state.mask,
        state.forbidden,
        state.seen,
        workspace.changed,
        *workspace.between(),
        workspace.raw_tops,
        workspace.raw_masses,
        workspace.raw_group_tops,
        vocab_size,
        workspace.num_chunks,
        logits.stride(0),
        **constants,
    )


def _choose(
    logits: Tensor,
    batch: SamplingBatch,
    state: TritonSamplingRows,
    tokens: Tensor,
    workspace: SamplingWorkspace,
    pdl: bool,
) -> None:
    """Choose a token for each row of logits [S, V]."""
    vocab_size = logits.shape[1]
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
        tokens,
        batch.ids,
        batch.bad,
        vocab_size,
        workspace.num_chunks,
        workspace.num_groups,
        logits.stride(0),
        tokens.stride(0),
        CHUNK=GROUPS_OF_CHUNK,
        GUESSES=batch.logprobs is None,
        PDL=pdl,
        **workspace.searches(),
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
    _write_logprobs(logits, targets, buffers, workspace, pdl=False)
    return results


def _write_logprobs(
    logits: Tensor, targets: Tensor, buffers: LogprobBuffers, workspace: SamplingWorkspace, pdl: bool
) -> None:
    """Write the log-probabilities of targets [S] and of the most likely tokens."""
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
        buffers.results,
        logits.shape[1],
        workspace.num_chunks,
        workspace.num_groups,
        logits.stride(0),
        PDL=pdl,
        **workspace.searches(),
        **launch_options(pdl),
    )
