"""Plan, on the host, which program attends to which keys. Numpy only; runs before every step.

A plan is a table of int32 items, one per program (and KV head), most work first. The columns, by number, have the names
that they have in the kernels:

    decode.py       0 entry (= token)   1 table_row     2 begin          3 end              4 context_len
                    5 first_partial     6 split         7 num_splits     8 own_splits
    decode.py,      0 first_member      1 num_members   2 table_row      3 begin            4 end
      prefixes      5 split
    and members     0 entry             1 context_len   2 first_partial
    chunk.py        0 token             1 num_positions 2 position       3 num_cached       4 table_row
                    5 begin             6 end           7 first_partial  8 split            9 num_splits
                   10 counter
    sequences.py    0 first             1 length        2 position

`token`, `first` and `position` are those of a tile's or sequence's first query; `num_cached` counts the keys before the
chunk; `first_member` is a row of the table of members, which are the entries that share a prefix.

[begin, end) are key positions. A query whose keys are split has one partial result per split in the workspace, from its
first partial on; the program that finishes last merges them. A decode entry's splits are those of its shared prefix,
then its own. In a chunk, a tile of positions is split as a whole: one partial per position and split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]

DECODE_FIELDS = 9
PREFIX_FIELDS = 6
MEMBER_FIELDS = 3
CHUNK_FIELDS = 11
SEQUENCE_FIELDS = 3

LAST_MIN_SPLIT = 256  # keys below which splitting one of the last decodes costs more than it saves


@dataclass(frozen=True, slots=True)
class DecodePlan:
    items: Ints  # [num_items, DECODE_FIELDS]
    first_partials: Ints  # [E] index of the entry's first partial, if it has several
    num_partials: int


@dataclass(frozen=True, slots=True)
class PrefixPlan:
    items: Ints  # [num_items, PREFIX_FIELDS]
    entries: Ints  # [num_members], group by group
    lens: Ints  # [E] keys of each entry that the prefix kernel reads
    num_splits: Ints  # [E] partial results that it writes for each entry

    def members(self, context_lens: Ints, decode: DecodePlan) -> Ints:
        """Return [num_members, MEMBER_FIELDS], known once the entries' own splits are planned."""
        return np.stack(
            (self.entries, context_lens[self.entries], decode.first_partials[self.entries]), axis=1
        )


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    items: Ints  # [num_items, CHUNK_FIELDS]
    num_partials: int
    num_counters: int


@dataclass(frozen=True, slots=True)
class Group:
    """Decode entries whose tables begin with the same blocks."""

    entries: Ints
    num_blocks: int

    @property
    def saved(self) -> int:
        """Blocks that need not be read again."""
        return (len(self.entries) - 1) * self.num_blocks


def plan_decode(
    context_lens: Ints,  # [E]
    rows: Ints,  # [E]
    prefix: PrefixPlan | None,
    extra_items: int,  # items to spend on splitting entries
    at_once: int,  # items that run at the same time
    tile: int,  # keys that a program takes at a time
    min_split: int,
    window: int | None = None,  # keys that an entry sees, if not all; then there is no prefix
) -> DecodePlan:
    """Plan at most E + extra_items items; those of one entry have equal size. Every entry has at least one item, and at
    least one key outside its prefix."""
    num_entries = len(context_lens)
    first_keys: Ints | int = 0
    prefix_splits: Ints | int = 0
    if prefix is not None:
        first_keys, prefix_splits = prefix.lens, prefix.num_splits
    elif window is not None:
        first_keys = np.maximum(context_lens - window, 0)
    own_lens = context_lens - first_keys
    own_splits = -(-own_lens // split_size(int(own_lens.sum()), extra_items, tile, min_split))
    # The shortest come last. If they are too few to keep the memory busy, they are split, too.
    num_last, spare_items = num_entries % at_once, extra_items - int(own_splits.sum()) + num_entries
    if num_entries > at_once and 0 < num_last <= spare_items:
        final = own_lens.argsort(kind="stable")[:num_last]
        split_keys = split_size(int(own_lens[final].sum()), spare_items, tile, LAST_MIN_SPLIT)
        own_splits[final] = np.maximum(own_splits[final], -(-own_lens[final] // split_keys))
    split_lens = -(-own_lens // (own_splits * tile)) * tile
    own_splits = -(-own_lens // split_lens)
    num_splits = own_splits + prefix_splits
    partials = num_splits * (num_splits > 1)
    partial_ends = partials.cumsum(dtype=np.int32)
    first_partials = partial_ends - partials

    first_items = np.empty((num_entries, DECODE_FIELDS), dtype=np.int32)
    first_items[:, 0] = np.arange(num_entries)
    first_items[:, 1] = rows
    first_items[:, 2] = first_keys
    first_items[:, 4] = context_lens
    first_items[:, 5] = first_partials
    first_items[:, 6] = prefix_splits
    first_items[:, 7] = num_splits
    first_items[:, 8] = own_splits
    items = first_items.repeat(own_splits, axis=0)
    number = counting(own_splits).astype(np.int32)
    split_len = split_lens.repeat(own_splits)
    items[:, 2] += number * split_len
    items[:, 3] = np.minimum(items[:, 2] + split_len, items[:, 4])
    items[:, 6] += number
    items = items.take((items[:, 2] - items[:, 3]).argsort(kind="stable"), axis=0)  # the longest first
    return DecodePlan(items, first_partials, int(partial_ends[-1]) if num_entries else 0)


def plan_prefix(
    groups: list[Group],
    rows: Ints,  # [E]
    block_size: int,
    tile_members: int,
    extra_items: int,
    tile: int,
    min_split: int,
    max_items: int,
    max_partials: int,
) -> PrefixPlan | None:
    """Plan the shared prefixes, or return None if there are none. Groups that save least are dropped if not all fit."""
    groups = _fitting(groups, tile_members, max_items - extra_items, max_partials)
    if not groups:
        return None
    lens = np.zeros(len(rows), dtype=np.int32)
    num_splits = np.zeros(len(rows), dtype=np.int32)
    num_tiles = np.array([-(-len(group.entries) // tile_members) for group in groups])
    num_members = np.array([len(group.entries) for group in groups])
    num_keys = np.array([group.num_blocks * block_size for group in groups])
    split_keys = split_size(int((num_tiles * num_keys).sum()), extra_items, tile, min_split)
    spare_partials = max_partials - int(num_members.sum())
    split_keys = max(
        split_keys, split_size(int((num_members * num_keys).sum()), spare_partials, tile, min_split)
    )
    items: list[tuple[int, int, int, int, int, int]] = []
    first_member = 0
    for group, keys in zip(groups, num_keys.tolist(), strict=True):
        lens[group.entries] = keys
        num_splits[group.entries] = -(-keys // split_keys)
        row, members = int(rows[group.entries[0]]), len(group.entries)
        # Tiles that read the same keys are neighbours, so that one finds in the cache what the other fetched.
        for number, begin in enumerate(range(0, keys, split_keys)):
            for first in range(0, members, tile_members):
                count, end = min(tile_members, members - first), min(begin + split_keys, keys)
                items.append((first_member + first, count, row, begin, end, number))
        first_member += members
    entries = np.concatenate([group.entries for group in groups]).astype(np.int32)
    return PrefixPlan(np.array(items, dtype=np.int32), entries, lens, num_splits)


def _fitting(groups: list[Group], tile_members: int, max_tiles: int, max_partials: int) -> list[Group]:
    fitting = []
    for group in sorted(groups, key=lambda group: -group.saved):
        tiles, partials = -(-len(group.entries) // tile_members), 2 * len(group.entries)
        if tiles <= max_tiles and partials <= max_partials:
            fitting.append(group)
            max_tiles, max_partials = max_tiles - tiles, max_partials - partials
    return fitting


def find_groups(
    tables: Ints,  # [max_rows, max_blocks]
    rows: Ints,  # [E]
    num_blocks: Ints,  # [E] blocks of each entry that may be shared: full ones, except the one written now
    min_members: int,
    min_blocks: int,
    min_saved: int,
) -> list[Group]:
    """Return the groups that share at least `min_blocks` blocks and save reading at least `min_saved` blocks.

    Tables that agree in one block nearly always agree in all blocks before it, since shared blocks are found by the
    whole prefix that they end. So entries are sorted by block number `min_blocks`, and the resulting few groups are
    compared in full. If some members share less than others, the group that saves most reading is chosen.
    """
    column = min_blocks - 1
    candidates = np.flatnonzero(num_blocks >= min_blocks)
    if len(candidates) < min_members:
        return []
    ids = tables[rows[candidates], column]
    order = np.argsort(ids, kind="stable")
    ids = ids[order]
    starts = np.flatnonzero(np.concatenate(([True], ids[1:] != ids[:-1])))
    sizes = np.diff(np.append(starts, len(ids)))
    groups = []
    for start, size in zip(starts[sizes >= min_members], sizes[sizes >= min_members], strict=True):
        group = _best_group(tables, rows, num_blocks, candidates[order[start : start + size]])
        if len(group.entries) >= min_members and group.num_blocks >= min_blocks and group.saved >= min_saved:
            groups.append(group)
    return groups


def _best_group(tables: Ints, rows: Ints, num_blocks: Ints, entries: NDArray[np.intp]) -> Group:
    """Return the members and length that save most, among the entries that share blocks with the first."""
    limits = num_blocks[entries]
    width = int(limits[0])
    same = tables[rows[entries], :width] == tables[rows[entries[0]], :width]
    shared = np.where(same.all(axis=1), width, same.argmin(axis=1))
    shared = np.minimum(shared, limits)
    by_length = np.argsort(-shared, kind="stable")
    saved = shared[by_length] * np.arange(len(entries))  # by taking the entries up to this one
    best = int(saved.argmax())
    members = np.sort(entries[by_length[: best + 1]]).astype(np.int32)
    return Group(members, int(shared[by_length[best]]))


def plan_chunks(
    query_starts: Ints,  # [E + 1] token index of each entry's first query
    context_lens: Ints,  # [E]
    rows: Ints,  # [E]
    tile_positions: int,
    extra_items: int,  # items to spend on splitting tiles over keys
    tile: int,  # keys that a program takes at a time
    min_split: int,
    window: int | None = None,  # keys that a query sees, if not all
) -> ChunkPlan:
    """Plan at most `extra_items` more items than tiles, with at most 2 * extra_items * tile_positions partials."""
    counts = np.diff(query_starts)
    tiles = -(-counts // tile_positions)
    entry = np.repeat(np.arange(len(counts)), tiles)
    offset = counting(tiles) * tile_positions  # from the entry's first query to the tile's
    cached = (context_lens - counts)[entry]
    position = cached + offset
    positions = np.minimum(tile_positions, counts[entry] - offset)
    keys = position + positions
    first_key = 0 if window is None else np.maximum(position - window + 1, 0)
    num_keys = keys - first_key

    split_keys = split_size(int(num_keys.sum()), extra_items, tile, min_split)
    num_splits = -(-num_keys // split_keys)
    is_split = num_splits > 1
    partials = np.where(is_split, num_splits * tile_positions, 0)
    first_partial = np.cumsum(partials) - partials
    counter: NDArray[np.intp] = np.cumsum(is_split) - is_split

    tiles_of_items = np.repeat(np.arange(len(entry)), num_splits)  # the tile that an item belongs to
    number = counting(num_splits)
    begin = number * split_keys + (keys - num_keys)[tiles_of_items]
    end = np.minimum(begin + split_keys, keys[tiles_of_items])
    order = np.argsort(begin - end, kind="stable")
    tiles_of_items, number = tiles_of_items[order], number[order]
    items = np.empty((len(tiles_of_items), CHUNK_FIELDS), dtype=np.int32)
    columns = (
        (query_starts[entry] + offset)[tiles_of_items],
        positions[tiles_of_items],
        position[tiles_of_items],
        cached[tiles_of_items],
        rows[entry][tiles_of_items],
        begin[order],
        end[order],
        first_partial[tiles_of_items],
        number,
        num_splits[tiles_of_items],
        counter[tiles_of_items],
    )
    for column, values in enumerate(columns):
        items[:, column] = values
    return ChunkPlan(items, int(partials.sum()), int(is_split.sum()))


def plan_sequences(lengths: Ints, tile_positions: int) -> Ints:
    """Return [num_items, SEQUENCE_FIELDS], at most `max_sequence_items` of them."""
    tiles = -(-lengths // tile_positions)
    # Tiles of one sequence are neighbours, so that one finds in the cache the keys that another fetched.
    longest_first = (-lengths).argsort(kind="stable")
    sequences_of_items = longest_first.repeat(tiles[longest_first])  # the sequence that an item belongs to
    items = np.empty((len(sequences_of_items), SEQUENCE_FIELDS), dtype=np.int32)
    items[:, 0] = (lengths.cumsum() - lengths)[sequences_of_items]
    items[:, 1] = lengths[sequences_of_items]
    items[:, 2] = counting(tiles[longest_first]) * tile_positions
    return items


def max_sequence_items(num_tokens: int, num_sequences: int, tile_positions: int) -> int:
    """Return the most items for this many tokens in at most this many sequences."""
    return (num_tokens - num_sequences) // tile_positions + num_sequences


def split_size(total: int, extra_items: int, tile: int, min_split: int) -> int:
    """Return the smallest multiple of `tile` from `min_split` on that cuts `total` keys at most `extra_items` times."""
    if extra_items <= 0:
        return max(-(-total // tile) * tile, tile)
    return max(-(-max(-(-total // extra_items), min_split) // tile) * tile, tile)


def counting(counts: NDArray[Any]) -> NDArray[np.intp]:
    """Return 0 .. counts[0]-1, 0 .. counts[1]-1, and so on."""
    ends = counts.cumsum()
    numbers: NDArray[np.intp] = np.arange(ends[-1] if len(ends) else 0) - (ends - counts).repeat(counts)
    return numbers
