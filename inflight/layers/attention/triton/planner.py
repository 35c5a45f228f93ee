"""From the entries of a step to the plans (`plan.py`) of its attention kernels: how to split, what to read together."""

from __future__ import annotations

from dataclasses import dataclass

from inflight.layers.attention.triton.plan import (
    ChunkPlan,
    DecodePlan,
    Ints,
    PrefixPlan,
    find_groups,
    plan_chunks,
    plan_decode,
    plan_prefix,
)
from inflight.layers.attention.triton.softmax import WorkspaceNeed
from inflight.layers.attention.triton.tuning import HeadShape, Tuning

# Programs per multiprocessor, over all KV heads, that splitting may add. Measured on an H200: more programs read no
# faster, and every split has to be written, read again and merged. Decodes may be split further, up to the number of
# programs that run at once: fewer do not keep the memory busy.
DECODE_EXTRA_PROGRAMS = 1.6
PREFIX_EXTRA_PROGRAMS = 1.0
CHUNK_EXTRA_PROGRAMS = 1.0
# Keys below which a split costs more than it saves. For decodes: MIN_SPLIT per entry up to MAX_MIN_SPLIT, and at most
# MAX_SPLITS splits of an entry, since one program merges them.
DECODE_MIN_SPLIT = 64
DECODE_MAX_MIN_SPLIT = 512
DECODE_MAX_SPLITS = 32
# The number of decodes, and the longest context among them, for which `Tuning.short_context` pays.
SHORT_CONTEXT_DECODES = (2, 8)
SHORT_CONTEXT = 1024
PREFIX_MIN_SPLIT = 256
CHUNK_MIN_SPLIT = 768
# A prefix is shared if it has at least this many blocks, and sharing saves reading at least this many in total.
PREFIX_MIN_BLOCKS = 8
PREFIX_MIN_SAVED = 64


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """The plan of a step's decode entries, with their shared prefixes."""

    decode: DecodePlan
    prefix: PrefixPlan | None
    context_lens: Ints  # [E]
    short_context: bool  # whether they use `Tuning.short_context`

    def members(self) -> Ints:
        assert self.prefix is not None
        return self.prefix.members(self.context_lens, self.decode)


class AttentionPlanner:
    """Plans the steps of layers whose heads have one shape, with at most `max_entries` entries. Remembers which decodes
    share a prefix. If keys and values of some of these layers are quantized, plans are best for those, and right for
    all."""

    def __init__(
        self,
        tuning: Tuning,
        heads: HeadShape,
        block_size: int,
        max_entries: int,
        num_processors: int,
        share_prefixes: bool = True,
        is_quantized: bool = False,
    ) -> None:
        self.tuning = tuning
        self.heads = heads
        self.block_size = block_size
        self.max_entries = max_entries
        self.share_prefixes = share_prefixes
        self.is_quantized = is_quantized

        self._processors_per_head = num_processors / heads.num_kv_heads
        self._decode_extra_items = self._items(DECODE_EXTRA_PROGRAMS)
        self.chunk_extra_items = self._items(CHUNK_EXTRA_PROGRAMS)
        self.prefix_extra_items = self._items(PREFIX_EXTRA_PROGRAMS)
        # One round of programs, each with its own multiprocessor.
        fewest, most = SHORT_CONTEXT_DECODES
        most = 0 if tuning.short_context is None else min(most, self._items(tuning.short_context.programs))
        self.short_context_sizes = range(fewest, most + 1)
        self._known: tuple[bytes, int] = (b"", -1)
        self._prefix: PrefixPlan | None = None

    def _items(self, programs: float) -> int:
        """Return how many items make this many programs per multiprocessor."""
        return max(1, int(programs * self._processors_per_head))

    # ---- capacities ----

    def max_decode_items(self, num_entries: int) -> int:
        most_programs = self.tuning.most_programs(self.is_quantized)
        return max(num_entries + self._decode_extra_items, self._items(most_programs))

    def max_chunk_items(self, num_tokens: int, num_chunks: int) -> int:
        return -(-num_tokens // self.tuning.chunk_positions) + num_chunks + self.chunk_extra_items

    @property
    def max_prefix_items(self) -> int:
        return self.max_entries + self.prefix_extra_items

    @property
    def prefix_programs(self) -> int:
        """The programs of the prefix kernel: a few more than run at once; each may take several items."""
        return min(self.max_prefix_items, 2 * self.prefix_extra_items)

    @property
    def max_prefix_partials(self) -> int:
        return (1 + self.prefix_extra_items) * self.max_entries

    @property
    def workspace_need(self) -> WorkspaceNeed:
        decode_partials = self.max_decode_items(self.max_entries) + self.max_prefix_partials
        chunk_partials = 2 * self.chunk_extra_items * self.tuning.chunk_positions
        counters = max(self.max_entries, self.chunk_extra_items)
        heads = self.heads
        return WorkspaceNeed(
            max(decode_partials, chunk_partials),
            counters,
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_dim,
        )

    # ---- plans ----

    def decodes(
        self,
        context_lens: Ints,
        rows: Ints,
        tables: Ints,
        version: int,
        alone: bool = True,
        window: int | None = None,
    ) -> DecodeWork:
        """Plan the decodes, arrays [E]. `version` changes whenever a row gets another request. `alone`: no chunks.

        Layers with a window do not read prefixes together: the blocks before an entry's window may be another's by now.
        """
        prefix = None
        if self.share_prefixes and window is None:
            prefix = self._find_prefix(context_lens, rows, tables, version)
        num_entries = len(rows)
        min_split = min(DECODE_MIN_SPLIT * num_entries, DECODE_MAX_MIN_SPLIT)
        longest = int(context_lens.max(initial=0))
        min_split = max(min_split, -(-longest // DECODE_MAX_SPLITS))
        short_context = alone and num_entries in self.short_context_sizes and longest <= SHORT_CONTEXT
        tile = self.tuning.decode_for(num_entries, short_context, self.is_quantized)
        at_once = self._items(tile.programs)
        # A second round of short programs would take as long as the first.
        extra_items = max(1 if short_context else self._decode_extra_items, at_once - num_entries)
        plan = plan_decode(context_lens, rows, prefix, extra_items, at_once, tile.keys, min_split, window)
        return DecodeWork(plan, prefix, context_lens, short_context)

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
                self.prefix_extra_items,
                self.tuning.prefix.keys,
                PREFIX_MIN_SPLIT,
                self.max_prefix_items,
                self.max_prefix_partials,
            )
            self._known = known
        return self._prefix

    def chunks(
        self, query_starts: Ints, context_lens: Ints, rows: Ints, window: int | None = None
    ) -> ChunkPlan:
        """query_starts [E + 1] are token indices; the rest [E]."""
        tuning = self.tuning
        return plan_chunks(
            query_starts,
            context_lens,
            rows,
            tuning.chunk_positions,
            self.chunk_extra_items,
            tuning.chunk.keys,
            CHUNK_MIN_SPLIT,
            window,
        )
