"""vLLM's Python API: docs/from-vllm.md and the code agree, and every line of the page works."""

from __future__ import annotations

import asyncio
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

import inflight
from inflight import LLM, AsyncEngineArgs, AsyncLLM, BeamSearchParams, SamplingParams
from inflight.config import EngineConfig
from inflight.engine.client import Health
from inflight.errors import ConfigError, EngineDeadError, ParameterError, PromptError
from inflight.outputs import ClassificationOutput, EmbeddingOutput, Logprob, RequestOutput, ScoreOutput
from inflight.vllm_names import (
    LLM_RULES,
    METHOD_RULES,
    PROMPT_RULES,
    SAMPLING_RULES,
)
from inflight.vllm_rules import IGNORED, CompatRule, CompatRules
from tests.cli.vllm.page import ABSENT, ACCEPTED, OTHER_NAME, SAME, Line, section
from tests.support.waiting import until

GREEDY = SamplingParams(temperature=0, max_tokens=4)
TEXT = "Once upon a time"
USER = {"role": "user", "content": "Hello"}
# A non-default value of each option that does not accept "something".
OPTION_VALUES: dict[str, Any] = {
    "dtype": "half",
    "load_format": "dummy",
    "kv_cache_dtype": "fp8",
    "quantization": "fp8",
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "enable_prefix_caching": False,
    "gpu_memory_utilization": 0.5,
    "kv_cache_memory_bytes": 1 << 30,
    "kv_cache_memory": "1G",
    "scheduling_policy": "priority",
    "async_scheduling": True,
    **dict.fromkeys(("seed", "max_model_len", "tensor_parallel_size", "pipeline_parallel_size"), 7),
    **dict.fromkeys(("block_size", "max_num_seqs", "max_num_batched_tokens", "num_gpu_blocks_override"), 7),
}
FIELD_VALUES: dict[str, Any] = {
    **dict.fromkeys(("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"), 2),
    **dict.fromkeys(("temperature", "top_p", "min_p"), 0.5),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty"), 0.5),
    **dict.fromkeys(("include_stop_str_in_output", "ignore_eos"), True),
    **dict.fromkeys(("detokenize", "skip_special_tokens"), False),
    "stop_token_ids": [5],
    "allowed_token_ids": [5],
    "logit_bias": {5: 1.0},
    "bad_words": ["x"],
    "structured_outputs": {"regex": "x"},
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(num_blocks=128, show_progress=False, quantization=None, kv_cache_dtype="auto") as llm:
        yield llm


@pytest.fixture(scope="module")
def output(llm: LLM) -> RequestOutput:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=1)
    return llm.generate(TEXT, params, use_tqdm=False, lora_request=None)[0]


def check_table(title: str, rules: CompatRules) -> None:
    """Check that the page has a line for each name that is replaced, which is written by hand."""
    lines = {line.names: line for line in section(title)}
    replaced = [rule for rule in rules.rows if any(rule.mapping.values())]
    for rule in replaced:
        names = tuple(name for name in rule.names if not name.startswith("-"))
        assert lines[names].outcome in (SAME, OTHER_NAME)


def rule_of(rules: CompatRules, name: str) -> CompatRule:
    rule = rules.find(name)
    assert rule is not None
    return rule


def harmless_values(rule: CompatRule) -> list[Any]:
    if rule.mapping is IGNORED:
        return ["something", 7, True, None]
    numbers = [json.loads(value) for value in rule.mapping if value.lstrip("-")[0].isdigit()]
    return [None, *rule.mapping, *numbers, *(() if rule.off_matters else (False, 0, 0.0, "", [], {}))]


def assert_raises(message: str, kind: type[Exception], call: Any) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# ---- imports and prompts ----


def test_names_can_be_imported_or_have_a_replacement() -> None:
    lines = section("Imports")
    for line in lines:
        for name in line.names:
            if line.outcome == ABSENT:
                assert_raises(line.here, ImportError, lambda name=name: getattr(inflight, name))
            elif name != "PromptType":
                expected = line.code[0] if line.outcome == OTHER_NAME else name
                assert getattr(inflight, name).__name__ == expected
    assert inflight.TokensPrompt(prompt_token_ids=[1]) == {"prompt_token_ids": [1]}


def test_modules_name_a_replacement() -> None:
    lines = section("Modules")
    for line in lines:
        for name in line.names:
            module = name.replace("vllm", "inflight", 1)
            if line.outcome == ABSENT:
                assert_raises(line.here, ImportError, lambda module=module: importlib.import_module(module))
                assert_raises(
                    line.here, ImportError, lambda module=module: importlib.import_module(f"{module}.x")
                )
            else:
                importlib.import_module(module)
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'inflight\.nosuch'"):
        importlib.import_module("inflight.nosuch")


def test_names_can_be_imported_from_their_modules() -> None:
    sampling_params: Any = importlib.import_module("inflight.sampling_params")
    outputs: Any = importlib.import_module("inflight.outputs")
    for name in ("StructuredOutputsParams", "GuidedDecodingParams"):
        assert getattr(sampling_params, name) is inflight.StructuredOutputs
    assert sampling_params.BeamSearchParams is BeamSearchParams
    assert outputs.ScoringRequestOutput is outputs.PoolingRequestOutput
    with pytest.raises(ImportError, match="RequestOutputKind: pass output_kind"):
        _ = sampling_params.RequestOutputKind
    with pytest.raises(AttributeError, match=r"module 'inflight\.outputs' has no attribute 'Nosuch'"):
        _ = outputs.Nosuch


def test_server_module_names_the_command() -> None:
    words = [sys.executable, "-m", "inflight.entrypoints.openai.api_server", "--model", "m"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "use `inflight serve MODEL`" in done.stderr


def test_prompt_keys_do_what_the_page_says(llm: LLM) -> None:
    check_table("Prompts", PROMPT_RULES)
    for rule in PROMPT_RULES.rows:
        for name in rule.names:
            nothing: Any = {"prompt": TEXT, name: harmless_values(rule)[0]}
            assert llm.generate(nothing, GREEDY, use_tqdm=False)[0].prompt == TEXT
            if rule.mapping is not IGNORED:
                prompt: Any = {"prompt": TEXT, name: "something"}
                assert_raises(rule.reason, PromptError, lambda prompt=prompt: llm.generate(prompt, GREEDY))


# ---- options ----


def create(**options: Any) -> EngineConfig:
    return EngineConfig.create("m", **options)


def try_option(line: Line, name: str) -> None:
    if line.outcome == SAME and name != "model":
        changed = create(**{name: OPTION_VALUES.get(name, "something")}).options()
        assert [key for key, value in changed.items() if value != create().options()[key]] == [name]
        assert create(**{name: None}) == create()
    elif line.outcome == OTHER_NAME and name != "use_tqdm_on_load":
        value = OPTION_VALUES[name]
        here = 2 if name == "async_scheduling" else value
        assert create(**{name: value}) == create(**{line.code[0]: here}) != create()
    elif line.outcome in (ACCEPTED, ABSENT):
        for value in harmless_values(rule_of(LLM_RULES, name)):
            assert create(**{name: value}) == create(), (name, value)
    if line.outcome == ABSENT:
        reason = rule_of(LLM_RULES, name).explanation(flags=False)
        message = f"{name} is 'something', which is not supported: {reason}"
        assert_raises(message, ConfigError, lambda: create(**{name: "something"}))


def test_llm_options_do_what_the_page_says() -> None:
    check_table("LLM options", LLM_RULES)
    for line in section("LLM options"):
        for name in line.names:
            try_option(line, name)
    assert create(dtype="float").model.dtype == "float32"
    assert create(scheduling_policy="fcfs", policy="fcfs", max_model_len=-1) == create()
    assert create(max_model_len="32k", reasoning_parser="qwen3").options()["max_model_len"] == 32000
    assert create(async_scheduling=False).options()["pipeline_depth"] == 1
    assert_raises("did you mean max_num_seqs?", ConfigError, lambda: create(max_num_seq=5))
    assert_raises("chunked prefill is always on", ConfigError, lambda: create(enable_chunked_prefill=False))


def test_use_tqdm_on_load_hides_the_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    LLM(num_blocks=16, use_tqdm_on_load=False, swap_space=4, trust_remote_code=True).close()
    assert capsys.readouterr().err == ""


# ---- sampling ----


def test_sampling_fields_do_what_the_page_says() -> None:
    check_table("SamplingParams", SAMPLING_RULES)
    for line in section("SamplingParams"):
        for name in line.names:
            if line.outcome == SAME:
                value = FIELD_VALUES.get(name, "something")
                assert getattr(SamplingParams(**{name: value}), name) != getattr(SamplingParams(), name)
                continue
            for value in harmless_values(rule_of(SAMPLING_RULES, name)):
                assert SamplingParams(**{name: value}) == SamplingParams(), (name, value)
            if line.outcome == ABSENT:
                message = f"not supported: {rule_of(SAMPLING_RULES, name).reason}"
                wrong: dict[str, Any] = {name: "something"}
                assert_raises(message, ParameterError, lambda wrong=wrong: SamplingParams(**wrong))
    same = {name for line in section("SamplingParams") if line.outcome == SAME for name in line.names}
    assert same == {item.name for item in fields(SamplingParams)} - {"prediction"}


def test_request_keeps_its_own_params(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=2)
    prepared = llm._frontend.prepare("r", TEXT, params)
    params.max_tokens = 9
    assert prepared.answers[0].request.params.max_tokens == 2


# ---- methods ----


def test_methods_exist_or_name_a_replacement(llm: LLM) -> None:
    lines = section("LLM methods")
    for line in lines:
        for name in line.names:
            kind, _, method = name.rpartition(".")
            if line.outcome == SAME:
                assert callable(getattr(AsyncLLM if kind else llm, method))
            else:
                with pytest.raises(AttributeError) as caught:
                    getattr(llm, name)
                assert str(caught.value) == f"LLM has no {name}: {line.here}"
    with pytest.raises(AttributeError, match="LLM has no colour"):
        _ = llm.colour


def test_method_arguments_do_what_the_page_says(llm: LLM) -> None:
    check_table("Arguments of methods", METHOD_RULES)
    nothing: dict[str, Any] = {}
    for rule in METHOD_RULES.rows:
        for name in rule.names:
            nothing[name] = harmless_values(rule)[0]
            if rule.mapping is not IGNORED:
                extra = {name: "something"}
                assert_raises(
                    rule.reason,
                    ParameterError,
                    lambda extra=extra: llm.generate(TEXT, GREEDY, **extra),
                )
                assert_raises(
                    rule.reason,
                    ParameterError,
                    lambda extra=extra: llm.chat([USER], GREEDY, **extra),
                )
    assert llm.generate(TEXT, GREEDY, use_tqdm=False, **nothing)
    assert_raises("unknown argument colour", ParameterError, lambda: llm.generate(TEXT, GREEDY, colour=1))


def test_methods_behave_as_in_vllm(llm: LLM, output: RequestOutput) -> None:
    names = {metric.name: metric.value for metric in llm.get_metrics()}
    assert names["inflight:generation_tokens"] >= 4
    assert llm.reset_prefix_cache() is True
    assert llm.generate(TEXT, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0
    llm.sleep(level=1)
    assert llm.is_sleeping()
    llm.wake_up()
    assert llm.generate(TEXT, GREEDY, use_tqdm=False)[0].outputs[0].text == output.outputs[0].text
    assert_raises("it must be 1", ParameterError, lambda: llm.sleep(2))
    assert_raises("everything wakes up at once", ParameterError, lambda: llm.wake_up(["weights"]))
    (beams,) = llm.beam_search([TEXT], BeamSearchParams(beam_width=2, max_tokens=3))
    assert len(beams.sequences) == 2
    assert all(sequence.text and sequence.text.startswith(TEXT) for sequence in beams.sequences)
    assert beams.sequences[0].cum_logprob >= beams.sequences[1].cum_logprob


def test_tokenizer_has_the_methods_of_transformers(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode(TEXT)
    assert tokenizer(TEXT).input_ids == tokenizer(TEXT)["input_ids"] == ids
    assert tokenizer([TEXT, "A"])["attention_mask"][0] == [1] * len(ids)
    assert tokenizer.decode(ids) == tokenizer.batch_decode([ids])[0] == TEXT
    assert tokenizer.decode(ids[0]) == tokenizer.decode(ids[:1])
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert tokenizer.convert_tokens_to_ids(tokens) == ids
    assert tokenizer.convert_tokens_to_ids(tokenizer.convert_ids_to_tokens(ids[0])) == ids[0]
    assert tokenizer.convert_tokens_to_string(tokens) == TEXT
    assert tokenizer.get_vocab()[tokens[0]] == ids[0]
    assert tokenizer.eos_token_id in tokenizer.all_special_ids
    assert tokenizer.eos_token in tokenizer.all_special_tokens
    (answer,) = llm.chat([USER], GREEDY, use_tqdm=False)
    assert tokenizer.apply_chat_template([USER], add_generation_prompt=True) == answer.prompt_token_ids
    assert tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True) == answer.prompt
    two = tokenizer.apply_chat_template([[USER], [USER]], add_generation_prompt=True)
    assert two == [answer.prompt_token_ids] * 2
    assert_raises(
        "with the checkpoint",
        ParameterError,
        lambda: tokenizer.apply_chat_template([USER], chat_template="x"),
    )


# ---- outputs ----


def test_outputs_have_the_attributes_on_the_page(output: RequestOutput) -> None:
    answer = output.outputs[0]
    vector = np.ones(3, np.float32)
    logprobs = answer.logprobs
    assert logprobs is not None
    outputs: dict[str, Any] = {
        "RequestOutput": output,
        "CompletionOutput": answer,
        "RequestMetrics": output.metrics,
        "Logprob": next(iter(logprobs[0].values())),
        "EmbeddingOutput": EmbeddingOutput(vector),
        "ClassificationOutput": ClassificationOutput(vector, ("a", "b", "c"), "softmax"),
        "ScoringOutput": ScoreOutput(0.5, "sigmoid"),
    }
    assert isinstance(outputs["Logprob"], Logprob)
    for line in section("Outputs"):
        for name in line.names:
            kind, _, attribute = name.partition(".")
            value = getattr(outputs[kind], line.code[0] if line.outcome == OTHER_NAME else attribute)
            assert (not value) if line.outcome == ACCEPTED else (value is not None or attribute in NONE)
    assert answer.finished
    assert answer.finished() is True


NONE = {"prompt_logprobs", "stop_reason"}  # None in this answer


# ---- asyncio ----


async def test_async_llm_has_vllm_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    assert inflight.AsyncLLMEngine is AsyncLLM
    args = inflight.EngineArgs(num_blocks=64, disable_log_stats=True, speculative_config=None)
    assert isinstance(args, AsyncEngineArgs)
    engine = AsyncLLM.from_engine_args(args)
    outputs = [output async for output in engine.generate(TEXT, GREEDY, "r1", lora_request=None)]
    assert outputs[-1].finished
    assert await engine.abort("r1") == 0
    tokenizer = await engine.get_tokenizer()
    assert tokenizer.decode(outputs[-1].prompt_token_ids) == TEXT
    await engine.check_health()
    with monkeypatch.context() as patch:
        stalled = Health(False, 61.0, "no step for 61 seconds", "stalled")
        patch.setattr(engine._client, "health", lambda: asyncio.sleep(0, stalled))
        with pytest.raises(EngineDeadError, match="no step for 61 seconds"):
            await engine.check_health()
    await engine.reset_prefix_cache()
    await engine.sleep()
    assert await engine.is_sleeping()
    await engine.wake_up()
    engine.shutdown()

    async def has_ended() -> bool:
        return (await engine.health()).error is not None

    await until(has_ended, "the engine's end")
