"""Replicas of the built-in model that are killed while they answer: the answers are those of an undisturbed run."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from inflight import LLM, AsyncEngine, SamplingParams
from inflight.config import ProcessConfig
from inflight.outputs import RequestOutput
from inflight.router import Router
from inflight.structured_outputs import StructuredOutputs
from tests.router.replicas import alive, process_id, strike, until

SAMPLED = SamplingParams(temperature=0.9, seed=5, max_tokens=120, ignore_eos=True)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 60}, "ages": {"type": "array", "minItems": 30}},
    "required": ["name", "ages"],
    "additionalProperties": False,
}
CASES = (
    replace(SAMPLED, temperature=0, seed=None),
    SAMPLED,
    replace(SAMPLED, n=4),
    replace(SAMPLED, logprobs=2, prompt_logprobs=1),
    replace(SAMPLED, presence_penalty=1.5, frequency_penalty=1.0, repetition_penalty=1.3),
    replace(SAMPLED, stop=["zz", "qu"], min_tokens=60),
    replace(SAMPLED, structured_outputs=StructuredOutputs(json=SCHEMA), ignore_eos=False),
)
PROMPTS = [f"Once upon a time there was a fox, number {index}, who" for index in range(len(CASES))]


async def generate(engine: AsyncEngine) -> list[RequestOutput]:
    async def one(prompt: str, params: SamplingParams) -> RequestOutput:
        async for output in engine.generate(prompt, params):
            last = output
        return last

    return await asyncio.gather(*map(one, PROMPTS, CASES))


def same(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for output, other in zip(found, expected, strict=True):
        assert output.outputs == other.outputs
        assert output.prompt_logprobs == other.prompt_logprobs
        assert len(output.prompt_token_ids) == len(other.prompt_token_ids)


async def begun(router: Router) -> None:
    """All answers have a token of the engine that they are on."""
    await until(lambda: router.is_busy and all(routed.has_token_here for routed in router._requests.values()))


async def test_no_token_is_lost_changed_or_repeated_when_replicas_are_killed() -> None:
    with LLM(num_blocks=1024) as llm:
        undisturbed = llm.generate(PROMPTS, CASES, use_tqdm=False)
    watched = ProcessConfig(heartbeat=0.05, max_restarts=0)  # those that are left go on
    async with await AsyncEngine.start(replicas=3, process=watched, num_blocks=1024) as engine:
        router = engine.client
        assert isinstance(router, Router)
        same(await generate(engine), undisturbed)
        running = asyncio.create_task(generate(engine))
        for _ in range(2):
            await begun(router)
            busy = max(router.replicas.available, key=lambda replica: len(replica.requests))
            strike(router, busy.replica_id)
            await until(lambda busy=busy: not busy.available)
        same(await running, undisturbed)
        records = [router._history.get(name) for name in router._history._records]
        assert sum(state.record.num_failovers for state in records if state is not None) >= 4
        clients = [replica.client for replica in router.replicas.members]
    assert not any(alive(process_id(client)) for client in clients)


def test_an_offline_engine_of_replicas_answers_the_same() -> None:
    with LLM(num_blocks=512) as one, LLM(num_blocks=512, replicas=2) as two:
        expected = one.generate(PROMPTS[:3], CASES[:3], use_tqdm=False)
        same(two.generate(PROMPTS[:3], CASES[:3], use_tqdm=False), expected)
        seen = set()
        two.observe(lambda record: seen.add(record.engine_id))
        two.generate([f"{index} birds" for index in range(8)], SAMPLED, use_tqdm=False)
        assert seen == {"0", "1"}
        assert two.stats().num_output_tokens > 8 * 120
        assert two.max_model_len == one.max_model_len
