"""What is planned for a GPU is what an engine takes there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.shapes import SHAPES
from inflight import LLM
from inflight.config import EngineConfig
from inflight.models.decoder import Decoder
from inflight.planning import Devices, plan_model
from tests.held_bytes import held


@pytest.mark.parametrize("share", [0.9, 0.25])
def test_the_plan_is_what_an_engine_takes(share: float) -> None:
    options: dict[str, Any] = {
        "hf_config": SHAPES["qwen3-0.6b"],
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": 8192,
        "gpu_memory_utilization": share,
        "enforce_eager": True,  # memory for graphs is kept all the same
    }
    _, total = torch.cuda.mem_get_info()
    (fit,) = plan_model(EngineConfig.create(model="-", **options), Devices("cuda", 1, total)).fits
    with LLM("-", show_progress=False, **options) as llm:
        facts, decoder = llm._engine.facts, llm._engine.model
        assert isinstance(decoder, Decoder)
        weights = held(decoder) - held(decoder.kernels)  # which have a workspace
        num_tokens = facts.num_blocks * facts.block_size
        del decoder
    assert weights == pytest.approx(fit.shares[0].weights, rel=0.02)
    assert num_tokens == pytest.approx(fit.num_tokens, rel=0.02)
