"""What attention needs to know of one decoder layer, besides its KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """Projected heads become attention: norms of single heads, rotary embedding, scale and window."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm: Tensor | None  # [head_dim] float32
    k_norm: Tensor | None  # [head_dim] float32
    eps: float
    cos_sin: Tensor  # [max_position, rotary_dim] float32: cos in the first half, sin in the second
    scale: float
    window: int | None  # a query at position p sees keys in (p - window, p]; None: all up to p
