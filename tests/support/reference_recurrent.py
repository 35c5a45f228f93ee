"""Recurrent layers in float64, token by token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.layers.recurrent import DeltaNetLayer, DeltaNetShape


def draw_layer(shape: DeltaNetShape, device: str = "cpu") -> DeltaNetLayer:
    return DeltaNetLayer(
        shape,
        conv_weight=torch.randn(shape.conv_size, shape.kernel, device=device) * 0.5,
        a_log=torch.randn(shape.num_value_heads, device=device),
        dt_bias=torch.randn(shape.num_value_heads, device=device),
        norm=1 + 0.1 * torch.randn(shape.value_dim, device=device),
        eps=1e-6,
    )


def reference(projected: Tensor, layer: DeltaNetLayer) -> tuple[Tensor, list[Tensor]]:
    """Return the outputs of one whole sequence, and the state after each number of tokens, in float64."""
    shape, x = layer.shape, projected.double().cpu()
    keys, values = shape.num_key_heads * shape.key_dim, shape.value_size
    inputs, z, b, a = torch.split(
        x, [shape.conv_size, values, shape.num_value_heads, shape.num_value_heads], dim=1
    )
    padded = F.pad(inputs, (0, 0, shape.kernel - 1, 0))  # [kernel - 1 + T, conv_size]
    weight = layer.conv_weight.double().cpu()
    taps = [padded[tap : tap + len(x)] * weight[:, tap] for tap in range(shape.kernel)]
    mixed = F.silu(torch.stack(taps).sum(0))
    query, key, value = torch.split(mixed, [keys, keys, values], dim=1)
    ratio = shape.num_value_heads // shape.num_key_heads

    def unit(heads: Tensor) -> Tensor:
        heads = heads.view(len(x), shape.num_key_heads, shape.key_dim)
        heads = heads / (heads.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        return heads.repeat_interleave(ratio, dim=1)

    query, key = unit(query) / shape.key_dim**0.5, unit(key)
    value = value.view(len(x), shape.num_value_heads, shape.value_dim)
    decay = torch.exp(-layer.a_log.double().cpu().exp() * F.softplus(a + layer.dt_bias.double().cpu()))
    state = torch.zeros(shape.num_value_heads, shape.key_dim, shape.value_dim, dtype=torch.float64)
    outputs, states = [], [torch.cat((padded[: shape.kernel - 1].flatten(), state.flatten()))]
    for t in range(len(x)):
        state = state * decay[t, :, None, None]
        update = b[t].sigmoid()[:, None] * (value[t] - torch.einsum("hk,hkv->hv", key[t], state))
        state = state + key[t, :, :, None] * update[:, None, :]
        out = torch.einsum("hk,hkv->hv", query[t], state)
        out = out / (out.square().mean(-1, keepdim=True) + layer.eps).sqrt() * layer.norm.double().cpu()
        outputs.append((out * F.silu(z[t].view(out.shape))).flatten())
        states.append(torch.cat((padded[t + 1 : t + shape.kernel].flatten(), state.flatten())))
    return torch.stack(outputs), states
