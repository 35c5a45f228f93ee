"""Activations padded in memory.

Hopper's copy engine fetches whole tiles of tokens, and is slow for a tile that reaches past the end of the tensor. So
small tensors are followed by memory up to a whole tile; it may be read, but its contents must not affect results.
"""

from __future__ import annotations

import torch
from torch import Tensor

WHOLE_TILE = 128  # tokens: the largest tile of a kernel for few of them
FEW_TOKENS = 256  # with more tokens there is little to gain: one tile of many


def padded_empty(num_tokens: int, num_features: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised tensor [num_tokens, num_features]."""
    rows = num_tokens if num_tokens > FEW_TOKENS else -(-num_tokens // WHOLE_TILE) * WHOLE_TILE
    return torch.empty(rows, num_features, dtype=dtype, device=device)[:num_tokens]


def readable_rows(x: Tensor, tile: int) -> int:
    """Return how many rows of x [n, features], contiguous, may be read: whole tiles, as far as x is padded."""
    num_elements = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    return max(len(x), min(num_elements // x.shape[1], -(-len(x) // tile) * tile))
