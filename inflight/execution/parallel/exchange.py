"""A few bytes from every rank to every rank, for what they must know of each other before their first step."""

from __future__ import annotations

import torch

from inflight.execution.parallel.collective import SharedCollective

MOST = 255  # bytes


def exchange(shared: SharedCollective, data: bytes) -> list[bytes]:
    """What each rank gives, in their order: as a sum, in which each rank has a row of its own."""
    assert len(data) <= MOST, f"{len(data)} bytes are too many to exchange"
    rows = torch.zeros(shared.size, 1 + MOST)
    rows[shared.rank, : 1 + len(data)] = torch.tensor([len(data), *data], dtype=torch.float32)
    found = shared.sum(rows).int().tolist()
    return [bytes(places[:count]) for count, *places in found]


def all_agree(shared: SharedCollective, mine: bool) -> bool:
    return all(found == b"1" for found in exchange(shared, b"1" if mine else b"0"))
