"""The oracle itself, against a dense softmax that knows no blocks."""

from __future__ import annotations

import pytest
import torch

from tests.layers.attention.paged import Heads, Scene
from tests.support.reference_attention import ReferenceAttention


@pytest.mark.parametrize("window", [None, 5])
def test_reference_is_a_causal_softmax(window: int | None) -> None:
    heads = Heads(num_heads=4, num_kv_heads=2, head_dim=8)
    scene = Scene(heads, block_size=4, lengths=[13])
    (attended,) = scene.run(ReferenceAttention(), scene.chunks(5), window)
    query, key, value = heads.split(scene.qkv[0].double())
    for head in range(4):
        scores = query[:, head] @ key[:, head // 2].T * scene.scale
        seen = torch.ones(13, 13).tril().bool()
        if window is not None:
            seen &= ~torch.ones(13, 13).tril(-window).bool()
        dense = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value[:, head // 2]
        torch.testing.assert_close(attended[:, head].double(), dense, rtol=1e-6, atol=1e-6)
