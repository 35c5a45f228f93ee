"""Plans for a GPU match the memory that an engine takes there."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from benchmarks.shapes import SHAPES
from inflight import LLM, AsyncEngine
from inflight.config import EngineConfig
from inflight.loading.planning import Devices, Fit, plan_model
from inflight.models.decoders.decoder import Decoder
from tests.support.held_bytes import held

OPTIONS: dict[str, Any] = {
    "hf_config": SHAPES["qwen3-0.6b"],
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "max_model_len": 8192,
    "enforce_eager": True,  # memory for graphs is kept all the same
}


def planned(**options: Any) -> Fit:
    _, total = torch.cuda.mem_get_info()
    config = EngineConfig.create("-", **(OPTIONS | options))
    (fit,) = plan_model(config, Devices("cuda", 1, total)).fits
    return fit


@pytest.mark.parametrize("shape", ["qwen3-0.6b", "qwen3-30b-a3b"])
def test_weights_take_the_planned_memory(shape: str) -> None:
    config = SHAPES[shape] | {"num_hidden_layers": 2}
    with LLM("-", show_progress=False, num_blocks=512, **(OPTIONS | {"hf_config": config})) as llm:
        decoder = llm._engine.model
        assert isinstance(decoder, Decoder)
        weights = held(decoder) - held(decoder.kernels)  # which have a workspace
        del decoder
    assert weights == pytest.approx(planned(hf_config=config).shares[0].weights, rel=0.02)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("share", [0.9, 0.25])
def test_engine_takes_the_planned_memory(share: float) -> None:
    """In a process of its own: this one may hold memory that earlier tests have left, which an engine in it would be
    charged for."""
    torch.cuda.empty_cache()

    async def num_tokens() -> int:
        async with await AsyncEngine.start(
            "-", in_process=False, gpu_memory_utilization=share, **OPTIONS
        ) as engine:
            facts = engine.client.facts
            return facts.num_blocks * facts.block_size

    assert asyncio.run(num_tokens()) == pytest.approx(
        planned(gpu_memory_utilization=share).num_tokens, rel=0.02
    )
