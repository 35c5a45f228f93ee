"""Which way the sums of ranks on GPUs take, and what ranks tell each other to find it. Ranks are threads here, and in
place of NCCL stands gloo, which is called the same way."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from inflight.execution.parallel import device_collective as module
from inflight.execution.parallel.collective import SharedCollective
from inflight.execution.parallel.device_collective import device_collective
from inflight.execution.parallel.exchange import all_agree, exchange
from inflight.execution.parallel.host_collective import HostCollective
from inflight.execution.parallel.nccl_collective import NcclCollective
from tests.execution.parallel.test_shared_memory import LIBRARY, together

pytestmark = pytest.mark.skipif(LIBRARY is None, reason="ranks need the compiled kernels")


def test_a_few_bytes_from_every_rank() -> None:
    given = [b"", b"\x00\xff", bytes(range(255))]
    for found in together(3, lambda rank, shared: exchange(shared, given[rank])):
        assert found == given
    assert together(3, lambda rank, shared: all_agree(shared, rank != 1)) == [False] * 3
    assert together(3, lambda _, shared: all_agree(shared, True)) == [True] * 3


def test_a_process_group_of_torch() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    parts = [torch.randn(3, 5), torch.randn(3, 4)]

    def work(rank: int, _: SharedCollective) -> tuple[Tensor, Tensor]:
        group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))
        ranks = NcclCollective(group)
        return ranks.sum(parts[rank][:, :4].clone()), ranks.gather(parts[rank], [5, 4])

    for total, columns in together(2, work):
        assert torch.equal(total, parts[0][:, :4] + parts[1])
        assert torch.equal(columns, torch.cat(parts, dim=1))


def test_through_the_host_only_rows_that_are_wanted_move() -> None:
    parts = [torch.randn(3, 5), torch.randn(3, 4)]

    def work(rank: int, shared: SharedCollective) -> tuple[Tensor, Tensor]:
        ranks = HostCollective(shared)
        wanted = torch.tensor([4, 0, 1], dtype=torch.int32)
        ranks.gather(parts[rank], [5, 4], torch.zeros_like(wanted))
        return ranks.gather(parts[rank], [5, 4]), ranks.gather(parts[rank], [5, 4], wanted)[::2]

    whole = torch.cat(parts, dim=1)
    for every, some in together(2, work):
        assert torch.equal(every, whole)
        assert torch.equal(some, whole[::2])


class Way:
    """A collective that says who it is."""

    slot = 1 << 30

    def __init__(self, name: str) -> None:
        self.name = name

    def sum(self, x: Tensor) -> Any:  # noqa: ARG002
        return self.name

    def gather(self, *_: Any) -> Any:
        return self.name

    def add_sum(self, *_: Any) -> bool:
        return True


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Any:
    def chosen(peers: Way | None, nccl: Way | None) -> Any:
        monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
        monkeypatch.setattr(module, "_peers", lambda *_: peers)
        monkeypatch.setattr(module, "_nccl", lambda *_: nccl)

        def of_rank(_: int, shared: SharedCollective) -> Any:
            return device_collective(None, shared, torch.device("cpu"))  # type: ignore[arg-type]

        return together(2, of_rank)[0]

    return chosen


def test_the_best_that_there_is(choose: Any) -> None:
    peers, nccl = Way("peers"), Way("nccl")
    assert choose(peers, None) is peers
    assert choose(None, nccl) is nccl
    assert isinstance(choose(None, None), HostCollective)
    assert not choose(None, None).capturable


def test_small_sums_by_peers_and_large_ones_by_nccl(choose: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ONE_SHOT", 64)
    both = choose(Way("peers"), Way("nccl"))
    small, large = torch.zeros(2, 8), torch.zeros(3, 8)
    assert (both.sum(small), both.sum(large)) == ("peers", "nccl")
    assert both.gather(large, [8, 8]) == "peers"
    assert both.add_sum(small, small, None, 0.0, None)
    assert not both.add_sum(large, large, None, 0.0, None)
