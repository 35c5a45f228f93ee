"""Memory in which programs that share a tile leave their sums."""

from __future__ import annotations

import torch

from inflight.layers.triton.tuning import Tile


class Workspace:
    """Where programs that share a tile meet. One for all layers of a stream: kernels there run one by one."""

    def __init__(self, device: torch.device, num_floats: int = 1 << 23, num_tiles: int = 1 << 12) -> None:
        self.partials = torch.empty(num_floats, dtype=torch.float32, device=device)
        self.counters = torch.zeros(num_tiles, dtype=torch.int32, device=device)

    def check(self, num_tiles: int, tile: Tile) -> None:
        assert num_tiles <= len(self.counters), f"{num_tiles} tiles are too many to split"
        num_floats = num_tiles * tile.split * tile.block_m * (tile.block_n + 1)
        assert num_floats <= len(self.partials), f"{num_floats} partial sums do not fit the workspace"
