"""Several engines on one GPU, each with its part of the memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight import AsyncEngine, SamplingParams
from inflight.errors import KVBudgetError
from inflight.router.router import Router
from tests.gpu.conftest import Ask

PARAMS = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False)
SMALL: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 128}
SHARE = 0.6  # of the GPU, for all replicas together: this process may hold some of the rest


async def answers(engine: AsyncEngine, prompts: list[list[int]]) -> list[list[int]]:
    async def one(prompt: list[int]) -> list[int]:
        async for output in engine.generate(prompt, PARAMS, output_kind="final"):
            last = output
        return list(last.outputs[0].token_ids)

    return await asyncio.gather(*map(one, prompts))


def num_blocks(router: Router) -> list[int]:
    return [replica.client.facts.num_blocks for replica in router.replicas.members]


def share_in_use(before: int) -> float:
    """Return the share of the GPU that was taken since so many bytes were free."""
    free, total = torch.cuda.mem_get_info()
    return (before - free) / total


@pytest.mark.timeout(600)  # up to ten engines are started
@pytest.mark.parametrize("count", [2, 4])
def test_replicas_share_a_gpu_and_restart_one_at_a_time(
    count: int, checkpoint: Callable[..., Path], prompts: list[list[int]], ask: Ask
) -> None:
    folder = checkpoint("qwen3")
    expected = ask(folder, dtype="float32")
    torch.cuda.empty_cache()
    before, _ = torch.cuda.mem_get_info()
    options = {"dtype": "float32", "skip_tokenizer_init": True, "gpu_memory_utilization": SHARE, **SMALL}

    async def run() -> None:
        async with await AsyncEngine.start(
            folder, replicas=count, routing="round_robin", **options
        ) as engine:
            router = engine.client
            assert isinstance(router, Router)
            started = num_blocks(router)
            assert len(started) == count
            assert min(started) >= 0.9 * max(started), "whoever starts last gets no less"
            assert await answers(engine, prompts) == expected
            assert share_in_use(before) == pytest.approx(SHARE, abs=0.02)
            for replica_id in map(str, range(count)):
                await router.replicas.restart(replica_id, 10.0)
                assert await answers(engine, prompts) == expected
            assert num_blocks(router) == started
            assert share_in_use(before) == pytest.approx(SHARE, abs=0.02)

    asyncio.run(run())


@pytest.mark.timeout(300)
def test_memory_of_other_processes_is_not_charged_to_an_engine(checkpoint: Callable[..., Path]) -> None:
    """This process holds a quarter of the GPU, and the engine's process gets what it would get without it."""
    _, total = torch.cuda.mem_get_info()
    options = {"skip_tokenizer_init": True, "gpu_memory_utilization": 0.3, **SMALL}

    async def blocks() -> int:
        async with await AsyncEngine.start(checkpoint("qwen3"), in_process=False, **options) as engine:
            return engine.client.facts.num_blocks

    alone = asyncio.run(blocks())
    held = torch.empty(total // 4, dtype=torch.uint8, device="cuda")
    beside = asyncio.run(blocks())
    del held
    torch.cuda.empty_cache()
    assert beside == pytest.approx(alone, rel=0.02)


@pytest.mark.timeout(300)
def test_memory_share_held_by_another_process_is_rejected(checkpoint: Callable[..., Path]) -> None:
    free, total = torch.cuda.mem_get_info()
    held = torch.empty(free - total // 4, dtype=torch.uint8, device="cuda")

    async def start() -> None:
        await AsyncEngine.start(
            checkpoint("qwen3"),
            in_process=False,
            skip_tokenizer_init=True,
            gpu_memory_utilization=0.5,
            **SMALL,
        )

    try:
        with pytest.raises(KVBudgetError, match="are free on cuda:0; other processes hold"):
            asyncio.run(start())
    finally:
        del held
        torch.cuda.empty_cache()
