"""`LLM` as its users write it."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from inflight import LLM, Policy, RequestOutput, SamplingParams
from inflight.entrypoints import offline
from inflight.errors import ConfigError, EngineError, ModelError, ParameterError, PromptError, TemplateError
from inflight.request import Request
from inflight.scheduling.policy import CheckedPolicy
from inflight.timeline.chunks import SlotKind
from inflight.timeline.recorder import NoRecorder, Recorder
from tests.e2e.conftest import Folder
from tests.support.checkpoints import FAMILIES, write_checkpoint
from tests.support.steps import StepRecord, observe

TEXT = "The quick brown fox"
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(folder: Folder) -> LLM:
    return LLM(model=str(folder()))


def only(outputs: list[RequestOutput]) -> Any:
    (output,) = outputs
    (answer,) = output.outputs
    return answer


# ---- prompts and outputs ----


def test_all_forms_of_a_prompt_are_equivalent(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode(TEXT)
    expected = only(llm.generate(TEXT, GREEDY)).token_ids
    forms: list[Any] = [[TEXT], ids, tuple(ids), [ids], {"prompt": TEXT}, {"prompt_token_ids": ids}]
    for form in forms:
        (output,) = llm.generate(form, GREEDY)
        assert output.prompt_token_ids == ids
        assert output.outputs[0].token_ids == expected
    mixed: list[Any] = [TEXT, ids, {"prompt_token_ids": ids}]
    outputs = llm.generate(mixed, GREEDY)
    assert [output.prompt for output in outputs] == [TEXT, None, None]
    assert [output.outputs[0].token_ids for output in outputs] == [expected] * 3


def test_ids_may_be_of_any_integer_type(llm: LLM) -> None:
    import numpy as np
    import torch

    expected = only(llm.generate([5, 6, 7], GREEDY)).token_ids
    for ids in (np.array([5, 6, 7]), torch.tensor([5, 6, 7]), range(5, 8)):
        assert only(llm.generate({"prompt_token_ids": ids}, GREEDY)).token_ids == expected


def test_outputs_have_the_documented_fields(llm: LLM) -> None:
    (output,) = llm.generate([TEXT], replace(GREEDY, logprobs=2))
    answer = output.outputs[0]
    assert output.finished
    assert output.prompt == TEXT
    assert len(answer.token_ids) == 24
    assert answer.finish_reason == "length"
    assert answer.stop_reason is None
    assert answer.error is None
    # The text continues the prompt's: a character that the prompt's last bytes begin is the answer's.
    whole = llm.get_tokenizer().decode([*output.prompt_token_ids, *answer.token_ids])
    assert whole == TEXT + answer.text
    assert answer.logprobs is not None
    assert len(answer.logprobs) == 24
    chosen = 0.0
    for token_id, position in zip(answer.token_ids, answer.logprobs, strict=True):
        assert next(iter(position)) == token_id
        assert position[token_id].rank == 1  # greedy
        assert len(position) == 2
        assert position[token_id].decoded_token == llm.get_tokenizer().decode([token_id], False)
        chosen += position[token_id].logprob
    assert answer.cumulative_logprob == pytest.approx(chosen)
    metrics = output.metrics
    assert metrics.time_in_queue is not None
    assert metrics.time_to_first_token is not None
    assert metrics.latency is not None
    assert 0 <= metrics.time_in_queue <= metrics.time_to_first_token <= metrics.latency
    assert output.prompt_logprobs is None


def test_zero_logprobs_give_only_the_sampled_token(llm: LLM) -> None:
    answer = only(llm.generate(TEXT, replace(GREEDY, logprobs=0)))
    assert [list(position) for position in answer.logprobs] == [[i] for i in answer.token_ids]
    without = only(llm.generate(TEXT, GREEDY))
    assert without.logprobs is None
    assert without.cumulative_logprob is None


def test_prompt_logprobs_of_one_token_are_none(llm: LLM) -> None:
    (output,) = llm.generate([[7]], replace(GREEDY, prompt_logprobs=3))
    assert output.prompt_logprobs == [None]


def test_outputs_come_in_the_order_of_the_prompts(folder: Folder) -> None:
    llm = LLM(folder(), max_num_seqs=3)
    prompts = [[i, i + 1] for i in range(1, 13)]
    params = [replace(GREEDY, max_tokens=1 + i * 5 % 13) for i in range(12)]
    outputs = llm.generate(prompts, params)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [p.max_tokens for p in params]
    assert [int(output.request_id) for output in outputs] == list(range(12))


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([]) == []
    assert llm.chat([]) == []


def test_default_params_come_from_the_checkpoint(tmp_path: Path, folder: Folder) -> None:
    import shutil

    shutil.copytree(folder(), tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 7, "max_new_tokens": 9}')
    llm = LLM(tmp_path)
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5, top_k=7, max_tokens=9)
    assert llm.get_default_sampling_fields() == {"temperature": 0.5, "top_k": 7, "max_tokens": 9}
    assert len(only(llm.generate([5, 6], None)).token_ids) <= 9


def test_priority_and_tenant_may_be_given_per_prompt(folder: Folder) -> None:
    order: list[str] = []
    llm = LLM(folder(), policy="priority", max_num_seqs=1)
    observe(llm._engine.core, lambda record: order.extend(record.admitted_ids))
    llm.generate([[5], [6], [7]], GREEDY, priority=[2, 0, 1])
    assert order == ["1", "2", "0"]
    assert len(llm.generate([[5], [6]], GREEDY, priority=3, tenant="x")) == 2


def test_options_of_vllm_are_accepted(folder: Folder) -> None:
    llm = LLM(folder(), enforce_eager=True, trust_remote_code=True, tensor_parallel_size=1, seed=1)
    assert len(llm.generate([5], GREEDY)) == 1


def test_model_may_be_a_path_or_a_string(folder: Folder) -> None:
    assert os.fspath(folder()) == LLM(folder())._engine.config.model.model


def test_dummy_weights_depend_only_on_the_seed() -> None:
    config = FAMILIES["llama"]().to_dict() | {"architectures": ["LlamaForCausalLM"]}
    llm, again, other = (
        LLM("none", load_format="dummy", hf_config=config, skip_tokenizer_init=True, seed=seed)
        for seed in (0, 0, 1)
    )
    params = replace(GREEDY, temperature=1.0, seed=5)
    tokens = [only(engine.generate([1, 2, 3], params)).token_ids for engine in (llm, again, other)]
    assert tokens[0] == tokens[1] != tokens[2]
    assert only(llm.generate([1, 2], GREEDY)).text == ""
    with pytest.raises(PromptError, match="has none: give token ids"):
        llm.generate("text", GREEDY)
    with pytest.raises(ConfigError, match="tokenizer"):
        llm.get_tokenizer()


def test_closed_engine_says_so(folder: Folder) -> None:
    with LLM(folder()) as llm:
        llm.generate([5], GREEDY)
    llm.close()
    with pytest.raises(EngineError, match="closed"):
        llm.generate([5], GREEDY)


class LastComeFirstServed(Policy):
    def push(self, request: Request, step: int) -> None:
        super().push(request, step)
        self.queue.remove(request)
        request.order = -request.arrival
        self.queue.push(request)


def test_own_policy_class_is_used(folder: Folder) -> None:
    order: list[str] = []
    llm = LLM(folder(), policy=LastComeFirstServed, max_num_seqs=1)
    observe(llm._engine.core, lambda record: order.extend(record.admitted_ids))
    llm.generate([[5], [6], [7]], GREEDY)
    assert order == ["2", "1", "0"]
    by_name = LLM(folder(), policy=f"{__name__}:LastComeFirstServed")
    checked = by_name._engine.core.scheduler.policy
    assert isinstance(checked, CheckedPolicy)
    assert type(checked.policy) is LastComeFirstServed


# ---- chat ----


def test_chat_takes_one_or_several_conversations(llm: LLM) -> None:
    hello = [{"role": "user", "content": "hello"}]
    longer = [{"role": "system", "content": "be kind"}, *hello]
    one = only(llm.chat(hello, GREEDY))
    outputs = llm.chat([hello, longer], GREEDY)
    assert outputs[0].outputs[0].token_ids == one.token_ids
    assert outputs[0].prompt == "<|user|>hello<|end|><|assistant|>"
    assert outputs[1].prompt == "<|system|>be kind<|end|><|user|>hello<|end|><|assistant|>"
    assert outputs[1].prompt_token_ids == llm.get_tokenizer().encode(outputs[1].prompt)
    begun = [*hello, {"role": "assistant", "content": "I am"}]
    (output,) = llm.chat(begun, GREEDY, add_generation_prompt=False, continue_final_message=True)
    assert output.prompt == "<|user|>hello<|end|><|assistant|>I am"


def test_chat_rejects_invalid_conversations(llm: LLM) -> None:
    with pytest.raises(PromptError, match="role"):
        llm.chat([{"content": "hello"}])
    with pytest.raises(PromptError, match="messages is a str"):
        llm.chat("hello")  # type: ignore[arg-type]
    with pytest.raises(TemplateError, match="nonsense"):
        llm.chat([{"role": "user", "content": "hello"}], chat_template_kwargs={"nonsense": 1})


# ---- how answers end ----


@pytest.fixture(scope="module")
def free_run(llm: LLM) -> Any:
    """A long greedy answer, to take stops from."""
    return only(llm.generate(TEXT, replace(GREEDY, max_tokens=60)))


def crossing_stop(llm: LLM, token_ids: list[int]) -> tuple[str, int]:
    """A stop string of two characters, the end of one token's text and the beginning of the next one's, and the
    number of tokens that complete its first appearance."""
    tokenizer = llm.get_tokenizer()
    pieces = [tokenizer.decode([token_id]) for token_id in token_ids]
    text = tokenizer.decode(token_ids)
    for index in range(4, len(pieces) - 8):
        first, second = pieces[index], pieces[index + 1]
        stop = first[-1:] + second[:1]
        if len(stop) == 2 and "\ufffd" not in stop and len(second) > 1 and text.count(stop) == 1:
            return stop, index + 2
    raise AssertionError("no stop string crosses two tokens: choose another prompt")


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("include", [False, True])
def test_stop_string_across_tokens_ends_the_answer(
    depth: int, include: bool, folder: Folder, free_run: Any
) -> None:
    llm = LLM(folder(), pipeline_depth=depth)
    stop, num_tokens = crossing_stop(llm, free_run.token_ids)
    params = replace(GREEDY, max_tokens=60, stop=["never there", stop], include_stop_str_in_output=include)
    answer = only(llm.generate(TEXT, replace(params, logprobs=1)))
    end = free_run.text.index(stop) + (len(stop) if include else 0)
    assert answer.text == free_run.text[:end]
    assert answer.finish_reason == "stop"
    assert answer.stop_reason == stop
    assert answer.token_ids == free_run.token_ids[:num_tokens]
    assert len(answer.logprobs) == num_tokens
    assert answer.cumulative_logprob == pytest.approx(
        sum(at[i].logprob for at, i in zip(answer.logprobs, answer.token_ids, strict=True))
    )
    assert llm.stats().kv.num_used == 0


def test_stop_string_ends_only_the_answer_that_contains_it(llm: LLM, free_run: Any) -> None:
    stop, _ = crossing_stop(llm, free_run.token_ids)
    params = replace(GREEDY, max_tokens=60, stop=stop)
    other = replace(GREEDY, max_tokens=60)
    outputs = llm.generate([TEXT, TEXT, TEXT], [params, other, params])
    assert [output.outputs[0].finish_reason for output in outputs] == ["stop", "length", "stop"]
    assert outputs[1].outputs[0].token_ids == free_run.token_ids


def test_min_tokens_delay_a_stop_string(llm: LLM, free_run: Any) -> None:
    stop, num_tokens = crossing_stop(llm, free_run.token_ids)
    params = replace(GREEDY, max_tokens=60, stop=stop)
    early = only(llm.generate(TEXT, replace(params, min_tokens=num_tokens)))
    assert len(early.token_ids) == num_tokens
    late = only(llm.generate(TEXT, replace(params, min_tokens=num_tokens + 1)))
    assert late.text == free_run.text
    assert late.finish_reason == "length"


def test_stop_token_ids_end_the_answer(llm: LLM, free_run: Any) -> None:
    stop = free_run.token_ids[10]
    first = free_run.token_ids.index(stop)
    answer = only(llm.generate(TEXT, replace(GREEDY, stop_token_ids=[stop, 3])))
    assert answer.token_ids == free_run.token_ids[: first + 1]
    assert answer.finish_reason == "stop"
    assert answer.stop_reason == stop
    assert free_run.text.startswith(answer.text)
    including = only(
        llm.generate(TEXT, replace(GREEDY, stop_token_ids=[stop], include_stop_str_in_output=True))
    )
    assert including.token_ids == answer.token_ids
    piece = llm.get_tokenizer().decode([stop])
    assert "\ufffd" in piece or including.text == answer.text + piece


def test_end_token_ends_the_answer_unless_ignored(folder: Folder, free_run: Any, tmp_path: Path) -> None:
    import json
    import shutil

    end = free_run.token_ids[9]
    first = free_run.token_ids.index(end)
    shutil.copytree(folder(), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": [end, 317]}))
    llm = LLM(tmp_path)
    ended = only(llm.generate(TEXT, replace(GREEDY, ignore_eos=False, max_tokens=None)))
    assert ended.token_ids == free_run.token_ids[: first + 1]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", None)
    assert only(llm.generate(TEXT, replace(GREEDY, max_tokens=60))).token_ids == free_run.token_ids
    later = only(llm.generate(TEXT, replace(GREEDY, ignore_eos=False, min_tokens=20)))
    assert len(later.token_ids) >= 20
    assert end not in later.token_ids[:20]


def test_without_max_tokens_the_context_is_the_limit(folder: Folder) -> None:
    llm = LLM(folder(), max_model_len=50)
    answer = only(llm.generate([5] * 20, replace(GREEDY, max_tokens=None)))
    assert len(answer.token_ids) == 30
    assert answer.finish_reason == "length"
    assert len(only(llm.generate([5] * 49, replace(GREEDY, max_tokens=9))).token_ids) == 1


def test_bad_words_are_not_generated(llm: LLM, free_run: Any) -> None:
    tokenizer = llm.get_tokenizer()
    word = next(
        text
        for i in free_run.token_ids
        if (text := tokenizer.decode([i])).isascii() and text.strip().isalpha()
    ).strip()
    assert word in free_run.text
    answer = only(llm.generate(TEXT, replace(GREEDY, max_tokens=60, bad_words=[word])))
    forbidden = {tuple(tokenizer.encode(word)), tuple(tokenizer.encode(" " + word))}
    assert not forbidden & {(i,) for i in answer.token_ids}
    assert answer.token_ids != free_run.token_ids


def test_only_allowed_tokens_are_generated(llm: LLM) -> None:
    answer = only(llm.generate(TEXT, replace(GREEDY, allowed_token_ids=[40, 41, 42], temperature=1.0)))
    assert set(answer.token_ids) <= {40, 41, 42}
    assert len(set(answer.token_ids)) > 1


def test_logit_bias_changes_the_choice(llm: LLM) -> None:
    biased: Any = {"77": 100}  # string keys, as in JSON
    assert set(only(llm.generate(TEXT, replace(GREEDY, logit_bias=biased))).token_ids) == {77}


def test_without_detokenizing_there_is_no_text(llm: LLM, free_run: Any) -> None:
    answer = only(llm.generate(TEXT, replace(GREEDY, max_tokens=60, detokenize=False)))
    assert answer.text == ""
    assert answer.token_ids == free_run.token_ids


def test_special_tokens_are_hidden_by_default(llm: LLM) -> None:
    params = replace(GREEDY, allowed_token_ids=[0], max_tokens=3)
    assert only(llm.generate(TEXT, params)).text == ""
    assert only(llm.generate(TEXT, replace(params, skip_special_tokens=False))).text == "<|end|>" * 3


# ---- interruption ----


@pytest.mark.parametrize("options", [{}, {"pipeline_depth": 2}, {"policy": "static", "max_num_seqs": 2}])
def test_ctrl_c_leaves_the_engine_usable(options: dict[str, Any], folder: Folder) -> None:
    llm = LLM(folder(), **options)
    prompts = [[i] * 20 for i in range(5, 11)]
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]
    llm = LLM(folder(), **options)

    def interrupt(record: StepRecord) -> None:
        if record.step == 7:
            raise KeyboardInterrupt

    observe(llm._engine.core, interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, GREEDY)
    kv = llm.stats().kv
    assert kv.num_used == 0
    assert kv.num_empty + kv.num_cached == kv.num_blocks
    assert (llm.stats().num_running, llm.stats().num_waiting) == (0, 0)
    assert [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)] == expected


@pytest.mark.parametrize("depth", [1, 2])
def test_ctrl_c_at_any_line_leaves_the_engine_usable(depth: int, folder: Folder) -> None:
    """A signal comes between any two lines of the calling thread. It never reaches the thread with the books."""
    llm = LLM(folder(), num_blocks=24, max_num_seqs=4, pipeline_depth=depth)
    prompts = [[i] * (10 + 3 * i) for i in range(5, 11)]
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]
    seen = LineCounter()
    with seen.signal_at(None):
        llm.generate(prompts, GREEDY)
    num_interrupts = 0
    for line in range(1, seen.num_lines + 1):  # a few less if the thread has to wait less
        try:
            with seen.signal_at(line):
                llm.generate(prompts, GREEDY)
        except KeyboardInterrupt:
            num_interrupts += 1
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)] == expected
        kv = llm.stats().kv
        assert (kv.num_used, kv.num_empty + kv.num_cached) == (0, kv.num_blocks)
        assert gc.isenabled()
    assert num_interrupts > 20


class LineCounter:
    """Counts the lines of `offline.py` that this thread runs, and presses Ctrl-C at one of them."""

    num_lines = 0

    @contextmanager
    def signal_at(self, line: int | None) -> Iterator[None]:
        self.num_lines, self._line = 0, line
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "call":
            return self._trace if frame.f_code.co_filename == offline.__file__ else None
        if event == "line":
            self.num_lines += 1
            if self.num_lines == self._line:
                signal.raise_signal(signal.SIGINT)
        return self._trace


@pytest.mark.parametrize("depth", [1, 2])
def test_ctrl_c_within_a_step_keeps_the_prefix_cache_valid(
    depth: int, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step publishes the blocks that it will fill. If it never fills them, no request may get them as hits."""
    llm = LLM(folder(), pipeline_depth=depth)
    prompt = list(range(10, 70))
    expected = only(LLM(folder()).generate(prompt, GREEDY)).token_ids
    decoder = llm._engine.model

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(decoder), "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompt, GREEDY)
    (output,) = llm.generate(prompt, GREEDY)
    assert output.num_cached_tokens == 0
    assert output.outputs[0].token_ids == expected


# ---- parameters of lists ----


def test_lists_must_be_as_long_as_the_prompts(llm: LLM) -> None:
    for wrong in ({"sampling_params": [GREEDY]}, {"priority": [1, 2, 3]}, {"tenant": ["a"]}):
        with pytest.raises(ParameterError, match="for 2 prompts"):
            llm.generate([[5], [6]], **wrong)
    with pytest.raises(ParameterError, match="SamplingParams"):
        llm.generate([[5]], {"temperature": 0})  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="SamplingParams"):
        llm.generate([[5]], [None])  # type: ignore[list-item]


def test_sharded_weights_give_the_same_tokens(folder: Folder, tmp_path: Path, free_run: Any) -> None:
    write_checkpoint(tmp_path, "llama", max_shard_size="100KB")
    llm = LLM(tmp_path, tokenizer=str(folder()))
    assert only(llm.generate(TEXT, replace(GREEDY, max_tokens=60))).token_ids == free_run.token_ids


def test_shared_prefix_is_held_once(folder: Folder) -> None:
    """Eight requests of 161 tokens run at once in memory for 768, since 160 of them are the same."""
    with LLM(folder(), num_blocks=48, block_size=16, max_num_seqs=8) as llm:
        prefix = [3 + position % 200 for position in range(160)]
        params = replace(GREEDY, max_tokens=6)
        with llm.recorded() as steps:
            outputs = llm.generate([[*prefix, 5 + index] for index in range(8)], params)
        assert max(step.num_running for step in steps) == 8
        assert [output.num_cached_tokens for output in outputs] == [0] + [160] * 7


def test_recording_has_the_steps_of_its_block(folder: Folder) -> None:
    with LLM(folder()) as llm:
        llm.generate([[5]], GREEDY)
        with llm.recorded() as steps:
            output = only(llm.generate([[5, 6, 7]], GREEDY))
        assert isinstance(llm._engine.core.recorder, NoRecorder)
        assert not isinstance(llm._engine.core.recorder, Recorder)
        llm.generate([[8]], GREEDY)
    assert sum(step.num_outputs for step in steps) == len(output.token_ids)
    assert [(slot.kind, slot.start, slot.num_tokens) for slot in steps[0].slots] == [(SlotKind.PREFILL, 0, 3)]
    assert [step.slots[0].start for step in steps[1:4]] == [3, 4, 5]
    assert all(step.all_decode(1) and 0 < step.kv_waste < 1 for step in steps[1:4])
    ends = [step.times.finished_at for step in steps]
    assert ends == sorted(ends)


def test_recording_of_a_block_leaves_the_file_whole(folder: Folder, tmp_path: Path) -> None:
    with LLM(folder(), record=tmp_path / "run.json") as llm:
        llm.generate([[5]], GREEDY)
        with contextlib.suppress(ValueError), llm.recorded() as steps:
            llm.generate([[5, 6, 7]], GREEDY)
            raise ValueError
        llm.generate([[8]], GREEDY)
        num_steps = llm.stats().num_steps
    assert 0 < len(steps) < num_steps
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    assert sum(event["name"].startswith("step ") for event in events) == num_steps


def test_random_weights_need_a_config_alone(folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder() / "config.json").read_bytes())
    with LLM(tmp_path, load_format="dummy") as llm:
        assert len(only(llm.generate([5, 6, 7], GREEDY)).token_ids) == 24
        with pytest.raises(PromptError, match="tokenizer"):
            llm.generate(TEXT, GREEDY)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        LLM(tmp_path, load_format="dummy", tokenizer=str(tmp_path))
