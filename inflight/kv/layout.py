"""Where the layers of a model keep their keys and values: block tables, and lanes of the memory behind the blocks.

All blocks of the KV memory are equal, so memory goes where it is needed. A block holds `block_size` tokens and has the
same number of bytes in each of a few *lanes*, one tensor per lane. A *block table* belongs to layers with equal heads
that keep the same tokens, all or the last `window` of them, and gives each a lane (small layers may share one):

                 lane 0      lane 1      lane 2
    table 0      layer 5     layer 11    layer 17      all tokens
    table 1      layer 0     layer 6     layer 12      the last 1024 tokens
    table 2      layer 1     layer 7     layer 13      the last 1024 tokens
    ...

A model in which all layers keep all tokens has one table and a lane for each layer. Layers are dealt out in order of
depth, so a pipeline stage uses neighbouring lanes and allocates only those.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

_NO_LIMIT = 1 << 40  # tokens: a request whose layers all have windows may be this long
# A context of this many tokens decides how many lanes waste too much memory.
_USUAL_CONTEXT = 8192
# The part of a request's memory that unused lanes may take; fewer tables are cheaper to plan and to upload.
_MAX_WASTE = 1 / 12
# The scales of a quantized key and value of one head, 16 bits each.
SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Block tables that keep the same tokens, so their blocks are allocated and freed together."""

    window: int | None  # a token is needed by the next window - 1 tokens; None: by all
    tables: tuple[int, ...]

    @property
    def name(self) -> str:
        return "all tokens" if self.window is None else f"window {self.window}"

    def first_needed(self, position: int, block_size: int) -> int:
        """Return the first block that a token at this position, or any later one, can see."""
        return 0 if self.window is None else max(0, position - self.window + 1) // block_size

    def most_held(self, num_tokens: int, chunk: int, block_size: int) -> int:
        """Return the most blocks per table that a request of `num_tokens` holds, computed `chunk` tokens at a time."""
        num_blocks = -(-num_tokens // block_size)
        if self.window is None:
            return num_blocks
        visible = self.window - 1 + min(chunk, num_tokens)  # and a chunk may begin anywhere in a block
        return min(num_blocks, -(-(visible - 1) // block_size) + 1)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The memory of a model as the scheduler sees it."""

    block_size: int
    windows: tuple[int | None, ...] = (None,)  # of each block table; None: it keeps every token
    snapshot_blocks: int = 0  # blocks that a snapshot of the recurrent state takes; 0: there is no such state

    @property
    def groups(self) -> tuple[KVGroup, ...]:
        """The groups of tables; groups that keep every token come first."""
        return _groups(self.windows)

    def blocks_for(self, num_tokens: int, chunk: int) -> int:
        """Return the most blocks that a request of `num_tokens` holds, computed `chunk` tokens at a time."""
        size = self.block_size
        return sum(len(group.tables) * group.most_held(num_tokens, chunk, size) for group in self.groups)

    def max_requests(self, num_blocks: int, num_tokens: int, chunk: int) -> int:
        """Return how many requests of `num_tokens` fit at once, one of which is computed `chunk` tokens at a time."""
        num_free = num_blocks - self.blocks_for(num_tokens, chunk)
        return 0 if num_free < 0 else 1 + num_free // self.blocks_for(num_tokens, 1)

    def max_tokens(self, num_blocks: int, chunk: int) -> int:
        """Return the length of the longest request that fits into `num_blocks`, computed `chunk` tokens at a time."""
        if self.blocks_for(_NO_LIMIT, chunk) <= num_blocks:
            return _NO_LIMIT
        return bisect_right(range(_NO_LIMIT), num_blocks, key=lambda count: self.blocks_for(count, chunk)) - 1


@lru_cache
def _groups(windows: tuple[int | None, ...]) -> tuple[KVGroup, ...]:
    tables: dict[int | None, list[int]] = {}
    for table, window in enumerate(windows):
        tables.setdefault(window, []).append(table)
    ordered = sorted(tables, key=lambda window: (window is not None, window))
    return tuple(KVGroup(window, tuple(tables[window])) for window in ordered)


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The memory that an attention layer needs for each token, and how long it keeps the token."""

    num_heads: int  # each has its own scales if it is quantized
    key_dim: int  # values of one head's key
    value_dim: int  # and of its value; 0: values are made from the keys
    window: int | None = None  # a token is needed by the next window - 1 tokens; None: by all
    # "fp8" or "int8": keys and values take one byte per number, beside scales. None: they are kept as computed.
    quantized: str | None = None

    @property
    def is_quantized(self) -> bool:
        return self.quantized is not None

    @property
    def size(self) -> int:
        """The number of values per token."""
        return self.num_heads * (self.key_dim + self.value_dim)

    def value_bytes(self, width: int) -> int:
        """Return the bytes of a token's values, if unquantized values have `width` bytes."""
        return self.size * (1 if self.is_quantized else width)

    def block_bytes(self, block_size: int, width: int) -> int:
        """Return the bytes of a block, scales included."""
        scales = SCALE_BYTES * self.num_heads if self.is_quantized else 0
        return block_size * (self.value_bytes(width) + scales)


@dataclass(frozen=True, slots=True)
class KVPlace:
    """Where a layer keeps its keys and values."""

    table: int
    lane: int
    part: int = 0  # among the layers of the same table that share the lane


def place_layers(layers: Sequence[LayerKV], width: int = 1) -> tuple[list[KVPlace], tuple[int | None, ...]]:
    """Return the place of each layer, and the window of each table. Values have `width` bytes if not quantized."""
    kinds: dict[tuple[int, ...], list[int]] = {}  # layers that keep all tokens come first
    for index, layer in enumerate(layers):
        size = layer.value_bytes(width)  # no scales: two quantized layers fit in place of a plain one
        heads = layer.num_heads, layer.key_dim, layer.value_dim
        layer_kind = layer.window is not None, layer.window or 0, size, *heads
        kinds.setdefault(layer_kind, []).append(index)
    largest = max((layer.value_bytes(width) for layer in layers), default=0)
    ordered = [
        (layer_kind[1] or None, largest // layer_kind[2], kinds[layer_kind]) for layer_kind in sorted(kinds)
    ]
    num_lanes = _num_lanes([(window, -(-len(indices) // share)) for window, share, indices in ordered])
    places: dict[int, KVPlace] = {}
    windows: list[int | None] = []
    for window, share, indices in ordered:
        num_units = -(-len(indices) // share)
        for number, index in enumerate(indices):
            unit, part = divmod(number, share)
            lane = unit * num_lanes // num_units
            first = -(-lane * num_units // num_lanes)  # the first unit in this lane
            places[index] = KVPlace(len(windows) + unit - first, lane, part)
        windows += [window] * -(-num_units // num_lanes)
    return [places[index] for index in range(len(layers))], tuple(windows) or (None,)


def _num_lanes(kinds: Sequence[tuple[int | None, int]]) -> int:
    """Return the largest number of lanes that wastes little, for kinds of layers given as (window, lanes needed)."""

    def memory(num_lanes: int) -> int:
        tables = (
            (min(window or _USUAL_CONTEXT, _USUAL_CONTEXT), -(-num_units // num_lanes))
            for window, num_units in kinds
        )
        return sum(tokens * count * num_lanes for tokens, count in tables)

    allowed = memory(1) * (1 + _MAX_WASTE)
    most = max((num_units for _, num_units in kinds), default=1)
    return next(num_lanes for num_lanes in range(most, 0, -1) if memory(num_lanes) <= allowed)
