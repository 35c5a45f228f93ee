"""`AsyncEngine`: many requests at once, each a stream; a reader that leaves its stream leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from inflight import LLM, AsyncEngine, RequestOutput, SamplingParams
from inflight.engine.core import EngineCore
from inflight.engine.inproc import InprocClient
from inflight.engine.stats import EngineStats
from inflight.errors import (
    ConfigError,
    EngineError,
    ParameterError,
    PromptError,
    QueueFullError,
    RequestError,
)
from tests.e2e.breaking import PoisonedRunner, begins_with
from tests.e2e.conftest import Folder
from tests.support.held_steps import taking_turns
from tests.support.steps import observe
from tests.support.waiting import until, until_idle

TEXT = "The quick brown fox"
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
ENDLESS = replace(GREEDY, max_tokens=None)  # several hundred tokens: more than any test waits for


def core_of(engine: AsyncEngine) -> EngineCore:
    assert isinstance(engine._client, InprocClient)
    return engine._client._core


@contextlib.asynccontextmanager
async def running(folder: Any, **options: Any) -> AsyncIterator[AsyncEngine]:
    """An engine that must be empty in the end, and about which the event loop has nothing to complain."""
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    engine = await AsyncEngine.start(folder, **options)
    # On a busy machine a tiny model may be done before the test gets to act: each step gives way to the event loop.
    observe(core_of(engine), taking_turns(asyncio.get_running_loop()))
    yield engine
    await engine.close()
    gc.collect()
    for _ in range(3):
        await asyncio.sleep(0)
    assert isinstance(engine._client, InprocClient)
    assert engine._client._queues == {}
    assert engine._calls == {}
    assert complaints == []


@pytest.fixture
async def engine(folder: Folder) -> AsyncIterator[AsyncEngine]:
    async with running(folder()) as engine:
        yield engine


@pytest.fixture(scope="module")
def llm(folder: Folder) -> LLM:
    """The same model without any concurrency, to compare with."""
    return LLM(folder())


async def until_stats(engine: AsyncEngine, holds: Callable[[EngineStats], bool]) -> None:
    async def asked() -> bool:
        return holds(await engine.stats())

    await until(asked)


async def final(engine: AsyncEngine, prompt: Any, params: SamplingParams, **options: Any) -> RequestOutput:
    (output,) = [o async for o in engine.generate(prompt, params, output_kind="final", **options)]
    assert output.finished
    return output


# ---- the three kinds of output ----


async def test_cumulative_outputs_grow(engine: AsyncEngine, llm: LLM) -> None:
    (expected,) = llm.generate(TEXT, replace(GREEDY, logprobs=1))
    outputs = [output async for output in engine.generate(TEXT, replace(GREEDY, logprobs=1))]
    assert len(outputs) > 1
    for earlier, later in pairwise(outputs):
        ours, theirs = earlier.outputs[0], later.outputs[0]
        assert len(ours.token_ids) < len(theirs.token_ids)
        assert theirs.token_ids[: len(ours.token_ids)] == ours.token_ids
        assert theirs.text.startswith(ours.text)
        assert not earlier.finished
    last = outputs[-1]
    assert last.finished
    assert last.outputs == expected.outputs
    assert (last.prompt, last.prompt_token_ids) == (TEXT, expected.prompt_token_ids)


async def test_deltas_add_up_to_the_whole(engine: AsyncEngine, llm: LLM) -> None:
    params = replace(GREEDY, logprobs=1, prompt_logprobs=0)
    (expected,) = llm.generate(TEXT, params)
    text, tokens, logprobs, with_prompt = "", [], [], []
    async for output in engine.generate(TEXT, params, output_kind="delta"):
        answer = output.outputs[0]
        text += answer.text
        tokens += answer.token_ids
        logprobs += answer.logprobs or []
        with_prompt += [output.prompt_logprobs] if output.prompt_logprobs else []
    whole = expected.outputs[0]
    assert (text, tokens, logprobs) == (whole.text, whole.token_ids, whole.logprobs)
    assert answer.finish_reason == "length"
    assert with_prompt == [expected.prompt_logprobs]  # once


async def test_final_is_one_output(engine: AsyncEngine, llm: LLM) -> None:
    (expected,) = llm.generate(TEXT, GREEDY)
    assert (await final(engine, TEXT, GREEDY)).outputs == expected.outputs


async def test_earlier_outputs_do_not_change(engine: AsyncEngine) -> None:
    kept = []
    async for output in engine.generate(TEXT, replace(GREEDY, logprobs=0)):
        answer = output.outputs[0]
        kept.append((answer, len(answer.token_ids), len(answer.text)))
    for answer, num_tokens, num_characters in kept:
        assert (len(answer.token_ids), len(answer.text)) == (num_tokens, num_characters)
        assert len(answer.logprobs or ()) == num_tokens


async def test_slow_reader_gets_several_tokens_at_a_time(engine: AsyncEngine, llm: LLM) -> None:
    (expected,) = llm.generate(TEXT, GREEDY)
    sizes, tokens = [], []
    async for output in engine.generate(TEXT, GREEDY, output_kind="delta"):
        sizes.append(len(output.outputs[0].token_ids))
        tokens += output.outputs[0].token_ids
        await until_idle(engine)
    assert tokens == expected.outputs[0].token_ids
    assert len(sizes) <= 2
    assert max(sizes) > 1


@pytest.mark.parametrize("kind", ["cumulative", "delta", "final"])
@pytest.mark.parametrize("include", [False, True])
async def test_stop_string_ends_the_stream(kind: Any, include: bool, engine: AsyncEngine, llm: LLM) -> None:
    text = llm.generate(TEXT, GREEDY)[0].outputs[0].text
    stop = text[20:23]
    params = replace(GREEDY, stop=stop, include_stop_str_in_output=include)
    (expected,) = llm.generate(TEXT, params)
    outputs = [output.outputs[0] async for output in engine.generate(TEXT, params, output_kind=kind)]
    seen = "".join(o.text for o in outputs) if kind == "delta" else outputs[-1].text
    assert seen == expected.outputs[0].text
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", stop)
    await until_idle(engine)


# ---- many at once ----


async def test_two_thousand_concurrent_requests_all_finish(folder: Folder, llm: LLM) -> None:
    prompts = [[5 + i % 300, 7 + i % 11, *range(1, 1 + i % 5)] for i in range(2000)]
    params = [
        SamplingParams(temperature=float(i % 2), seed=i, max_tokens=1 + i % 4, ignore_eos=True)
        for i in range(2000)
    ]
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    async with running(folder()) as engine:
        outputs = await asyncio.gather(
            *(final(engine, prompt, chosen) for prompt, chosen in zip(prompts, params, strict=True))
        )
        assert [output.outputs[0].token_ids for output in outputs] == expected
        await until_idle(engine)


async def test_several_answers_are_streamed(engine: AsyncEngine, llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=20, ignore_eos=True)
    (expected,) = llm.generate(TEXT, params)
    assert (await final(engine, TEXT, params)).outputs == expected.outputs
    tokens: list[list[int]] = [[], [], []]
    async for output in engine.generate(TEXT, params, output_kind="delta"):
        assert [answer.index for answer in output.outputs] == [0, 1, 2]
        for answer in output.outputs:
            tokens[answer.index] += answer.token_ids
    assert tokens == [answer.token_ids for answer in expected.outputs]
    assert all(answer.finish_reason == "length" for answer in output.outputs)


async def test_answers_may_end_at_different_times(engine: AsyncEngine, llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=1.5, seed=2, max_tokens=60, stop=["e", "a"])
    (expected,) = llm.generate(TEXT, params)
    assert len({len(answer.token_ids) for answer in expected.outputs}) > 1
    assert (await final(engine, TEXT, params)).outputs == expected.outputs
    await until_idle(engine)


async def test_chat(engine: AsyncEngine, llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    (expected,) = llm.chat(messages, GREEDY)
    outputs = [output async for output in engine.chat(messages, GREEDY, output_kind="final", tenant="x")]
    assert [output.outputs for output in outputs] == [expected.outputs]
    assert outputs[0].prompt == expected.prompt == "<|user|>hello<|end|><|assistant|>"
    async for _ in engine.chat(messages, ENDLESS):
        break
    await until_idle(engine)


# ---- leaving ----


async def test_request_is_aborted_by_id(engine: AsyncEngine, llm: LLM) -> None:
    whole = llm.generate(TEXT, ENDLESS)[0].outputs[0].token_ids
    outputs = []
    async for output in engine.generate(TEXT, ENDLESS, "mine"):
        outputs.append(output)
        if len(outputs) == 1:
            assert await engine.abort("mine") > 0
    answer = outputs[-1].outputs[0]
    assert outputs[-1].finished
    assert answer.finish_reason == "abort"
    assert answer.token_ids == whole[: len(answer.token_ids)]
    assert len(answer.token_ids) < len(whole)
    assert await engine.abort("mine") == 0
    await until_idle(engine)


async def test_abort_ends_all_answers(engine: AsyncEngine) -> None:
    params = replace(ENDLESS, n=3, temperature=1.0)
    freed, reasons = 0, []
    async for output in engine.generate(TEXT, params, "mine"):
        freed = freed or await engine.abort("mine")
        reasons = [answer.finish_reason for answer in output.outputs]
    assert freed > 0
    assert reasons == ["abort"] * 3
    await until_idle(engine)


@pytest.mark.parametrize("delay", range(1, 6))
async def test_abort_during_the_start_ends_all_answers(delay: int, engine: AsyncEngine) -> None:
    """An answer that was not there yet when its request was aborted must not come afterwards."""

    async def consume() -> list[str | None]:
        async for output in engine.generate(TEXT, replace(ENDLESS, n=3, temperature=1.0), "mine"):
            reasons = [answer.finish_reason for answer in output.outputs]
        return reasons

    task = asyncio.create_task(consume())
    for _ in range(delay):
        await asyncio.sleep(0)
    await engine.abort("mine")
    assert await task == ["abort"] * 3
    await until_idle(engine)


@pytest.mark.parametrize("n", [1, 3])
async def test_breaking_out_of_the_loop_frees_everything(n: int, engine: AsyncEngine) -> None:
    async for _ in engine.generate(TEXT, replace(ENDLESS, n=n, temperature=1.0)):
        break
    await until_idle(engine)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("kind", ["cumulative", "final"])
async def test_cancelled_task_frees_everything(n: int, kind: Any, engine: AsyncEngine) -> None:
    params = replace(ENDLESS, n=n, temperature=1.0)

    async def consume() -> None:
        async for _ in engine.generate(TEXT, params, output_kind=kind):
            pass

    tasks = [asyncio.create_task(consume()) for _ in range(5)]
    await until_stats(engine, lambda stats: stats.num_running == 5 * n)
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    await until_idle(engine)


@pytest.mark.parametrize("delay", range(6))
async def test_task_cancelled_at_its_start_frees_everything(delay: int, engine: AsyncEngine) -> None:
    """It is cancelled after `delay` turns of the event loop, sometimes while its answers are being added."""

    async def consume() -> None:
        async for _ in engine.generate(TEXT, replace(ENDLESS, n=3, temperature=1.0)):
            pass

    task = asyncio.create_task(consume())
    for _ in range(delay):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until_idle(engine)
    assert engine._calls == {}


async def test_generator_that_was_never_started_holds_nothing(engine: AsyncEngine) -> None:
    stream = engine.generate(TEXT, ENDLESS)
    await stream.aclose()
    assert (await engine.stats()).num_prompt_tokens == 0


async def test_aborted_requests_do_not_change_others(folder: Folder, llm: LLM) -> None:
    expected = llm.generate([[i] * 9 for i in range(5, 15)], GREEDY)
    async with running(folder(), num_blocks=20, pipeline_depth=2) as engine:

        async def leave(index: int) -> None:
            num_seen = 0
            async for _ in engine.generate([index] * 30, ENDLESS):
                num_seen += 1
                if num_seen > index % 7:
                    return

        stays = [asyncio.create_task(final(engine, [i] * 9, GREEDY)) for i in range(5, 15)]
        await asyncio.gather(*(leave(i) for i in range(20, 40)))
        outputs = await asyncio.gather(*stays)
        assert [o.outputs for o in outputs] == [o.outputs for o in expected]
        await until_idle(engine)


# ---- refusals and failures ----


async def test_request_id_in_use_is_rejected(engine: AsyncEngine, llm: LLM) -> None:
    first = engine.generate(TEXT, GREEDY, "same")
    await anext(first)
    with pytest.raises(RequestError, match="'same' is already in use"):
        await anext(engine.generate(TEXT, GREEDY, "same"))
    outputs = [output async for output in first]
    assert outputs[-1].outputs == llm.generate(TEXT, GREEDY)[0].outputs
    assert (await final(engine, TEXT, GREEDY, request_id="same")).finished


async def test_invalid_requests_are_rejected(engine: AsyncEngine, llm: LLM) -> None:
    with pytest.raises(PromptError, match="empty"):
        await anext(engine.generate("", GREEDY))
    with pytest.raises(ParameterError, match="320"):
        await anext(engine.generate(TEXT, SamplingParams(stop_token_ids=[320])))
    with pytest.raises(ParameterError, match="output_kind is 'all': allowed are cumulative, delta, final"):
        await anext(engine.generate(TEXT, GREEDY, output_kind="all"))  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="SamplingParams"):
        await anext(engine.generate(TEXT, {}))  # type: ignore[arg-type]
    with pytest.raises(PromptError, match="role"):
        await anext(engine.chat([{"content": "x"}], GREEDY))
    assert (await final(engine, TEXT, GREEDY)).outputs == llm.generate(TEXT, GREEDY)[0].outputs


async def test_unknown_options_and_missing_tokenizer_are_errors(folder: Folder) -> None:
    with pytest.raises(ConfigError, match="max_tokens"):
        await AsyncEngine.start(folder(), max_tokens=3)
    async with running(folder(), skip_tokenizer_init=True, enforce_eager=True) as engine:
        assert (await final(engine, [5, 6], GREEDY)).outputs[0].text == ""
        with pytest.raises(PromptError, match="tokenizer"):
            await anext(engine.generate(TEXT, GREEDY))
        with pytest.raises(ConfigError, match="tokenizer"):
            await anext(engine.chat([{"role": "user", "content": "x"}], GREEDY))


@pytest.mark.parametrize("n", [1, 4])
async def test_full_queue_rejects_requests(n: int, folder: Folder) -> None:
    """If some of several answers fit into the queue, they do not stay in it."""
    async with running(folder(), max_queue=2, max_num_seqs=1) as engine:
        held = engine.generate(TEXT, ENDLESS)
        await anext(held)
        waiting = [asyncio.create_task(final(engine, TEXT, GREEDY)) for _ in range(2 if n == 1 else 1)]
        await until_stats(engine, lambda stats: stats.num_waiting == len(waiting))
        with pytest.raises(QueueFullError, match="2 requests"):
            await anext(engine.generate(TEXT, replace(GREEDY, n=n)))
        await until_stats(engine, lambda stats: stats.num_waiting == len(waiting))
        await held.aclose()
        await asyncio.gather(*waiting)
        await until_idle(engine)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("method", ["launch", "collect"])
async def test_failed_step_ends_only_one_stream(depth: int, method: str, folder: Folder, llm: LLM) -> None:
    async with running(folder(), max_num_seqs=3, pipeline_depth=depth) as engine:
        PoisonedRunner(core_of(engine), begins_with(6), method)
        prompts = [[i] * 9 for i in range(5, 11)]
        results = await asyncio.gather(
            *(final(engine, prompt, GREEDY) for prompt in prompts), return_exceptions=True
        )
        expected = llm.generate(prompts, GREEDY)
        failed = results.pop(1)
        assert isinstance(failed, EngineError)
        assert "RuntimeError" in str(failed)
        del expected[1]
        for result, whole in zip(results, expected, strict=True):
            assert isinstance(result, RequestOutput)
            assert result.outputs == whole.outputs
        assert (await engine.health()).healthy
        await until_idle(engine)


async def test_crashed_loop_ends_all_streams(folder: Folder) -> None:
    async with running(folder()) as engine:
        streams = [engine.generate([i] * 9, ENDLESS) for i in range(5, 9)]
        for stream in streams:
            await anext(stream)

        def die() -> None:
            raise MemoryError("no more")

        core_of(engine).step = die  # type: ignore[method-assign,assignment]
        for stream in streams:
            with pytest.raises(EngineError, match="the engine stopped: MemoryError: no more"):
                async for _ in stream:
                    pass
        health = await engine.health()
        assert not health.healthy
        assert health.error is not None
        with pytest.raises(EngineError, match="MemoryError"):
            await anext(engine.generate(TEXT, GREEDY))


@pytest.mark.parametrize("n", [1, 3])
async def test_closing_ends_open_streams(n: int, folder: Folder) -> None:
    async with running(folder()) as engine:
        stream = engine.generate(TEXT, replace(ENDLESS, n=n, temperature=1.0))
        await anext(stream)
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            async for _ in stream:
                pass
        with pytest.raises(EngineError, match="closed"):
            await anext(engine.generate(TEXT, GREEDY))
        assert not (await engine.health()).healthy


async def test_context_manager_closes_the_engine(folder: Folder) -> None:
    async with await AsyncEngine.start(str(folder())) as engine:
        assert engine.max_model_len == 512
        assert (await final(engine, TEXT, GREEDY)).finished
    with pytest.raises(EngineError):
        await engine.stats()


async def test_second_event_loop_gets_an_error_that_says_so(engine: AsyncEngine) -> None:
    async def generate() -> None:
        async for _ in engine.generate(TEXT, GREEDY):
            pass

    calls = (generate, engine.stats, engine.sleep, partial(engine.abort, "x"), partial(engine.close, 0.0))
    await engine.stats()
    for call in calls:
        with pytest.raises(EngineError, match="in use by another event loop"):
            await asyncio.to_thread(asyncio.run, call())
    assert (await engine.stats()).num_running == 0


def test_event_loops_may_take_turns(folder: Folder) -> None:
    engine = asyncio.run(AsyncEngine.start(folder()))
    assert asyncio.run(engine.stats()).num_steps == 0
    asyncio.run(engine.close())
