"""Rotary tables against transformers, out to far positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inflight.models.decoders.families import decoder_spec
from tests.support.checkpoints import FAMILIES
from tests.support.specs import attentions

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 2048,
    },
}


@pytest.mark.parametrize("kind", ROPES)
def test_tables_agree_with_transformers(kind: str) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = FAMILIES["llama"](head_dim=128, max_position_embeddings=8192, rope_parameters=dict(ROPES[kind]))
    positions = torch.tensor([0, 1, 63, 2047, 4096, 8191])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    rope = attentions(decoder_spec(config.to_dict()))[0].rope
    assert rope is not None
    table = rope.table(8192, torch.device("cpu"))
    assert table.shape == (8192, 128)
    # An angle of 8191 has float32 steps of 0.0005: the last bit of a frequency shows.
    torch.testing.assert_close(table[positions, :64], cos[0, :, :64], rtol=0, atol=2e-3)
    torch.testing.assert_close(table[positions, 64:], sin[0, :, :64], rtol=0, atol=2e-3)
    torch.testing.assert_close(table[:64:63, :64], cos[0, :3:2, :64], rtol=0, atol=2e-5)
