"""Attention of encoders: every token of a sequence sees every other, and nothing is kept for later steps.

The interface, the reference in torch, and the implementation on the compiled CPU library. `triton/sequences.py` is for
GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.errors import ConfigError
from inflight.native.library import Library, native_library


@dataclass(frozen=True, slots=True)
class Sequences:
    """The B sequences of one step, T tokens side by side without padding."""

    starts: Tensor  # [B + 1] int32, from 0 to T, on the device
    lengths: list[int] | None  # [B]; None: only the device knows, and B and T are capacities


class SequenceAttention(Protocol):
    def attend(
        self,
        qkv: Tensor,  # [T, 3 * num_heads * head_dim], as projected; may be overwritten
        num_heads: int,
        head_dim: int,
        scale: float,
        window: int | None,  # a token at i sees those at j with |i - j| <= window; None: all of its sequence
        sequences: Sequences,
        # (cos_sin [max_position, rotary_dim] float32, cos in the first half and sin in the second; positions [T] int64)
        rotary: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:  # [T, num_heads * head_dim]
        """Rotate queries and keys, if `rotary` is set, and attend within each sequence."""


class Rotation(Protocol):
    def rotate(self, x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
        """Apply the rotary embedding to x [T, heads, head_dim]: the first rotary_dim features of each head, in halves
        (feature i rotates with feature i + rotary_dim / 2). May work in place."""


class TorchSequenceAttention:
    """Implements `SequenceAttention` in torch, one sequence at a time: the reference, for any device."""

    def __init__(self, kernels: Rotation) -> None:
        self._kernels = kernels

    def attend(
        self,
        qkv: Tensor,
        num_heads: int,
        head_dim: int,
        scale: float,
        window: int | None,
        sequences: Sequences,
        rotary: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        heads = qkv.view(len(qkv), 3, num_heads, head_dim)
        query, key, value = heads.unbind(1)  # [T, num_heads, head_dim]
        if rotary is not None:
            cos_sin, positions = rotary
            query = self._kernels.rotate(query, positions, cos_sin)
            key = self._kernels.rotate(key, positions, cos_sin)
        assert sequences.lengths is not None
        out = torch.empty(len(qkv), num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
        first = 0
        for length in sequences.lengths:
            here = slice(first, first + length)
            first += length
            out[here] = F.scaled_dot_product_attention(
                _batched(query[here]),
                _batched(key[here]),
                _batched(value[here]),
                attn_mask=_near(length, window, qkv.device),
                scale=scale,
            )[0].transpose(0, 1)
        return out.view(len(qkv), -1)


def _batched(heads: Tensor) -> Tensor:
    """[n, num_heads, head_dim] -> [1, num_heads, n, head_dim]"""
    return heads.transpose(0, 1).unsqueeze(0)


def _near(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """Return the mask [length, length] of which tokens see which, or None if all see all."""
    if window is None or window >= length - 1:
        return None
    positions = torch.arange(length, device=device)
    return (positions.unsqueeze(1) - positions).abs() <= window


def cpu_sequence_attention(kernels: Rotation) -> SequenceAttention:
    """Return the compiled attention, or plain torch if it is not available."""
    library = native_library()
    return TorchSequenceAttention(kernels) if library is None else NativeSequenceAttention(library)


class NativeSequenceAttention:
    """Implements `SequenceAttention` in float32. A sequence's result is bit-identical in any batch."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def attend(
        self,
        qkv: Tensor,
        num_heads: int,
        head_dim: int,
        scale: float,
        window: int | None,
        sequences: Sequences,
        rotary: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        qkv = qkv.to(torch.float32).contiguous()
        _check(qkv, num_heads, head_dim, sequences)
        if rotary is not None:
            self._rotate(qkv, num_heads, head_dim, *rotary)
        out = torch.empty(len(qkv), num_heads * head_dim)
        self._library.attend_sequences(
            qkv.data_ptr(),
            out.data_ptr(),
            sequences.starts.data_ptr(),
            len(sequences.starts) - 1,
            num_heads,
            head_dim,
            -1 if window is None else window,
            scale,
            self._library.threads,
        )
        return out

    def _rotate(self, qkv: Tensor, num_heads: int, head_dim: int, cos_sin: Tensor, positions: Tensor) -> None:
        """Rotate queries and keys, the first 2 * num_heads heads, in place."""
        rotary_dim = cos_sin.shape[-1]
        if rotary_dim > head_dim or rotary_dim % 2 or len(positions) != len(qkv):
            raise ConfigError(
                f"cannot rotate heads of {head_dim} features of {len(qkv)} tokens at {len(positions)} positions "
                f"with {rotary_dim} rotary features"
            )
        positions = positions.to(torch.int64).contiguous()
        cos_sin = cos_sin.to(torch.float32).contiguous()
        self._library.rotate(
            qkv.data_ptr(),
            len(qkv),
            2 * num_heads,
            qkv.stride(0),
            head_dim,
            positions.data_ptr(),
            cos_sin.data_ptr(),
            rotary_dim,
            self._library.threads,
        )


def _check(qkv: Tensor, num_heads: int, head_dim: int, sequences: Sequences) -> None:
    """Check the layout of the tensors: the library trusts its pointers."""
    starts, lengths = sequences.starts, sequences.lengths
    if qkv.dim() != 2 or qkv.shape[1] != 3 * num_heads * head_dim:
        raise ConfigError(f"qkv is {list(qkv.shape)}: it must be [tokens, 3 * {num_heads} * {head_dim}]")
    if starts.dtype != torch.int32 or lengths is None or starts.shape != (len(lengths) + 1,):
        raise ConfigError("starts must be int32, with one more entry than there are sequences")
    if not starts.is_contiguous() or starts[0] != 0 or starts[-1] != len(qkv) or (starts.diff() < 0).any():
        raise ConfigError(f"starts must be contiguous and rise from 0 to {len(qkv)} tokens")
