"""Recurrent layers on a CPU: compiled, or plain torch without a compiler.

Tokens are computed one after the other, prompts like decodes. So a state does not depend on how the tokens that led to
it were divided among steps, and a step that captures states can be computed in several calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.errors import ConfigError
from inflight.layers.native.library import Library
from inflight.layers.recurrent import DeltaNetLayer, DeltaNetShape, LayerStates, StateInputs

UNIT_EPS = 1e-6  # added to the squared length of queries and keys


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [begin, end) of the step, from one entry."""

    begin: int
    end: int
    row: int
    is_fresh: bool  # whether it starts from zeros
    snapshot: tuple[int, ...] = ()  # blocks for the state after the last token


def cut_entries(inputs: StateInputs) -> Iterator[list[Segment]]:
    """Cut entries where a state is captured. Yield the first segment of every entry, then the second of every entry
    that has one, and so on."""
    starts, rows = inputs.query_starts.tolist(), inputs.rows.tolist()
    segments: list[list[Segment]] = []
    for entry, (row, position) in enumerate(zip(rows, inputs.starts.tolist(), strict=True)):
        begin, end = starts[entry], starts[entry + 1]
        captures = {
            begin + captured_at - position: tuple(ids)
            for owner, captured_at, ids in inputs.captures
            if owner == entry
        }
        cuts = [begin, *sorted({*captures, end})]
        segments.append(
            [
                Segment(start, stop, row, position == 0 and start == begin, captures.get(stop, ()))
                for start, stop in pairwise(cuts)
            ]
        )
    while segments := [pending for pending in segments if pending]:
        yield [pending.pop(0) for pending in segments]


class CpuRecurrent:
    """Implements `RecurrentBackend[StateInputs]` on the compiled library, in the layout of `TorchRecurrent`.

    Results are bit-identical in any batch, however the tokens are divided among steps.
    """

    def __init__(self, library: Library) -> None:
        self._library = library

    def delta_net(
        self, projected: Tensor, layer: DeltaNetLayer, states: LayerStates, inputs: StateInputs
    ) -> Tensor:
        shape, num_tokens = layer.shape, len(projected)
        projected = projected.to(torch.float32)
        projected = projected if projected.stride(1) == 1 else projected.contiguous()
        _check(projected, layer, states)
        if inputs.kept is not None:
            inputs.kept.keep(self, projected, layer, states)
        mixed = torch.empty(num_tokens, shape.conv_size)
        gates = torch.empty(num_tokens, 2 * shape.num_value_heads)
        out = torch.empty(num_tokens, shape.value_size)
        for segments in cut_entries(inputs):
            table = torch.tensor(
                [(segment.begin, segment.end, segment.row, segment.is_fresh) for segment in segments],
                dtype=torch.int32,
            )
            begins, ends, rows, fresh = table.T.contiguous()
            self._library.delta_net(
                projected.data_ptr(), layer.conv_weight.data_ptr(), layer.a_log.data_ptr(),
                layer.dt_bias.data_ptr(), layer.norm.data_ptr(), states.rows.data_ptr(), mixed.data_ptr(),
                gates.data_ptr(), out.data_ptr(), begins.data_ptr(), ends.data_ptr(), rows.data_ptr(),
                fresh.data_ptr(), len(segments), projected.stride(0), states.rows.stride(0),
                shape.num_key_heads, shape.num_value_heads, shape.key_dim, shape.value_dim, shape.kernel,
                layer.eps, self._library.threads,
            )  # fmt: skip
            _save(states, segments)
        return out


class TorchRecurrent:
    """Implements `RecurrentBackend[StateInputs]` in torch, equal to the compiled one up to rounding.

    A row's state is the last inputs of the convolution, [kernel - 1, conv_size], the oldest first, then the matrices of
    the value heads, [num_value_heads, key_dim, value_dim].
    """

    def delta_net(
        self, projected: Tensor, layer: DeltaNetLayer, states: LayerStates, inputs: StateInputs
    ) -> Tensor:
        if inputs.kept is not None:
            inputs.kept.keep(self, projected, layer, states)
        out = torch.empty(len(projected), layer.shape.value_size, dtype=projected.dtype)
        for segments in cut_entries(inputs):
            for segment in segments:
                state = states.rows[segment.row]
                if segment.is_fresh:
                    state.zero_()
                out[segment.begin : segment.end] = _delta_net(
                    projected[segment.begin : segment.end].float(), layer, state
                )
            _save(states, segments)
        return out


def _delta_net(x: Tensor, layer: DeltaNetLayer, state: Tensor) -> Tensor:
    """Compute tokens of one entry, [T, projected_size] -> [T, value_size], and update its state."""
    shape, num_tokens = layer.shape, len(x)
    before, keys = shape.kernel - 1, shape.num_key_heads * shape.key_dim
    sizes = [shape.conv_size, shape.value_size, shape.num_value_heads, shape.num_value_heads]
    inputs, z, b, a = torch.split(x, sizes, dim=1)
    history = state[: before * shape.conv_size].view(before, shape.conv_size)
    seen = torch.cat((history, inputs))  # [kernel - 1 + T, conv_size]
    mixed = F.silu(F.conv1d(seen.T, layer.conv_weight[:, None], groups=shape.conv_size).T)
    history.copy_(seen[num_tokens:])
    query, key, value = torch.split(mixed, [keys, keys, shape.value_size], dim=1)
    query, key = _unit_heads(query, shape) * shape.key_dim**-0.5, _unit_heads(key, shape)
    value = value.view(num_tokens, shape.num_value_heads, shape.value_dim)
    decay = torch.exp(-layer.a_log.exp() * F.softplus(a + layer.dt_bias))[..., None, None]
    size = b.sigmoid()[..., None]
    matrices = state[before * shape.conv_size :].view(shape.num_value_heads, shape.key_dim, shape.value_dim)
    out = torch.empty_like(value)
    for token in range(num_tokens):
        matrices.mul_(decay[token])
        stored = (matrices * key[token, :, :, None]).sum(1)  # [num_value_heads, value_dim]
        change = (value[token] - stored) * size[token]
        matrices.add_(key[token, :, :, None] * change[:, None])
        out[token] = (matrices * query[token, :, :, None]).sum(1)
    out = out * (out.square().mean(-1, keepdim=True) + layer.eps).rsqrt() * layer.norm
    return out.flatten(1) * F.silu(z)


def _unit_heads(x: Tensor, shape: DeltaNetShape) -> Tensor:
    """[T, num_key_heads * key_dim] -> [T, num_value_heads, key_dim], of unit length."""
    heads = x.view(len(x), shape.num_key_heads, shape.key_dim)
    heads = heads * (heads.square().sum(-1, keepdim=True) + UNIT_EPS).rsqrt()
    return heads.repeat_interleave(shape.num_value_heads // shape.num_key_heads, dim=1)


def _save(states: LayerStates, segments: list[Segment]) -> None:
    for segment in segments:
        if segment.snapshot:
            states.save(segment.row, segment.snapshot)


def _check(projected: Tensor, layer: DeltaNetLayer, states: LayerStates) -> None:
    """Check the layout of the tensors: the library trusts its pointers."""
    shape = layer.shape
    expected = (
        (layer.conv_weight, (shape.conv_size, shape.kernel)),
        (layer.a_log, (shape.num_value_heads,)),
        (layer.dt_bias, (shape.num_value_heads,)),
        (layer.norm, (shape.value_dim,)),
        (states.rows, (len(states.rows), shape.state_size)),
    )
    fits = all(
        tensor.shape == size and tensor.dtype == torch.float32 and tensor.is_contiguous()
        for tensor, size in expected
    )
    if not fits or projected.shape[1] != shape.projected_size or shape.num_value_heads % shape.num_key_heads:
        raise ConfigError(
            f"projected {list(projected.shape)} and the layer's float32 weights and states "
            f"{[list(tensor.shape) for tensor, _ in expected]} do not match {shape}"
        )
