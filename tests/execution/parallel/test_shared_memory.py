"""Sums, gathers and streams through shared memory, between threads that act as ranks."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import pytest
import torch

from inflight.execution.parallel.layout import RankLayout, RankMemory
from inflight.execution.parallel.shared_memory import SharedCollective
from inflight.execution.parallel.starting import slot_bytes
from inflight.layers.native.library import native_library
from tests.support.waiting import SECONDS, wait_until

LIBRARY = native_library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="ranks on a CPU need the compiled kernels")


class LostError(Exception):
    pass


def _lost(code: int) -> NoReturn:
    raise LostError(code)


def memories(layout: RankLayout) -> list[RankMemory]:
    assert LIBRARY is not None
    first = RankMemory(LIBRARY, layout, 0, _lost)
    others = [
        RankMemory(LIBRARY, layout, rank, _lost, os.dup(first.descriptor)) for rank in range(1, layout.count)
    ]
    return [first, *others]


def content(memory: RankMemory) -> bytes:
    return bytes(memory._memory._map)


def together(size: int, work: Callable[[int, SharedCollective], Any], slot: int = 4096) -> list[Any]:
    """Run `work` on each rank, and return the results."""
    collectives = [m.collective() for m in memories(RankLayout(size, 1, 1, slot, 0, ()))]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, range(size), collectives))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_are_taken_in_the_order_of_the_ranks(size: int) -> None:
    """This includes sums that are larger than a slot."""
    torch.manual_seed(0)
    parts = torch.randn(size, 300, 17) * 10.0 ** torch.randint(-6, 6, (size, 300, 17))
    expected = parts[0]
    for part in parts[1:]:
        expected = expected + part
    for sums in together(size, lambda rank, of: [of.sum(parts[rank].clone()) for _ in range(3)]):
        assert all(torch.equal(each, expected) for each in sums)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("num_rows", [0, 1, 50])
def test_gathers_return_the_columns_of_all_ranks(size: int, num_rows: int) -> None:
    """Parts are uneven, and many rows are gathered in pieces."""
    whole = torch.randn(num_rows, 101)
    whole[num_rows // 2 :, 7] = torch.nan
    parts = whole.tensor_split(size, dim=1)
    widths = [part.shape[1] for part in parts]
    for results in together(size, lambda rank, of: [of.gather(parts[rank], widths) for _ in range(3)]):
        assert all(torch.equal(each.nan_to_num(), whole.nan_to_num()) for each in results)
        assert all(torch.equal(each.isnan(), whole.isnan()) for each in results)


def test_one_row_of_the_widest_rank_fits_a_slot() -> None:
    for vocab_size, size in ((151_936, 2), (1_000_001, 3), (2_000_000, 2)):
        assert slot_bytes(vocab_size, size) >= 4 * -(-vocab_size // size)


def test_extra_patience_applies_to_one_exchange() -> None:
    (memory, _) = memories(RankLayout(2, 1, 1, 4096, 0, ()))
    seat = memory.collective()
    assert seat is not None
    seat.watches = True
    limits: list[int] = []

    def take(*arguments: Any) -> int:
        limits.append(arguments[5])  # microseconds
        return 0

    seat.call(take)
    seat.allow(1000.0)
    seat.call(take)
    seat.call(take)
    assert max(limits[0], limits[2]) < 1e9 <= limits[1]


def test_late_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inflight.execution.parallel.shared_memory.PATIENCE", 0.1)
    first, *_ = (m.collective() for m in memories(RankLayout(3, 1, 1, 4096, 0, ())))
    assert first is not None
    first.watches = True
    first.begin_step()
    with pytest.raises(LostError, match="2"):  # 1 + its number
        first.sum(torch.ones(3))


def test_lost_rank_ends_every_wait() -> None:
    first, second = memories(RankLayout(2, 1, 1, 4096, 0, ()))
    calls: list[str] = []
    second.when_lost(lambda: calls.append("lost"))  # for waits elsewhere
    second.when_lost(lambda: calls.remove("a mistake"))  # which raises, and keeps no one waiting
    collective, steps = first.collective(), second.steps()
    assert collective is not None
    nothing = content(second)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(collective.sum, torch.ones(3))
        wait_until(lambda: content(second) != nothing, "what the first has to add")
        second.lose()
        with pytest.raises(LostError, match="-1"):
            waiting.result()
    with pytest.raises(LostError, match="-1"):
        steps.receive(0)
    second.lose()
    assert calls == ["lost"]


def test_messages_may_be_larger_than_the_ring() -> None:
    """The writer waits for the slowest of its readers, here for one that begins late."""
    ranks = memories(RankLayout(3, 1, 1, 4096, 0, ()))
    messages = [os.urandom(size) for size in (10, 3 << 20, 0, 1 << 20, 77)]

    has_begun = threading.Event()

    def read(rank: int) -> list[bytes]:
        steps = ranks[rank].steps()
        if rank == 2:
            assert has_begun.wait(SECONDS)
        received = []
        for _ in messages:
            received.append(bytes(steps.receive(rank - 1)))
            has_begun.set()
        return received

    with ThreadPoolExecutor(2) as pool:
        reading = [pool.submit(read, rank) for rank in (1, 2)]
        for message in messages:
            ranks[0].steps().send(message)
        for job in reading:
            assert job.result() == messages
