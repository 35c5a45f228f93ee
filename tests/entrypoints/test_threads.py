"""`LLM` behind a thread pool: calls join one batch, and each returns, fails and ends alone."""

from __future__ import annotations

import ctypes
import gc
import io
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest

from inflight import LLM, BeamSearchParams, RequestOutput, SamplingParams, StructuredOutputs
from inflight.checkpoint.builtin import builtin_folder
from inflight.entrypoints.offline import ReplicatedEngine, RequestBars
from inflight.errors import EngineError, PromptError
from inflight.events import Delta
from inflight.timeline.chunks import decode_chunk
from tests.support.steps import StepRecord, observe

LONG = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=8)
KINDS = (
    {"temperature": 0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.9, "seed": 2, "n": 3, "top_p": 0.9},
    {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"temperature": 0, "logprobs": 3, "prompt_logprobs": 1},
    {"temperature": 0, "stop": [" the"]},
    {"temperature": 1.0, "seed": 3, "structured_outputs": StructuredOutputs(regex="[a-z]{5,9}( [0-9]+)?")},
    {"temperature": 0, "min_tokens": 4, "logit_bias": {40: 5.0}},
)
WORDS = ["Once", "One", "The", "A", "When", "Two", "My", "Every"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(show_progress=False, num_blocks=512) as made:
        yield made


@pytest.fixture
def fresh() -> Iterator[LLM]:
    with LLM(show_progress=False, num_blocks=512) as made:
        yield made


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Future[Any]]:
    """Start all calls together, each in its own thread, and wait for them."""
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        barrier.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [pool.submit(run, call) for call in calls]


def content(outputs: list[RequestOutput]) -> Any:
    """Return what an answer is, without its id and its times."""
    return [(output.prompt_token_ids, output.outputs, output.prompt_logprobs) for output in outputs]


class Meeting:
    """Observes an engine, and calls a function once in the first step that has so many requests."""

    def __init__(self, llm: LLM, num_requests: int, then: Callable[[], object] = lambda: None) -> None:
        self._num_requests, self._then = num_requests, then
        self.happened = threading.Event()
        if isinstance(llm._offline, ReplicatedEngine):
            llm._offline._wait_for(self._watch(llm._offline))
        else:
            observe(llm._engine.core, lambda record: self._see(len(record.slots)))

    async def _watch(self, engine: ReplicatedEngine) -> None:
        def see(_: str, data: bytes) -> None:
            self._see(max(decode_chunk(data).column("running"), default=0))

        engine._router.watch_timeline(see)

    def _see(self, num_requests: int) -> None:
        if num_requests >= self._num_requests and not self.happened.is_set():
            self._then()
            self.happened.set()


def check_idle(llm: LLM) -> None:
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv.num_used) == (0, 0, 0)


def test_calls_of_many_threads_join_one_batch_and_answer_as_alone(llm: LLM) -> None:
    def call(number: int) -> Callable[[], Any]:
        prompts = [f"{WORDS[(number + index) % len(WORDS)]} day {number}" for index in range(4)]
        params = [
            SamplingParams(max_tokens=6 + (number + index) % 20, **KINDS[(number + index) % len(KINDS)])
            for index in range(4)
        ]
        return lambda: content(llm.generate(prompts, params, use_tqdm=False))

    calls = [call(number) for number in range(40)]
    expected = [call() for call in calls]
    with llm.recorded() as steps:
        for _ in range(3):
            assert [future.result() for future in at_once(calls)] == expected
    assert max(len(step.slots) for step in steps) > 12  # the most that one call has
    check_idle(llm)


def test_chats_and_beams_of_many_threads_answer_as_alone(llm: LLM) -> None:
    def chat(number: int) -> Any:
        messages = [{"role": "user", "content": f"What is {number} plus 2?"}]
        return [output.outputs for output in llm.chat(messages, SHORT, use_tqdm=False)]

    def beams(number: int) -> Any:
        return llm.beam_search(WORDS[number % len(WORDS)], BeamSearchParams(beam_width=2, max_tokens=4))

    calls = [partial(call, number) for number in range(12) for call in (chat, beams)]
    expected = [call() for call in calls]
    with LLM(show_progress=False, num_blocks=512) as llm:  # whose first chats come together
        assert [future.result() for future in at_once(calls)] == expected


@pytest.mark.parametrize("kind", ["embedder", "reranker"])
def test_scoring_of_many_threads_is_as_alone(kind: Literal["embedder", "reranker"]) -> None:
    with LLM(str(builtin_folder(kind)), show_progress=False) as llm:
        texts = [f"document {number} is about " + "rain " * (number % 9) for number in range(60)]

        def embed(number: int) -> Any:
            return [output.outputs.embedding for output in llm.embed(texts[number:], use_tqdm=False)]

        def classify(number: int) -> Any:
            return [output.outputs.probs for output in llm.classify(texts[number:], use_tqdm=False)]

        def score(number: int) -> Any:
            outputs = llm.score(texts[number], texts, use_tqdm=False)
            return [(output.outputs.score, output.prompt_token_ids) for output in outputs]

        def rerank(number: int) -> Any:
            return llm.rerank(texts[number], texts, 5, use_tqdm=False)

        kinds = (embed if kind == "embedder" else classify, score, rerank)
        calls = [partial(call, number) for number in range(8) for call in kinds]
        expected = [call() for call in calls]
        for _ in range(2):
            assert [future.result() for future in at_once(calls)] == expected
        too_long = ["fine", "word " * 5000, "fine"]
        pool: Callable[..., object] = llm.embed if kind == "embedder" else llm.classify
        first, failed, last = at_once([lambda: score(0), lambda: pool(too_long), lambda: score(1)])
        assert isinstance(failed.exception(), PromptError)
        assert [first.result(), last.result()] == [score(0), score(1)]
        check_idle(llm)


# ---- interrupts ----


def test_ctrl_c_ends_only_the_call_of_the_main_thread(llm: LLM) -> None:
    expected = content(llm.generate(["One day"] * 2, LONG))
    meeting = Meeting(llm, 7, lambda: os.kill(os.getpid(), signal.SIGINT))
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(llm.generate, ["One day"] * 2, LONG) for _ in range(2)]
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["My cat"] * 3, LONG)
        assert meeting.happened.is_set()
        assert [content(other.result()) for other in others] == [expected] * 2
    check_idle(llm)


def test_exception_set_in_a_thread_ends_only_its_call(llm: LLM) -> None:
    expected = content(llm.generate(["One day"] * 2, LONG))
    ids: list[int] = []
    endless = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)

    def call() -> None:
        ids.append(threading.get_ident())
        llm.generate(["My cat"] * 3, endless)

    def stop() -> None:
        set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc
        assert set_exception(ctypes.c_ulong(ids[0]), ctypes.py_object(TimeoutError)) == 1

    Meeting(llm, 5, stop)
    with ThreadPoolExecutor(2) as pool:
        stopped, other = pool.submit(call), pool.submit(llm.generate, ["One day"] * 2, LONG)
        assert isinstance(stopped.exception(), TimeoutError)
        assert content(other.result()) == expected
    check_idle(llm)


def test_error_of_a_step_ends_all_calls_and_leaves_the_engine_usable(fresh: LLM) -> None:
    expected = content(fresh.generate("One day", SHORT))

    class Stop(BaseException):
        """Passes where an observer's exceptions are caught."""

    def stop() -> None:
        raise Stop

    Meeting(fresh, 3, stop)
    futures = at_once([lambda: fresh.generate("One day", LONG)] * 3)
    assert [type(future.exception()) for future in futures] == [Stop] * 3
    check_idle(fresh)
    assert content(fresh.generate("One day", SHORT)) == expected


# ---- commands ----


def test_commands_run_between_the_steps_of_other_calls(llm: LLM) -> None:
    expected = content(llm.generate(["One day"] * 2, LONG))
    meeting = Meeting(llm, 2)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(llm.generate, ["One day"] * 2, LONG)
        meeting.happened.wait()
        with pytest.raises(EngineError, match="the engine has requests"):
            llm.sleep()
        assert llm.stats().num_running == 2
        assert llm.reset_prefix_cache()
        assert content(other.result()) == expected


def test_code_in_the_engines_thread_may_ask_the_engine_but_not_wait_for_it(fresh: LLM) -> None:
    seen: list[Any] = []

    def ask(_: StepRecord) -> None:
        seen.append(fresh.stats().num_running)
        for call in (lambda: fresh.generate("One day", SHORT), fresh.close):
            with pytest.raises(EngineError, match="the engine's thread cannot"):
                call()
        seen.append("asked")

    stop = observe(fresh._engine.core, ask)
    fresh.generate("One day", replace(SHORT, max_tokens=2))
    stop()
    assert seen == [1, "asked", 0, "asked"]


# ---- the end ----


def test_close_ends_running_calls_with_an_error(fresh: LLM) -> None:
    meeting = Meeting(fresh, 4)
    with ThreadPoolExecutor(5) as pool:
        calls = [pool.submit(fresh.generate, ["One day"] * 2, LONG) for _ in range(2)]
        meeting.happened.wait()
        for closing in [pool.submit(fresh.close) for _ in range(3)]:
            closing.result()
    for call in calls:
        with pytest.raises(EngineError, match="the LLM was closed while this call was running"):
            call.result()
    for method in (lambda: fresh.generate("One day", SHORT), fresh.stats, fresh.reset_prefix_cache):
        with pytest.raises(EngineError, match="this LLM is closed"):
            method()
    fresh.close()


def test_dropped_engine_is_freed_and_its_thread_ends() -> None:
    llm = LLM(show_progress=False, num_blocks=64)
    llm.generate("One day", SHORT)
    with pytest.raises(PromptError):
        llm.generate("", SHORT)
    thread, loaded = llm._offline._thread, weakref.ref(llm._engine)  # type: ignore[attr-defined]
    del llm
    gc.collect()
    thread.join()
    assert loaded() is None


FORKING = """
import os, sys
from inflight import LLM, SamplingParams
from inflight.errors import EngineError
from tests.support.steps import StepRecord, observe
params = SamplingParams(temperature=0, max_tokens=4)
llm = LLM(show_progress=False, num_blocks=512)
first = llm.generate("One day", params)[0].outputs[0].text
child = os.fork()
if not child:
    try:
        llm.generate("One day", params)
    except EngineError as error:
        print(error, flush=True)
    llm.close()
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
assert llm.generate("One day", params)[0].outputs[0].text == first
"""


def test_forked_process_gets_an_error_and_leaves_the_engine_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "this LLM was created before a fork: create it in the process that uses it\n"


FORKING_REPLICAS = """
import os, sys
from inflight import LLM, SamplingParams
from inflight.errors import EngineError
if __name__ == "__main__":
    llm = LLM(show_progress=False, num_blocks=512, replicas=1)
    child = os.fork()
    if not child:
        for call in (llm.generate, llm.stats):
            try:
                call(*["One day"][:call == llm.generate])
            except EngineError as error:
                print(error, flush=True)
        llm.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    llm.close()
"""


def test_forked_process_gets_an_error_from_replicas(tmp_path: Path) -> None:
    script = tmp_path / "forking.py"
    script.write_text(FORKING_REPLICAS)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == 2 * "this LLM was created before a fork: create it in the process that uses it\n"


FORKING_RECORDED = """
import os, sys
from inflight import LLM
llm = LLM(show_progress=False, num_blocks=512, record=sys.argv[1])
child = os.fork()
if not child:
    with llm:
        pass
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
assert not os.path.exists(sys.argv[1])
llm.close()
assert os.path.exists(sys.argv[1])
"""


def test_only_the_process_that_records_writes_the_trace(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKING_RECORDED, tmp_path / "run.json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


FORKED_CHATS = """
import os, signal, sys, threading
from inflight import LLM
from inflight.errors import EngineError
llm = LLM(show_progress=False, num_blocks=512)
render = llm.get_tokenizer().apply_chat_template
render([{"role": "user", "content": "first"}], tokenize=False)
llm._rendering.acquire()  # as another thread may
child = os.fork()
name = f"{'parent' if child else 'child'} {{}}".format
for index in range(200):
    text = name(index)
    assert text in render([{"role": "user", "content": text}], tokenize=False)
if not child:
    try:
        llm.chat([{"role": "user", "content": "x"}])
    except EngineError as error:
        print(error, flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def test_forked_process_renders_its_own_chats() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED_CHATS], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "this LLM was created before a fork: create it in the process that uses it\n"


# ---- progress bars ----


def test_bars_of_several_calls_are_drawn_together(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    screen.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", screen)
    bars = RequestBars()
    with bars.add("generating", 4, True) as first:
        with bars.add("embedding", 2, True) as second:
            assert first is not None
            assert second is not None
            second([Delta("0", [], finish_reason="stop")])
            first([Delta("1", [5, 6], finish_reason="length")])
        first([Delta("2", [7], finish_reason="length")])
    lines = screen.getvalue().splitlines()
    assert any("generating" in line and "2/4" in line for line in lines), lines
    assert bars._progress is None
    with bars.add("generating", 4, False) as none:
        assert none is None


# ---- replicas ----


def raised_by(call: Callable[[], object]) -> Exception:
    with pytest.raises(EngineError) as raised:
        call()
    return raised.value


def test_threads_share_replicas() -> None:
    with LLM(show_progress=False, num_blocks=512, replicas=2) as llm:
        errors: list[Exception] = []
        assert isinstance(llm._offline, ReplicatedEngine)
        llm._offline._loop.call_soon_threadsafe(lambda: errors.append(raised_by(llm.stats)))
        expected = content(llm.generate(["One day"] * 2, LONG))
        assert "the router's thread cannot ask replicas" in str(errors[0])
        meeting = Meeting(llm, 3, lambda: os.kill(os.getpid(), signal.SIGINT))
        with ThreadPoolExecutor(3) as pool:
            others = [pool.submit(llm.generate, ["One day"] * 2, LONG) for _ in range(3)]
            with pytest.raises(KeyboardInterrupt):
                llm.generate(["My cat"] * 6, LONG)
            assert [content(other.result()) for other in others] == [expected] * 3
            assert meeting.happened.is_set()
            begun = Meeting(llm, 1)
            endless = pool.submit(llm.generate, ["One day"] * 2, LONG)
            begun.happened.wait()
            for closing in [pool.submit(llm.close) for _ in range(2)]:
                closing.result()
            assert isinstance(endless.exception(), EngineError)
            with pytest.raises(EngineError, match="this LLM is closed"):
                llm.generate("One day", SHORT)
