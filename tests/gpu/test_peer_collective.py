"""Two ranks that meet on the device, in captured graphs. Here they are two CUDA streams of one process: their kernels
run side by side and wait for each other, as those of two processes do on their own GPUs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from inflight.execution.parallel.device_collective import NcclCollective, PeerCollective, buffer_bytes
from inflight.layers.triton.linear_parts import NextNorm

DEVICE = torch.device("cuda")
SLOT = 1 << 18
EPS = 1e-5
SHAPES = [(1, 64), (7, 64), (100, 64), (5, 4096), (3, 64)]
VOCAB = 1001


@dataclass
class Rank:
    collective: PeerCollective
    stream: torch.cuda.Stream
    parts: list[Tensor]
    hidden: list[Tensor]
    norm: Tensor
    logits: Tensor
    graph: torch.cuda.CUDAGraph | None = None

    def step(self) -> list[Tensor]:
        """A sum, a sum that is added to the residual and left for the next norm, and a gather, of several sizes."""
        results = []
        for part, hidden in zip(self.parts, self.hidden, strict=True):
            results.append(self.collective.sum(part.clone()))
            residual, left = hidden.clone(), NextNorm(self.norm[: part.shape[1]])
            assert self.collective.add_sum(residual, part, None, EPS, left)
            assert left.scaled is not None
            assert left.squares is not None
            results += [residual, left.scaled, left.squares]
        results.append(self.collective.gather(self.logits, [501, 500]))
        return results


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    torch.manual_seed(0)
    buffers = torch.zeros(2, buffer_bytes(2, SLOT), dtype=torch.uint8, device=DEVICE)
    lost = torch.ones(1, dtype=torch.int32, pin_memory=True)
    norm = torch.rand(4096, device=DEVICE)
    hidden = [torch.randn(shape, device=DEVICE).bfloat16() for shape in SHAPES]
    made = [
        Rank(
            PeerCollective(rank, [b.data_ptr() for b in buffers], SLOT, lost.data_ptr(), DEVICE),
            torch.cuda.Stream(),  # type: ignore[no-untyped-call]
            [torch.randn(shape, device=DEVICE).bfloat16() for shape in SHAPES],
            hidden,
            norm,
            torch.randn(300, 501 - rank, device=DEVICE),
        )
        for rank in range(2)
    ]
    torch.cuda.synchronize()
    for rank in made:  # nobody waits for a lost rank: kernels are compiled, and memory is taken
        with torch.cuda.stream(rank.stream):
            rank.step()
        torch.cuda.synchronize()
    lost.zero_()
    # If they do not meet, the test fails; it does not hang.
    alarm = threading.Timer(20, lambda: lost.fill_(1))
    alarm.start()
    yield made
    alarm.cancel()
    lost.fill_(1)
    torch.cuda.synchronize()


def test_two_ranks_meet_in_captured_graphs(ranks: list[Rank]) -> None:
    results = []
    for rank in ranks:
        rank.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(rank.graph, stream=rank.stream, capture_error_mode="relaxed"):
            results.append(rank.step())
    for _ in range(30):
        for rank in ranks:
            for part in rank.parts:
                part.normal_()
            rank.logits.normal_()
        torch.cuda.synchronize()
        for rank in ranks:
            assert rank.graph is not None
            with torch.cuda.stream(rank.stream):
                rank.graph.replay()
        torch.cuda.synchronize()
        first, second = ranks
        for actual in results:
            sums = iter(actual)
            for a, b, hidden in zip(first.parts, second.parts, first.hidden, strict=True):
                total = a.float() + b.float()
                assert torch.equal(next(sums), total.bfloat16())
                residual, scaled, squares = next(sums), next(sums), next(sums)
                assert torch.equal(residual, (total + hidden.float()).bfloat16())
                wide = residual.float()
                assert torch.equal(scaled, (wide * first.norm[: a.shape[1]]).bfloat16())
                torch.testing.assert_close(squares, wide.square().sum(1)[None])
            assert torch.equal(next(sums), torch.cat((first.logits, second.logits), dim=1))


def test_nccl_of_one_rank_can_be_captured() -> None:
    """More ranks need more GPUs."""
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    options = torch.distributed.ProcessGroupNCCL.Options()
    ranks = NcclCollective(torch.distributed.ProcessGroupNCCL(store, 0, 1, options))
    x = torch.randn(4, 9, device=DEVICE)
    ranks.sum(x.clone())
    ranks.gather(x, [9])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        total, columns = ranks.sum(x.clone()), ranks.gather(x, [9])
    x.normal_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(total, x)
    assert torch.equal(columns, x)
