"""Plans for a GPU match the memory that an engine takes there."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from benchmarks.shapes import SHAPES
from inflight import LLM, AsyncEngine
from inflight.config import EngineConfig
from inflight.loading.planning import Devices, Fit, plan_devices
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
    (fit,) = plan_devices(config, Devices("cuda", 1, total)).fits
    return fit


# Four layers are enough: one of four has attention in the hybrid shape.
QUANTIZED_AND_HYBRID: list[tuple[str, dict[str, Any]]] = [
    ("llama-3.1-8b", {"quantization": "fp8"}),
    ("llama-3.1-8b", {"quantization": "int4"}),
    ("gpt-oss-20b-mxfp4", {}),
    ("qwen3.5-9b", {}),
]


def few_layers(shape: str, more: dict[str, Any]) -> dict[str, Any]:
    return {"hf_config": SHAPES[shape] | {"num_hidden_layers": 4}} | more


@pytest.mark.parametrize(
    ("shape", "more"), [("qwen3-0.6b", {}), ("qwen3-30b-a3b", {}), *QUANTIZED_AND_HYBRID], ids=str
)
def test_weights_take_the_planned_memory(shape: str, more: dict[str, Any]) -> None:
    options = few_layers(shape, more)
    with LLM("-", show_progress=False, num_blocks=2048, max_num_seqs=16, **(OPTIONS | options)) as llm:
        decoder = llm._engine.model
        assert isinstance(decoder, Decoder)
        weights = held(decoder) - held(decoder.kernels)  # which have a workspace
        del decoder
    assert weights == pytest.approx(planned(**options).shares[0].weights, rel=0.02)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("share", "options"),
    [(0.9, {}), (0.25, {}), *((0.25, few_layers(*case)) for case in QUANTIZED_AND_HYBRID)],
    ids=["0.9", "0.25", "fp8", "int4", "mxfp4", "hybrid"],
)
def test_engine_takes_the_planned_memory(share: float, options: dict[str, Any]) -> None:
    """In its own process: this one may hold memory that earlier tests have left, which an engine in it would be
    charged for."""
    torch.cuda.empty_cache()

    async def num_tokens() -> int:
        async with await AsyncEngine.start(
            "-", in_process=False, gpu_memory_utilization=share, **(OPTIONS | options)
        ) as engine:
            facts = engine.client.facts
            return facts.num_blocks * facts.block_size

    fit = planned(gpu_memory_utilization=share, **options)
    assert asyncio.run(num_tokens()) == pytest.approx(fit.num_blocks * fit.layout.block_size, rel=0.02)
