"""How far to split, and what to read together: from the entries of a step to the plans (`plan.py`) of its kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from inflight.attention.triton.plan import (
    ChunkPlan,
    DecodePlan,
    Ints,
    PrefixPlan,
    find_groups,
    plan_chunks,
    plan_decode,
    plan_prefix,
)
from inflight.attention.triton.tuning import Tuning
from inflight.attention.triton.workspace import Workspace

# Programs a multiprocessor, over all KV heads, that splitting may add. As measured on an H200: more of them read no
# faster, and every part has to be written, read again and merged. Decodes may be split further up to the programs that
# run at once: fewer do not keep the memory busy.
DECODE_SPLITS = 1.6
PREFIX_SPLITS = 1.0
CHUNK_SPLITS = 1.0
# Keys below which a part costs more than it saves. Decodes: so much for each entry, up to so much in all, and no entry
# in more parts than that, since one program merges them.
DECODE_MIN_PART = 64
DECODE_MOST_MIN_PART = 512
DECODE_MOST_PARTS = 32
# Decodes of a step, and the longest context among them, for which `Tuning.near` pays.
NEAR_DECODES = (2, 8)
NEAR_CONTEXT = 1024
PREFIX_MIN_PART = 256
CHUNK_MIN_PART = 768
# A prefix is read together if each member, and all of them together, need not read that many blocks again.
PREFIX_MIN_BLOCKS = 8
PREFIX_MIN_SAVED = 64


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """Decode entries, planned; with a prefix where some share one."""

    decode: DecodePlan
    prefix: PrefixPlan | None
    context_lens: Ints  # [E]
    near: bool  # whether they go by `Tuning.near`

    def members(self) -> Ints:
        assert self.prefix is not None
        return self.prefix.members(self.context_lens, self.decode)


class Planner:
    """Plans for one model and at most `max_entries` entries. Remembers which decodes share what."""

    def __init__(
        self,
        tuning: Tuning,
        num_kv_heads: int,
        block_size: int,
        max_entries: int,
        num_processors: int,
        share_prefixes: bool = True,
    ) -> None:
        self.tuning = tuning
        self.block_size = block_size
        self.max_entries = max_entries
        self.share_prefixes = share_prefixes

        self._processors_a_head = num_processors / num_kv_heads
        self._decode_splits = self._items(DECODE_SPLITS)
        self.chunk_splits = self._items(CHUNK_SPLITS)
        self.prefix_splits = self._items(PREFIX_SPLITS)
        # All at once, one round of programs: they have a multiprocessor each.
        fewest, most = NEAR_DECODES
        most = 0 if tuning.near is None else min(most, self._items(tuning.near.programs))
        self.near_sizes = range(fewest, most + 1)
        self._known: tuple[bytes, int] = (b"", -1)
        self._prefix: PrefixPlan | None = None

    def _items(self, programs: float) -> int:
        """That make so many programs a multiprocessor."""
        return max(1, int(programs * self._processors_a_head))

    # ---- capacities ----

    def max_decode_items(self, num_entries: int) -> int:
        return max(num_entries + self._decode_splits, self._items(self.tuning.most_programs))

    def max_chunk_items(self, num_tokens: int, num_chunks: int) -> int:
        return -(-num_tokens // self.tuning.chunk_positions) + num_chunks + self.chunk_splits

    @property
    def max_prefix_items(self) -> int:
        return self.max_entries + self.prefix_splits

    @property
    def prefix_programs(self) -> int:
        """That run at once, and some more: few prefixes are read by them, many by each in turn."""
        return min(self.max_prefix_items, 2 * self.prefix_splits)

    @property
    def prefix_slots(self) -> int:
        return (1 + self.prefix_splits) * self.max_entries

    def workspace(self, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device) -> Workspace:
        decode_slots = self.max_decode_items(self.max_entries) + self.prefix_slots
        chunk_slots = 2 * self.chunk_splits * self.tuning.chunk_positions
        counters = max(self.max_entries, self.chunk_splits)
        return Workspace.allocate(
            max(decode_slots, chunk_slots), counters, num_heads, num_kv_heads, head_dim, device
        )

    # ---- plans ----

    def decodes(
        self, context_lens: Ints, rows: Ints, tables: Ints, version: int, alone: bool = True
    ) -> DecodeWork:
        """[E] each; `version` changes whenever a row gets another request. `alone`: the step has no chunks."""
        prefix = self._find_prefix(context_lens, rows, tables, version) if self.share_prefixes else None
        num_entries = len(rows)
        min_part = min(DECODE_MIN_PART * num_entries, DECODE_MOST_MIN_PART)
        longest = int(context_lens.max(initial=0))
        min_part = max(min_part, -(-longest // DECODE_MOST_PARTS))
        near = alone and num_entries in self.near_sizes and longest <= NEAR_CONTEXT
        tile = self.tuning.decode_for(num_entries, near)
        at_once = self._items(tile.programs)
        # A second round of near ones would take as long as the first.
        extra_items = max(1 if near else self._decode_splits, at_once - num_entries)
        plan = plan_decode(context_lens, rows, prefix, extra_items, at_once, tile.keys, min_part)
        return DecodeWork(plan, prefix, context_lens, near)

    def _find_prefix(self, context_lens: Ints, rows: Ints, tables: Ints, version: int) -> PrefixPlan | None:
        known = (rows.tobytes(), version)
        if known != self._known:
            blocks = (context_lens - 1) // self.block_size  # the block being written is nobody else's
            groups = find_groups(tables, rows, blocks, 2, PREFIX_MIN_BLOCKS, PREFIX_MIN_SAVED)
            self._prefix = plan_prefix(
                groups,
                rows,
                self.block_size,
                self.tuning.prefix_members,
                self.prefix_splits,
                self.tuning.prefix.keys,
                PREFIX_MIN_PART,
                self.max_prefix_items,
                self.prefix_slots,
            )
            self._known = known
        return self._prefix

    def chunks(self, query_starts: Ints, context_lens: Ints, rows: Ints) -> ChunkPlan:
        """query_starts [E + 1] are token indices; the rest [E]."""
        tuning = self.tuning
        return plan_chunks(
            query_starts,
            context_lens,
            rows,
            tuning.chunk_positions,
            self.chunk_splits,
            tuning.chunk.keys,
            CHUNK_MIN_PART,
        )
