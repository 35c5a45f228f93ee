"""Activations padded in memory.

A Hopper's copy engine fetches whole tiles of tokens, and is slow with a tile that reaches past the last token it was
told of. So small tensors of tokens are followed by memory up to a whole tile: it may be read, and what is there may
reach no result.
"""

from __future__ import annotations

import torch
from torch import Tensor

WHOLE_TILE = 128  # tokens: the largest tile of a kernel for few of them
FEW_TOKENS = 256  # with more, one tile in many is all there is to gain


def padded_empty(num_tokens: int, num_features: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[num_tokens, num_features], not initialised."""
    rows = num_tokens if num_tokens > FEW_TOKENS else -(-num_tokens // WHOLE_TILE) * WHOLE_TILE
    return torch.empty(rows, num_features, dtype=dtype, device=device)[:num_tokens]


def readable_rows(x: Tensor, tile: int) -> int:
    """Rows of x [n, features], contiguous, that may be read: those of whole tiles, as far as x is padded."""
    held = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    return max(len(x), min(held // x.shape[1], -(-len(x) // tile) * tile))
