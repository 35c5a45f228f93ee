"""Sums and gathers over memory that all ranks read, as one of them computes them. In Triton's interpreter ranks cannot
wait for each other: the parts and flags of the others are there before it begins."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from inflight.execution.parallel.device_collective import PeerCollective, buffer_bytes
from inflight.execution.parallel.triton.peer_kernels import MAX_PROGRAMS
from inflight.layers.kernels import Residual
from inflight.layers.triton.linear_parts import NextNorm
from inflight.layers.triton_kernels import TritonKernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOT = 1024
EPS = 1e-5


class OneOfSeveral:
    """A rank and the buffers of all ranks."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.buffers = torch.zeros(size, buffer_bytes(size, SLOT), dtype=torch.uint8, device=DEVICE)
        self.lost = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        addresses = [buffer.data_ptr() for buffer in self.buffers]
        self.collective = PeerCollective(rank, addresses, SLOT, self.lost.data_ptr(), DEVICE)
        self.number = 0
        self._flag_bytes = size * MAX_PROGRAMS * 4

    def others_give(self, *parts: Iterable[Tensor]) -> None:
        """Their next exchanges, at most two. This rank's own part is not looked at."""
        flags = self.buffers[self.rank, : self._flag_bytes].view(torch.int32).view(-1, MAX_PROGRAMS)
        for ahead, tensors in enumerate(parts, start=1):
            number = self.number + ahead
            first = self._flag_bytes + (number & 1) * SLOT
            for peer, part in enumerate(tensors):
                if peer != self.rank:
                    flat = part.contiguous().view(-1).view(torch.uint8)
                    self.buffers[peer, first : first + len(flat)] = flat
                    flags[peer] = number
        self.number += len(parts)


def in_order(parts: Tensor) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total


@pytest.mark.parametrize(("rank", "size"), [(0, 2), (1, 2), (2, 3)])
def test_sums_are_taken_in_the_order_of_the_ranks(rank: int, size: int) -> None:
    """Exchange after exchange, also where the sizes and so the programs differ."""
    ranks = OneOfSeveral(rank, size)
    torch.manual_seed(size)
    for num_tokens in (1, 3, 2):
        scales = 10.0 ** torch.randint(-6, 6, (size, num_tokens, 33), device=DEVICE)
        parts = torch.randn(size, num_tokens, 33, device=DEVICE) * scales
        ranks.others_give(parts)
        assert torch.equal(ranks.collective.sum(parts[rank].clone()), in_order(parts))
    assert ranks.collective.sum(torch.empty(0, 33, device=DEVICE)).shape == (0, 33)


def test_tensors_larger_than_a_slot_are_exchanged_in_pieces() -> None:
    ranks = OneOfSeveral(1, 2)
    parts = torch.randn(2, 5, 64, device=DEVICE)
    ranks.others_give(parts[:, :4], parts[:, 4:])
    x = parts[1].clone()
    assert not ranks.collective.add_sum(x, x, None, EPS, None)
    assert torch.equal(ranks.collective.sum(x), in_order(parts))


@pytest.mark.parametrize("with_norm", [False, True])
def test_sum_adds_the_residual_and_half_of_the_next_norm(with_norm: bool) -> None:
    ranks = OneOfSeveral(0, 2)
    torch.manual_seed(0)
    parts, hidden = (torch.randn(*shape, device=DEVICE).bfloat16() for shape in ((2, 3, 40), (3, 40)))
    norm, next_norm = torch.rand(2, 40, device=DEVICE)
    expected = in_order(parts)
    if with_norm:
        expected = expected * (expected.square().mean(1, keepdim=True) + EPS).rsqrt() * norm
    expected = (expected + hidden.float()).bfloat16()
    ranks.others_give(parts)
    left = NextNorm(next_norm)
    assert ranks.collective.add_sum(hidden, parts[0].clone(), norm if with_norm else None, EPS, left)
    assert left.scaled is not None
    assert left.squares is not None
    torch.testing.assert_close(hidden, expected)
    torch.testing.assert_close(left.scaled, (hidden.float() * next_norm).bfloat16())
    torch.testing.assert_close(left.squares, hidden.float().square().sum(1)[None])


@pytest.mark.parametrize(("rank", "size", "num_columns"), [(0, 2, 9), (1, 2, 9), (2, 3, 8), (1, 2, 60)])
def test_gather_returns_the_columns_of_all_ranks(rank: int, size: int, num_columns: int) -> None:
    """Columns are divided as evenly as possible; many rows are gathered in pieces."""
    ranks = OneOfSeveral(rank, size)
    whole = torch.randn(12, num_columns, device=DEVICE)
    parts = list(whole.tensor_split(size, dim=1))
    widths = [part.shape[1] for part in parts]
    at_once = SLOT // (4 * max(widths))
    ranks.others_give(*([part[i : i + at_once] for part in parts] for i in range(0, 12, at_once)))
    assert torch.equal(ranks.collective.gather(parts[rank], widths), whole)


def test_waiting_ends_when_a_rank_is_lost() -> None:
    ranks = OneOfSeveral(0, 2)
    ranks.lost.fill_(1)
    ranks.collective.sum(torch.ones(1, 8, device=DEVICE))


def test_sharded_layer_adds_in_the_pass_of_the_sum() -> None:
    """Its output for the next layer is that of a layer of one rank."""
    ranks = OneOfSeveral(0, 2)
    torch.manual_seed(0)
    kernels = TritonKernels(torch.float32, DEVICE)
    weight, next_weight, hidden = (torch.randn(n, 16, device=DEVICE) for n in (16, 8, 1))
    x, next_norm = torch.randn(1, 16, device=DEVICE), torch.rand(16, device=DEVICE)
    whole = kernels.linear(16, 16, torch.float32, bias=False)
    half = kernels.linear(8, 16, torch.float32, False, ranks.collective)
    reader = kernels.linear(16, 8, torch.float32, bias=False)
    whole.load(weight)
    half.load(weight[:, :8])
    reader.load(next_weight)
    expected = whole.add_to(Residual(hidden.clone(), None), x, None, EPS, next_norm)
    ranks.others_give([x, x[:, 8:] @ weight[:, 8:].T])
    result = half.add_to(Residual(hidden.clone(), None), x[:, :8].contiguous(), None, EPS, next_norm)
    assert result.scaled is not None
    torch.testing.assert_close(result.x, expected.x)
    torch.testing.assert_close(reader.normed(result, EPS), reader.normed(expected, EPS))
