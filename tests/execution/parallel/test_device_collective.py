"""The choice of a collective for ranks on GPUs. Ranks are threads here, and gloo, which has the same interface, stands
in for NCCL."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from inflight.execution.parallel import device_collective as module
from inflight.execution.parallel.device_collective import NcclCollective, device_collective
from inflight.execution.parallel.shared_memory import HostCollective, SharedCollective, all_agree, exchange
from tests.execution.parallel.test_shared_memory import LIBRARY, together

pytestmark = pytest.mark.skipif(LIBRARY is None, reason="ranks need the compiled kernels")


def test_exchange_returns_the_bytes_of_every_rank() -> None:
    data = [b"", b"\x00\xff", bytes(range(255))]
    for received in together(3, lambda rank, shared: exchange(shared, data[rank])):
        assert received == data
    assert together(3, lambda rank, shared: all_agree(shared, rank != 1)) == [False] * 3
    assert together(3, lambda _, shared: all_agree(shared, True)) == [True] * 3


def test_torch_process_group_sums_and_gathers() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    parts = [torch.randn(3, 5), torch.randn(3, 4)]

    def work(rank: int, _: SharedCollective) -> tuple[Tensor, Tensor]:
        group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))
        ranks = NcclCollective(group)
        return ranks.sum(parts[rank][:, :4].clone()), ranks.gather(parts[rank], [5, 4])

    for total, columns in together(2, work):
        assert torch.equal(total, parts[0][:, :4] + parts[1])
        assert torch.equal(columns, torch.cat(parts, dim=1))


class GlooGroup(dist.ProcessGroupGloo):
    """Takes the arguments of ProcessGroupNCCL."""

    class Options:
        pass

    def __init__(self, store: Any, rank: int, size: int, _options: Options) -> None:
        super().__init__(store, rank, size, timedelta(seconds=60))


class FakeProperties(NamedTuple):
    uuid: str


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_nccl_is_used_only_if_every_rank_has_its_own_gpu(
    num_gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", GlooGroup, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    callbacks: list[Any] = []

    class FakeMemory:
        when_lost = callbacks.append

    properties = threading.local()
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: FakeProperties(f"gpu {properties.gpu}")
    )

    def work(rank: int, shared: SharedCollective) -> Tensor | None:
        properties.gpu = rank % num_gpus
        collective = module._nccl(FakeMemory(), shared, torch.device("cpu"))  # type: ignore[arg-type]
        return None if collective is None else collective.sum(torch.full((3,), 1.0 + rank))

    sums = together(2, work)
    if num_gpus == 1:
        assert sums == [None, None]
        assert not callbacks
    else:
        assert all(total.tolist() == [3.0, 3.0, 3.0] for total in sums)
        assert len(callbacks) == 2  # a lost rank aborts the group


def test_host_collective_sums_and_gathers() -> None:
    parts = [torch.randn(3, 5), torch.randn(3, 4)]

    def work(rank: int, shared: SharedCollective) -> tuple[Tensor, Tensor]:
        ranks = HostCollective(shared)
        return ranks.sum(parts[rank][:, :4].clone()), ranks.gather(parts[rank], [5, 4])

    for total, columns in together(2, work):
        assert torch.equal(total, parts[0][:, :4] + parts[1])
        assert torch.equal(columns, torch.cat(parts, dim=1))


class NamedCollective:
    """A collective whose results are its name."""

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
    def chosen(peers: NamedCollective | None, nccl: NamedCollective | None) -> Any:
        monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
        monkeypatch.setattr(module, "_peers", lambda *_: peers)
        monkeypatch.setattr(module, "_nccl", lambda *_: nccl)

        def of_rank(_: int, shared: SharedCollective) -> Any:
            return device_collective(None, shared, torch.device("cpu"))  # type: ignore[arg-type]

        return together(2, of_rank)[0]

    return chosen


def test_best_available_collective_is_chosen(choose: Any) -> None:
    peers, nccl = NamedCollective("peers"), NamedCollective("nccl")
    assert choose(peers, None) is peers
    assert choose(None, nccl) is nccl
    assert isinstance(choose(None, None), HostCollective)
    assert not choose(None, None).capturable


def test_small_sums_use_peer_memory_and_large_ones_nccl(choose: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ONE_SHOT", 64)
    both = choose(NamedCollective("peers"), NamedCollective("nccl"))
    small, large = torch.zeros(2, 8), torch.zeros(3, 8)
    assert (both.sum(small), both.sum(large)) == ("peers", "nccl")
    assert both.gather(large, [8, 8]) == "peers"
    assert both.add_sum(small, small, None, 0.0, None)
    assert not both.add_sum(large, large, None, 0.0, None)
