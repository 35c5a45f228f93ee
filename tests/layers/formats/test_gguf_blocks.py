"""The block types of GGUF files, compared with the format's own package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from inflight.checkpoint.gguf_file import BLOCK_TYPES
from inflight.layers.formats.gguf_blocks import dequantize, unpack


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_blocks_have_the_values_that_the_package_computes(name: str) -> None:
    """All bit patterns, infinite and undefined scales included."""
    block = BLOCK_TYPES[name]
    width = block.num_bytes * (256 // block.num_values)
    data = np.random.default_rng(0).integers(0, 256, (500, width), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name])
    values = dequantize(torch.from_numpy(data), name)
    assert values.dtype == {"F16": torch.float16, "BF16": torch.bfloat16}.get(name, torch.float32)
    np.testing.assert_array_equal(values.float().numpy(), expected)


def test_codes_scales_and_minimums_make_up_the_values() -> None:
    data = torch.randint(0, 256, (3, 2 * 144), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    data.view(3, 2, 144)[:, :, 1:4:2] &= 0x3B  # finite scales
    groups = unpack(data, "Q4_K")
    assert groups.codes.shape == (3, 16, 32)
    assert int(groups.codes.min()) >= 0
    assert int(groups.codes.max()) <= 15
    assert groups.minimums is not None
    values = groups.codes * groups.scales[..., None] - groups.minimums[..., None]
    torch.testing.assert_close(values.flatten(1), dequantize(data, "Q4_K"))
