"""Attention of encoders on the compiled CPU library."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.attention.sequences import Rotation, SequenceAttention, Sequences, TorchSequenceAttention
from inflight.errors import ConfigError
from inflight.native.library import Library, native_library


def cpu_sequence_attention(kernels: Rotation) -> SequenceAttention:
    """The compiled one, or plain torch where it cannot be had."""
    library = native_library()
    return TorchSequenceAttention(kernels) if library is None else NativeSequenceAttention(library)


class NativeSequenceAttention:
    """Implements `SequenceAttention` in float32. A sequence's result is the same bits whatever lies beside it."""

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
        """Queries and keys, which are the first 2 * num_heads heads, in place."""
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
    """The library trusts its pointers, so what they point to is checked here."""
    starts, lengths = sequences.starts, sequences.lengths
    if qkv.dim() != 2 or qkv.shape[1] != 3 * num_heads * head_dim:
        raise ConfigError(f"qkv is {list(qkv.shape)}: it must be [tokens, 3 * {num_heads} * {head_dim}]")
    if starts.dtype != torch.int32 or lengths is None or starts.shape != (len(lengths) + 1,):
        raise ConfigError("starts must be int32, one more than there are sequences")
    if not starts.is_contiguous() or starts[0] != 0 or starts[-1] != len(qkv) or (starts.diff() < 0).any():
        raise ConfigError(f"starts must be contiguous and rise from 0 to {len(qkv)} tokens")
