"""Permanent rows of the CPU runner."""

from __future__ import annotations

from inflight.execution.runner import RecentTokens, Rows
from inflight.kv.block_manager import TableUpdate
from inflight.request import Request
from inflight.sampling_params import SamplingParams
from inflight.scheduling.batch import Admission, Batch


def test_rows_store_tokens_and_blocks() -> None:
    rows = Rows(max_rows=3, max_len=10, block_size=4, num_tables=2)
    rows.tokens.fill_(-1)
    rows.block_tables.fill_(-1)
    preempted, new = (
        Request.create(name, ids, SamplingParams(), max_tokens=4)
        for name, ids in (("a", [1, 2, 3]), ("b", [4, 5]))
    )
    preempted.token_ids += [8, 9]
    batch = Batch(step=0)
    batch.admissions += [Admission(2, preempted.current_spec()), Admission(0, new.current_spec())]
    batch.tables += [TableUpdate(2, 0, [7, 8]), TableUpdate(0, 1, [5], table=1), TableUpdate(2, 2, [3])]
    rows.apply(batch)
    assert rows.tokens.tolist() == [[4, 5] + [-1] * 8, [-1] * 10, [1, 2, 3, 8, 9] + [-1] * 5]
    assert rows.block_tables.tolist() == [
        [[-1, -1, -1], [-1, -1, -1], [7, 8, 3]],
        [[-1, 5, -1], [-1, -1, -1], [-1, -1, -1]],
    ]
    assert new.spec.token_ids.tolist() == [4, 5]


def test_likely_tokens_are_those_that_nearly_all_recent_ones_are_among() -> None:
    recent = RecentTokens(200_000)
    assert recent.num_likely == 200_000  # nothing is known yet
    recent.note([5] * 100)
    assert recent.num_likely == 1 << 13
    recent.note([20_000] * 50)
    assert recent.num_likely == 1 << 15
    recent.note([199_999])
    assert recent.num_likely == 1 << 15
    recent.note([199_999] * 10)
    assert recent.num_likely == 200_000
    recent.note([5] * 20_000)
    assert recent.num_likely == 1 << 13
    small = RecentTokens(300)
    small.note([5] * 100)
    assert small.num_likely == 300
