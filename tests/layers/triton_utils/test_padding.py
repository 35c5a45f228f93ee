"""Padding behind small activations: enough for whole tiles, never past the storage."""

from __future__ import annotations

import pytest
import torch

from inflight.layers.kernels import Residual
from inflight.layers.triton_kernels import TritonKernels
from inflight.layers.triton_utils.padding import FEW_TOKENS, WHOLE_TILE, padded_empty, readable_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 127, 128, 129, 200, FEW_TOKENS])
@pytest.mark.parametrize("tile", [16, 64, WHOLE_TILE])
def test_small_tensor_may_be_read_in_whole_tiles(num_tokens: int, tile: int) -> None:
    x = padded_empty(num_tokens, 24, torch.bfloat16, DEVICE)
    assert x.shape == (num_tokens, 24)
    assert x.is_contiguous()
    rows = readable_rows(x, tile)
    assert rows % tile == 0
    assert num_tokens <= rows < num_tokens + tile
    # All of them are there.
    x.as_strided((rows, 24), (24, 1)).zero_()


def test_readable_rows_stay_within_the_storage() -> None:
    whole = torch.zeros(100, 24)
    assert readable_rows(whole, 64) == 100
    assert readable_rows(whole[:40], 64) == 64
    assert readable_rows(whole[60:90], 64) == 40
    assert readable_rows(whole.view(-1)[30:1230].view(50, 24), 64) == 64
    assert readable_rows(padded_empty(0, 24, torch.float32, DEVICE), 64) == 0
    large = padded_empty(FEW_TOKENS + 1, 24, torch.float32, DEVICE)
    assert readable_rows(large, 64) == FEW_TOKENS + 1


@pytest.mark.parametrize("num_tokens", [5, 20, 40, 100])
def test_outputs_of_layers_are_padded(num_tokens: int) -> None:
    """Every kernel may write it: small, medium, and cuBLAS with kernels around it."""
    for few_tokens in (0, 256):
        kernels = TritonKernels(torch.bfloat16, DEVICE, few_tokens)
        linear = kernels.linear(32, 48, torch.bfloat16, bias=False)
        linear.load(torch.zeros(48, 32))
        norm = torch.ones(32, device=DEVICE)
        residual = Residual(torch.zeros(num_tokens, 32, dtype=torch.bfloat16, device=DEVICE), norm)
        inner = linear.gated(residual, 1e-6, "silu")
        back = kernels.linear(24, 32, torch.bfloat16, bias=False)
        back.load(torch.zeros(32, 24))
        added = back.add_to(residual, inner, None, 1e-6, norm)
        handed_on = [inner, kernels.rms_norm(residual.x, norm, 1e-6)]
        if added.scaled is not None:
            handed_on.append(added.scaled)
        assert len(handed_on) == (3 if few_tokens else 2)
        for x in handed_on:
            assert readable_rows(x, 64) % 64 == 0
