"""`AsyncEngine` over its own process: the same answers, the same errors, no weights on this side."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from typing import Any

import pytest

from inflight import LLM, AsyncEngine, RequestOutput, SamplingParams, StructuredOutputs
from inflight.config import ProcessConfig
from inflight.engine.remote.process_client import ProcessClient
from inflight.errors import EngineDeadError, InflightError, ParameterError
from tests.e2e.conftest import Folder
from tests.e2e.policies import SLOW
from tests.support.waiting import until

TEXT = "The quick brown fox"
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


async def final(engine: AsyncEngine, prompt: Any, params: SamplingParams, name: str) -> RequestOutput:
    (output,) = [o async for o in engine.generate(prompt, params, name, output_kind="final")]
    return output


async def test_answers_match_an_engine_in_this_process(folder: Folder) -> None:
    llm = LLM(folder())
    text = llm.generate(TEXT, GREEDY)[0].outputs[0].text
    many = [
        GREEDY,
        replace(GREEDY, logprobs=2, prompt_logprobs=1),
        replace(GREEDY, stop=text[20:23]),
        replace(GREEDY, n=3, temperature=1.0, seed=5, top_p=0.9),
        replace(GREEDY, logit_bias={5: 3.0}, bad_words=["the"], frequency_penalty=0.5),
        replace(GREEDY, structured_outputs=StructuredOutputs(regex="[a-z]{3}-\\d{2}"), ignore_eos=False),
    ]
    watched = ProcessConfig(heartbeat=0.1)
    engine = await AsyncEngine.start(folder(), in_process=False, process=watched, policy=SLOW)
    client = engine._client
    assert isinstance(client, ProcessClient)
    assert (engine.max_model_len, engine.facts.vocab_size) == (llm.max_model_len, llm.vocab_size)
    for round_ in range(2):
        outputs = await asyncio.gather(
            *(final(engine, TEXT, params, f"{round_}-{i}") for i, params in enumerate(many))
        )
        for output, params in zip(outputs, many, strict=True):
            (expected,) = llm.generate(TEXT, params)
            assert output.outputs == expected.outputs
            assert output.prompt_logprobs == expected.prompt_logprobs
        with pytest.raises(ParameterError, match="stop_token_ids has the token id 9999"):
            await final(engine, TEXT, replace(GREEDY, stop_token_ids=[9999]), "wrong")
        with pytest.raises(ParameterError, match="unclosed character class"):
            await final(engine, TEXT, replace(GREEDY, structured_outputs=StructuredOutputs(regex="[")), "bad")
        states = await engine.describe(f"{round_}-3")
        assert [state.record.request_id for state in states] == [f"{round_}-3/{i}" for i in range(3)]
        if round_ == 0:  # all again after its death
            stream = engine.generate(TEXT, replace(GREEDY, max_tokens=None))
            await anext(stream)
            os.kill(client.process_id or 0, signal.SIGKILL)
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                async for _ in stream:
                    pass

            async def is_healthy() -> bool:
                return (await engine.health()).healthy

            await until(is_healthy, "the next engine")
    await engine.close()


async def test_start_errors_match_an_engine_in_this_process() -> None:
    errors = []
    for in_process in (True, False):
        with pytest.raises(InflightError) as caught:
            await AsyncEngine.start(in_process=in_process, num_blocks=2**40)
        errors.append((type(caught.value), str(caught.value).partition(", but only ")[0]))
    assert errors[0] == errors[1]
