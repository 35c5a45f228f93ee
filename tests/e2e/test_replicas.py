"""Replicas of the built-in model that are killed while they answer: the answers are those of an undisturbed run."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from inflight import LLM, AsyncEngine, SamplingParams
from inflight.checkpoint.builtin import checkpoint_folder
from inflight.checkpoint.checkpoint import fingerprint_now
from inflight.config import EngineConfig, ProcessConfig
from inflight.loading.load import load_engine
from inflight.outputs import RequestOutput
from inflight.router.replica import Replica
from inflight.router.routed import RoutedRequest
from inflight.router.router import Router
from inflight.structured_outputs import StructuredOutputs
from tests.e2e.policies import SLOW
from tests.e2e.streamed_calls import CHAT_MAX_TOKENS, ENDINGS, TOKENS_BEFORE_ARGUMENTS, by_chat
from tests.router.replicas import process_id, strike
from tests.server.live import Backend, live_server
from tests.support.processes import exists
from tests.support.waiting import SECONDS, until

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


def same(actual: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for output, other in zip(actual, expected, strict=True):
        assert output.outputs == other.outputs
        assert output.prompt_logprobs == other.prompt_logprobs
        assert len(output.prompt_token_ids) == len(other.prompt_token_ids)


class ReplicasBackend(Backend):
    """Engines that are not restarted: the remaining ones go on."""

    async def _start(self, options: dict[str, Any]) -> AsyncEngine:
        watched = ProcessConfig(heartbeat=0.05, max_restarts=0)
        return await AsyncEngine.start(replicas=3, process=watched, policy=SLOW, **options)

    @property
    def router(self) -> Router:
        assert isinstance(self.engine.client, Router)
        return self.engine.client

    def num_called(self) -> int:
        return sum(map(_is_of_chat, self.router._requests.values()))

    async def kill(self) -> None:
        """Kill an engine in the middle of what it writes: one with calls if there is."""
        await begun(self.router)
        struck = max(self.router.replicas.available, key=_num_calls)
        strike(self.router, struck.replica_id)
        await until(lambda: not struck.available)


def _is_of_chat(routed: RoutedRequest) -> bool:
    return routed.request.params.max_tokens == CHAT_MAX_TOKENS


async def begun(router: Router) -> None:
    """All answers have a token of the engine that they are on, and calls have arguments."""
    await until(lambda: bool(router._requests) and all(map(_is_begun, router._requests.values())))


def _is_begun(routed: RoutedRequest) -> bool:
    least = TOKENS_BEFORE_ARGUMENTS if _is_of_chat(routed) else 0
    return routed.has_token_here and len(routed.output_ids) > least


def _num_calls(replica: Replica) -> tuple[int, int]:
    return sum(map(_is_of_chat, replica.requests)), len(replica.requests)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tokenizer": str(checkpoint_folder())},
        {"skip_tokenizer_init": True},
        {"load_format": "dummy"},
        {"model": str(checkpoint_folder())},
    ],
)
def test_engines_and_servers_agree_on_the_fingerprint_of_a_checkpoint(options: dict[str, Any]) -> None:
    """Otherwise every restart would be refused."""
    config = EngineConfig.create(**options, num_blocks=512)
    with closing(load_engine(config)) as loaded:
        assert len(loaded.facts.fingerprint) == 64
        assert loaded.facts.fingerprint == fingerprint_now(config.model)


def test_no_token_is_lost_changed_or_repeated_when_replicas_are_killed() -> None:
    """This holds for text and for the tool calls of every API."""
    with LLM(num_blocks=1024) as llm:
        undisturbed = llm.generate(PROMPTS, CASES, use_tqdm=False)
    with (
        closing(ReplicasBackend(num_blocks=1024)) as backend,
        live_server(backend) as live,
        ThreadPoolExecutor(len(ENDINGS)) as threads,
    ):
        first = [threads.submit(ask, live.http) for ask in ENDINGS]
        same(backend.run(generate(backend.engine)), undisturbed)
        whole = {ask: called.result(SECONDS) for ask, called in zip(ENDINGS, first, strict=True)}
        calling = {ask: threads.submit(ask, live.http) for ask in ENDINGS}
        live.wait_until("calls", backend.num_called)
        running = asyncio.run_coroutine_threadsafe(generate(backend.engine), backend.loop)
        for _ in range(2):
            backend.run(backend.kill())
        same(running.result(SECONDS), undisturbed)
        for ask, called in calling.items():
            assert called.result(SECONDS) == whole[ask]
            for call in whole[ask].calls:
                assert call.ended == ENDINGS[ask]
                call.check()
        answers = live.http.get("/v1/requests/called-by-chat").json()["answers"]
        assert sum(one["num_output_tokens"] for one in answers) == whole[by_chat].num_output_tokens
        assert sum(one["num_failovers"] for one in answers) >= 1
        router = backend.router
        records = [router._history.get(name) for name in router._history._records]
        assert sum(state.record.num_failovers for state in records if state is not None) >= 4
        clients = [replica.client for replica in router.replicas.members]
    assert not any(exists(process_id(client)) for client in clients)


def test_replicated_llm_gives_the_same_answers() -> None:
    with LLM(num_blocks=512) as one, LLM(num_blocks=512, replicas=2) as two:
        all_params = [replace(params, max_tokens=24) for params in CASES[:3]]
        expected = one.generate(PROMPTS[:3], all_params, use_tqdm=False)
        same(two.generate(PROMPTS[:3], all_params, use_tqdm=False), expected)
        with two.recorded() as steps:
            two.generate([f"{index} birds" for index in range(8)], all_params[1], use_tqdm=False)
        assert {step.replica for step in steps} == {"0", "1"}
        assert two.stats().num_output_tokens > 8 * 24
        assert two.max_model_len == one.max_model_len
