"""Encoders as a GPU computes them, kernels in the interpreter, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inflight.attention.triton.sequences import TritonSequenceAttention
from inflight.attention.triton.tuning import choose_sequences
from inflight.execution.platforms import EncoderKernels
from inflight.execution.platforms.cpu import CpuPlatform
from inflight.layers.torch_kernels import TorchKernels
from inflight.layers.triton_kernels import TritonKernels
from inflight.models.encoder_spec import EncoderSpec
from tests.encoder_checkpoints import load, logits, make_encoder, texts, vectors

CPU = torch.device("cpu")


def triton_kernels(_: CpuPlatform, spec: EncoderSpec, dtype: torch.dtype) -> EncoderKernels:
    attention = TritonSequenceAttention(choose_sequences(dtype, spec.head_dim, CPU))
    return EncoderKernels(TritonKernels(dtype, CPU, few_tokens=0), attention, TorchKernels(torch.float32))


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("bert", {"num_hidden_layers": 2}),
        ("modernbert", {"num_hidden_layers": 2, "local_attention": 8, "global_attn_every_n_layers": 2}),
    ],
)
def test_the_logits_of_transformers(
    family: str, overrides: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuPlatform, "encoder_kernels", triton_kernels)
    model = make_encoder(family, classifier=True, **overrides)
    model.save_pretrained(tmp_path)
    engine, prompts = load(tmp_path), texts([1, 37, 7])
    for prompt, found in zip(prompts, vectors(engine, prompts), strict=True):
        np.testing.assert_allclose(found, logits(model, prompt), atol=1e-4, rtol=1e-4)
    engine.close()
