from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from inflight.layers.attention.triton.plan import (
    Group,
    Ints,
    PrefixPlan,
    find_groups,
    plan_chunks,
    plan_decode,
    plan_prefix,
    split_size,
)

lengths = st.lists(st.integers(1, 3000), min_size=1, max_size=40)
extras = st.integers(0, 70)
tiles = st.sampled_from([16, 64, 128])


def ints(*values: int) -> Ints:
    return np.array(values, dtype=np.int32)


def lines(array: Ints) -> list[list[int]]:
    return [[int(value) for value in line] for line in array]


@given(lengths, extras, st.integers(1, 50), tiles, st.sampled_from([1, 64, 256]), st.data())
def test_decode_items_cover_every_key_once(
    context_lens: list[int], extra: int, at_once: int, tile: int, min_split: int, data: st.DataObject
) -> None:
    contexts, num_entries = ints(*context_lens), len(context_lens)
    rows = np.random.default_rng(0).permutation(num_entries).astype(np.int32)
    lens = ints(*(data.draw(st.integers(0, n - 1)) for n in context_lens))
    prefix_splits = ints(*(data.draw(st.integers(1, 5)) if n else 0 for n in lens))
    prefix = PrefixPlan(np.empty((0, 6), dtype=np.int32), ints(), lens, prefix_splits)
    plan = plan_decode(contexts, rows, prefix, extra, at_once, tile, min_split)
    assert plan.items.dtype == np.int32
    assert len(plan.items) <= num_entries + extra
    spans: dict[int, list[tuple[int, int]]] = {}
    partials: list[int] = []
    for entry, row, begin, end, context_len, first_partial, split, splits, own in lines(plan.items):
        assert (row, context_len, splits) == (rows[entry], contexts[entry], own + prefix_splits[entry])
        assert prefix_splits[entry] <= split < splits
        spans.setdefault(entry, []).append((begin, end))
        if splits > 1:
            partials.append(first_partial + split)
            if split == prefix_splits[entry]:
                partials += range(first_partial, first_partial + split)
            assert first_partial == plan.first_partials[entry]
    for entry, pieces in spans.items():
        pieces.sort()
        assert pieces[0][0] == lens[entry]
        assert pieces[-1][1] == contexts[entry]
        assert all(a[1] == b[0] and a[0] < a[1] for a, b in pairwise(pieces))
        first, *others = (end - begin for begin, end in pieces)
        assert all(size == first for size in others[:-1])
        assert all(size <= first for size in others[-1:])
    assert len(spans) == num_entries
    assert sorted(partials) == list(range(plan.num_partials))
    sizes = plan.items[:, 3] - plan.items[:, 2]
    assert (np.diff(sizes) <= 0).all()


def test_splits_of_an_entry_are_even() -> None:
    plan = plan_decode(ints(8300, 8300), ints(0, 1), None, 4, 66, 64, 512)
    assert [line[2:4] for line in lines(plan.items)] == [[0, 4160], [0, 4160], [4160, 8300], [4160, 8300]]


def test_few_last_decodes_are_split() -> None:
    def splits(num_entries: int) -> list[int]:
        contexts = np.full(num_entries, 1000, dtype=np.int32)
        plan = plan_decode(contexts, np.arange(num_entries, dtype=np.int32), None, 26, 66, 64, 512)
        return sorted(np.bincount(plan.items[:, 0]).tolist())

    assert splits(66) == [1] * 66
    assert splits(66 + 10) == [1] * 66 + [3] * 10
    assert splits(66 + 20) == [1] * 66 + [2] * 20
    assert splits(66 + 27) == [1] * (66 + 27)  # as many as keep the memory busy


def test_splits_get_no_smaller_than_the_items_allow() -> None:
    assert split_size(8192, 64, 64, 64) == 128
    assert split_size(8192, 16, 64, 64) == 512
    assert split_size(100, 64, 64, 64) == 64
    assert split_size(8192, 64, 64, 256) == 256
    assert split_size(8192, 0, 64, 64) == 8192


def test_empty_batch_has_no_items() -> None:
    assert len(plan_decode(ints(), ints(), None, 8, 8, 16, 16).items) == 0
    assert len(plan_chunks(ints(3), ints(), ints(), 8, 8, 16, 16).items) == 0


@given(lengths, extras, tiles, st.integers(1, 400))
def test_decode_items_cover_only_the_window(
    context_lens: list[int], extra: int, tile: int, window: int
) -> None:
    contexts, rows = ints(*context_lens), np.arange(len(context_lens), dtype=np.int32)
    plan = plan_decode(contexts, rows, None, extra, 8, tile, 16, window)
    assert len(plan.items) <= len(contexts) + extra
    for entry, context_len in enumerate(context_lens):
        pieces = sorted((begin, end) for of, _, begin, end, *_ in lines(plan.items) if of == entry)
        assert (pieces[0][0], pieces[-1][1]) == (max(0, context_len - window), context_len)
        assert all(a[1] == b[0] for a, b in pairwise(pieces))


@given(
    st.lists(st.tuples(st.integers(1, 900), st.integers(0, 900)), min_size=1, max_size=12),
    extras,
    tiles,
    st.sampled_from([None, 1, 50, 600]),
)
def test_chunk_items_cover_every_query_and_key_once(
    entries: list[tuple[int, int]], extra: int, tile: int, window: int | None
) -> None:
    counts, cached = ints(*(count for count, _ in entries)), ints(*(n for _, n in entries))
    starts = (5 + np.concatenate(([0], np.cumsum(counts)))).astype(np.int32)
    rows = np.arange(len(entries), dtype=np.int32) + 7
    plan = plan_chunks(starts, counts + cached, rows, 42, extra, tile, tile, window)
    num_tiles = int((-(-counts // 42)).sum())
    assert len(plan.items) <= num_tiles + extra
    assert plan.num_partials <= 2 * extra * 42
    splits_seen: dict[int, list[tuple[int, int, int]]] = {}
    tokens: set[int] = set()
    partials: set[int] = set()
    for token, positions, position, before, row, begin, end, first_partial, split, splits, counter in lines(
        plan.items
    ):
        entry = row - 7
        assert before == cached[entry]
        assert position - before == token - starts[entry]
        assert token + positions <= starts[entry + 1]
        tokens.update(range(token, token + positions))
        first_key = 0 if window is None else max(0, position - window + 1)
        splits_seen.setdefault(token, []).append(
            (begin - first_key, end - first_key, position + positions - first_key)
        )
        if splits > 1:
            places = set(range(first_partial + split * 42, first_partial + (split + 1) * 42))
            assert not partials & places
            partials |= places
            assert 0 <= counter < plan.num_counters
    assert tokens == set(range(int(starts[0]), int(starts[-1])))
    assert partials == set(range(plan.num_partials))
    for pieces in splits_seen.values():
        pieces.sort()
        assert pieces[0][0] == 0
        assert all(a[1] == b[0] for a, b in pairwise(pieces))
        assert pieces[-1][1] == pieces[-1][2]
    sizes = plan.items[:, 6] - plan.items[:, 5]
    assert (np.diff(sizes) <= 0).all()


def test_short_chunks_on_a_long_context_are_split() -> None:
    plan = plan_chunks(ints(0, 64), ints(10064), ints(0), 64, 16, 64, 512)
    assert 15 <= len(plan.items) <= 17
    assert plan.num_counters == 1


def test_long_chunks_are_not_split() -> None:
    plan = plan_chunks(ints(0, 8192), ints(8192), ints(0), 64, 33, 64, 512)
    assert len(plan.items) == 128
    assert plan.num_partials == 0


def tables_with(*lines: list[int]) -> Ints:
    return np.array(lines, dtype=np.int32)


def test_entries_that_begin_alike_are_grouped() -> None:
    tables = tables_with([1, 2, 3, 4], [9, 8, 7, 6], [1, 2, 3, 5], [1, 2, 3, 9], [9, 8, 1, 1])
    rows = ints(0, 1, 2, 3, 4)
    groups = find_groups(tables, rows, ints(4, 4, 4, 4, 4), 2, 2, 2)
    actual = {(tuple(group.entries.tolist()), group.num_blocks) for group in groups}
    assert actual == {((0, 2, 3), 3), ((1, 4), 2)}
    (paying,) = find_groups(tables, rows, ints(4, 4, 4, 4, 4), 2, 2, 6)
    assert paying.entries.tolist() == [0, 2, 3]
    (large,) = find_groups(tables, rows, ints(4, 4, 4, 4, 4), 3, 2, 2)
    assert large.entries.tolist() == [0, 2, 3]
    assert find_groups(tables, rows, ints(4, 4, 4, 4, 4), 4, 2, 2) == []


def test_blocks_beyond_a_members_shareable_part_are_not_grouped() -> None:
    tables = tables_with([1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4])
    (group,) = find_groups(tables, ints(0, 1, 2), ints(4, 3, 4), 2, 1, 1)
    assert (group.entries.tolist(), group.num_blocks) == ([0, 1, 2], 3)
    (group,) = find_groups(tables, ints(0, 1, 2), ints(4, 0, 4), 2, 1, 1)
    assert (group.entries.tolist(), group.num_blocks) == ([0, 2], 4)


def test_member_that_shares_little_is_left_out_of_its_group() -> None:
    long = list(range(1, 11))
    tables = tables_with(long, [1, *range(20, 29)], [*long[:8], 50, 51], long)
    (group,) = find_groups(tables, ints(0, 1, 2, 3), ints(10, 10, 10, 10), 2, 1, 1)
    assert (group.entries.tolist(), group.num_blocks) == ([0, 2, 3], 8)


@given(st.lists(st.tuples(st.integers(2, 30), st.integers(1, 200)), min_size=1, max_size=4), extras)
def test_prefix_items_cover_every_member_and_key_once(sizes: list[tuple[int, int]], extra: int) -> None:
    groups, first = [], 0
    for members, blocks in sizes:
        groups.append(Group(np.arange(first, first + members, dtype=np.int32), blocks))
        first += members
    rows = np.arange(first + 3, dtype=np.int32) + 11
    max_items, max_partials = extra + 4, 90
    plan = plan_prefix(groups, rows, 16, 8, extra, 64, 64, max_items, max_partials)
    if plan is None:
        return
    assert len(plan.items) <= max_items
    assert plan.num_splits.sum() <= max_partials
    seen: dict[int, list[tuple[int, int, int]]] = {}
    for first_member, members, row, begin, end, split in lines(plan.items):
        assert 1 <= members <= 8
        for entry in plan.entries[first_member : first_member + members]:
            assert any(row - 11 in group.entries and entry in group.entries for group in groups)
            seen.setdefault(int(entry), []).append((split, begin, end))
    for entry, pieces in seen.items():
        pieces.sort()
        assert [split for split, _, _ in pieces] == list(range(plan.num_splits[entry]))
        assert pieces[0][1] == 0
        assert pieces[-1][2] == plan.lens[entry]
        assert all(a[2] == b[1] for a, b in pairwise(pieces))
    assert set(seen) == {entry for entry in range(len(rows)) if plan.lens[entry]}


def test_members_know_where_their_partials_go() -> None:
    group = Group(ints(0, 2), 4)
    prefix = plan_prefix([group], ints(5, 6, 7), 16, 8, 4, 32, 32, 8, 64)
    assert prefix is not None
    contexts = ints(70, 30, 100)
    decode = plan_decode(contexts, ints(5, 6, 7), prefix, 0, 8, 32, 32)
    members = prefix.members(contexts, decode)
    assert members.tolist() == [[0, 70, decode.first_partials[0]], [2, 100, decode.first_partials[2]]]
    assert decode.num_partials == 2 * (prefix.num_splits[0] + 1)
