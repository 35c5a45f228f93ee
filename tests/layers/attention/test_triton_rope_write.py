from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inflight.layers.attention.backend import AttentionLayer, QuantizedKV
from inflight.layers.attention.triton.rope_write import HeadTile, rope_write
from tests.layers.attention.triton_scene import DEVICE, NAN, TOLERANCE, quantized

EPS = 1e-5


def layer_of(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    cos_sin: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    v_norm: Tensor | None = None,
) -> AttentionLayer:
    rotation, *norms = (x if x is None else x.to(DEVICE) for x in (cos_sin, q_norm, k_norm, v_norm))
    q_norm, k_norm, v_norm = norms
    sizes = num_heads, num_kv_heads, head_dim
    return AttentionLayer(*sizes, q_norm, k_norm, EPS, rotation, 1.0, None, v_norm=v_norm)


def reference(heads: Tensor, norm: Tensor | None, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """heads [T, n, head_dim] -> the same, in float64."""
    heads = heads.double()
    if norm is not None:
        heads = heads / (heads.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.double()
    cos, sin = cos_sin[positions.long()].double().unsqueeze(1).chunk(2, -1)
    half = cos.shape[-1]
    low, high, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), -1)


@pytest.mark.parametrize("tile", [HeadTile(tokens=4, heads=2, num_warps=4), None])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotary_dim", "block_size"),
    [(4, 2, 64, 64, 8), (3, 3, 80, 80, 16), (7, 1, 128, 64, 16), (6, 2, 80, 32, 8), (4, 2, 64, 0, 8)],
)
@pytest.mark.parametrize(
    ("normed", "dtype"), [("both", torch.float32), ("none", torch.bfloat16), ("k", torch.float32)]
)
def test_heads_are_normalised_rotated_and_cached(
    tile: HeadTile | None,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    block_size: int,
    normed: str,
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(num_heads + head_dim)
    num_tokens, num_blocks = 7, 5
    width = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = torch.randn(num_tokens, width, generator=generator).to(dtype)
    q_norm = torch.rand(head_dim, generator=generator) + 0.5 if normed == "both" else None
    k_norm = torch.rand(head_dim, generator=generator) + 0.5 if normed != "none" else None
    v_norm = torch.rand(head_dim, generator=generator) + 0.5 if normed == "both" else None
    positions = torch.tensor([3, 0, 11, 29, 7, 1, 2], dtype=torch.int32)
    slot_mapping = torch.tensor([5, 0, 4 * block_size + 3, -1, 17, 9, -1], dtype=torch.int32)
    cos_sin = torch.randn(30, rotary_dim, generator=generator)
    # A layer may have a part of each block.
    slot = torch.full((num_blocks, 2, 2, num_kv_heads, block_size, head_dim), NAN, dtype=dtype)

    rotated, written = qkv.clone().to(DEVICE), slot.to(DEVICE)[:, 1]
    layer = layer_of(
        num_heads, num_kv_heads, head_dim, cos_sin if rotary_dim else None, q_norm, k_norm, v_norm
    )
    rope_write(rotated, positions.to(DEVICE), slot_mapping.to(DEVICE), layer, written, tile=tile)

    def heads(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        each, first_value = x.view(num_tokens, -1, head_dim), num_heads + num_kv_heads
        return each[:, :num_heads], each[:, num_heads:first_value], each[:, first_value:]

    query, key, value = heads(qkv)
    real = slot_mapping >= 0
    expected = torch.cat(
        (reference(query, q_norm, positions, cos_sin), reference(key, k_norm, positions, cos_sin)), 1
    )
    rotated, written = rotated.cpu(), written.cpu()
    new_query, new_key, new_value = heads(rotated)
    got = torch.cat((new_query, new_key), 1)
    torch.testing.assert_close(
        got[real].double(), expected[real], rtol=TOLERANCE[dtype] / 2, atol=TOLERANCE[dtype]
    )
    if v_norm is None:
        assert torch.equal(new_value, value)
    else:
        normalised = reference(value, v_norm, positions, torch.empty(30, 0))
        torch.testing.assert_close(new_value[real].double(), normalised[real], rtol=0, atol=TOLERANCE[dtype])
    assert torch.equal(rotated[~real], qkv[~real])

    blocks, offsets = slot_mapping[real].long() // block_size, slot_mapping[real].long() % block_size
    assert torch.equal(written[blocks, 0, :, offsets], new_key[real])
    assert torch.equal(written[blocks, 1, :, offsets], new_value[real])
    written[blocks, :, :, offsets] = NAN
    assert written.isnan().all()


@pytest.mark.parametrize("tile", [HeadTile(tokens=4, heads=2, num_warps=4), None])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 32), (64, 0), (80, 80)])
@pytest.mark.parametrize(("normed", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_quantized_keys_and_values_are_the_same_in_cache_and_projection(
    tile: HeadTile | None, head_dim: int, rotary_dim: int, normed: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(head_dim + rotary_dim)
    num_heads, num_kv_heads, block_size, num_tokens = 3, 3, 4, 7
    qkv = torch.randn(num_tokens, 9, head_dim, generator=generator)
    qkv *= torch.logspace(-6, 6, num_tokens * 9, 2).view(num_tokens, 9, 1)
    qkv[1, 4], qkv[2, 7] = 0, 0
    qkv = qkv.to(dtype).view(num_tokens, -1)
    norm = torch.rand(head_dim, generator=generator) + 0.5 if normed else None
    positions = torch.tensor([3, 0, 11, 29, 7, 1, 2], dtype=torch.int32)
    slot_mapping = torch.tensor([5, 0, 15, -1, 12, 9, 2], dtype=torch.int32)
    cos_sin = torch.randn(30, rotary_dim, generator=generator)
    codes = torch.full((5, 2, num_kv_heads, block_size, head_dim), 0x55, dtype=torch.uint8, device=DEVICE)
    scales = torch.zeros(5, codes[0].numel() // 4, dtype=torch.int32, device=DEVICE)
    words = scales[:, : num_kv_heads * block_size].view(
        5, num_kv_heads, block_size
    )  # as far apart as the codes

    def write(x: Tensor, keys: QuantizedKV) -> None:
        layer = layer_of(num_heads, num_kv_heads, head_dim, cos_sin if rotary_dim else None, norm, norm)
        rope_write(x, positions.to(DEVICE), slot_mapping.to(DEVICE), layer, keys, tile=tile)

    rotated = qkv.clone().to(DEVICE)
    write(rotated, QuantizedKV(codes, words))
    rotated, codes, words = rotated.cpu(), codes.cpu(), words.cpu()
    heads = qkv.view(num_tokens, 9, head_dim)
    keys = reference(heads[:, 3:6], norm, positions, cos_sin)
    expected = torch.stack((keys, heads[:, 6:].double()), 1)  # [T, 2, 3, head_dim]
    real = slot_mapping >= 0
    got = rotated.view(num_tokens, 9, head_dim)[:, 3:].view(num_tokens, 2, 3, head_dim)[real].double()
    largest = expected[real].abs().amax(-1, keepdim=True)
    # Half of the last of four bits, and near zero half of the smallest step: 2^-10 of a scale of at most 2 / 448.
    bound = expected[real].abs() * (2**-4 + 1e-5) + largest * (2**-9 / 448 + 1e-6)
    assert ((got - expected[real]).abs() <= bound).all()

    blocks, places = slot_mapping[real].long() // block_size, slot_mapping[real].long() % block_size
    scale = words[blocks, :, places].unsqueeze(-1).view(torch.bfloat16).double().mT  # [n, 2, 3]
    numbers = codes.view(torch.float8_e4m3fn)[blocks, :, :, places].double()
    assert torch.equal(numbers * scale.unsqueeze(-1), got)
    _, scale_of_values, values = quantized(heads[:, 6:][real])
    zero = heads[:, 6:][real].abs().amax(-1) == 0
    assert torch.equal(torch.where(zero, 0.0, scale[:, 1]), torch.where(zero, 0.0, scale_of_values))
    assert torch.equal(got[:, 1][~zero], values[~zero].double())
    assert (scale > 0).all()
    codes[blocks, :, :, places] = 0x55
    assert (codes == 0x55).all()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("number", [float("inf"), NAN])
def test_numbers_that_are_not_finite_show_in_a_quantized_cache(number: float) -> None:
    qkv = torch.ones(1, 3 * 64, dtype=torch.float32)
    qkv[0, 70], qkv[0, 130] = number, number
    codes = torch.zeros(1, 2, 1, 4, 64, dtype=torch.uint8, device=DEVICE)
    words = torch.zeros(1, 1, codes[0].numel() // 4, dtype=torch.int32, device=DEVICE)
    zeros = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    cache = QuantizedKV(codes, words[:, :, :4])
    rope_write(qkv.to(DEVICE), zeros, zeros, layer_of(1, 1, 64), cache)
    assert words[0, 0, :1].cpu().view(torch.bfloat16).isinf().all()
