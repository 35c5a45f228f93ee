"""Requests that cannot be served are refused with the right error and a helpful message, and leave no trace."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inflight import LLM, SamplingParams
from inflight.errors import (
    ConfigError,
    InflightError,
    KVBudgetError,
    ModelError,
    ParameterError,
    PromptError,
    QueueFullError,
    UnknownArchitectureError,
    WeightsError,
)
from tests.e2e.conftest import Folder
from tests.support.checkpoints import write_tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPT = [5, 6, 7, 8]


@pytest.fixture
def copy(folder: Folder, tmp_path: Path) -> Path:
    """A checkpoint to damage."""
    shutil.copytree(folder(), tmp_path / "copy")
    return tmp_path / "copy"


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def refused(error: type[InflightError], *words: str, **options: Any) -> None:
    """LLM(**options) raises exactly `error`, in one line that has all the words."""
    with pytest.raises(error) as caught:
        LLM(**options)
    assert type(caught.value) is error
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


# ---- the checkpoint ----


def test_unknown_architecture_is_rejected(copy: Path) -> None:
    change_config(copy, architectures=["MambaForCausalLM"], model_type="mamba")
    families = "supported families are Llama, Mistral, Qwen2, Qwen3, Phi3, Gemma2, Olmo2, Olmo3"
    encoders = "and the encoders Bert, Roberta, XLMRoberta, DistilBert, ModernBert"
    refused(UnknownArchitectureError, "cannot serve MambaForCausalLM", families, encoders, model=copy)


def test_missing_folder_is_rejected(tmp_path: Path) -> None:
    refused(ModelError, "nowhere", "does not exist", model=tmp_path / "nowhere")


def test_missing_config_is_rejected(copy: Path) -> None:
    (copy / "config.json").unlink()
    refused(ModelError, "config.json", model=copy)


def test_missing_tokenizer_is_rejected(copy: Path) -> None:
    (copy / "tokenizer.json").unlink()
    refused(ModelError, "tokenizer.json", "skip_tokenizer_init", model=copy)
    assert LLM(copy, skip_tokenizer_init=True).generate(PROMPT, GREEDY)[0].outputs[0].text == ""


def test_missing_weights_are_rejected(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    refused(WeightsError, "model.safetensors", model=copy)


@pytest.mark.parametrize("size", [0, 5, 1000, -1])
def test_truncated_weights_are_rejected(size: int, copy: Path) -> None:
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    refused(WeightsError, "model.safetensors", "truncated or damaged", model=copy)


def test_weights_that_contradict_the_config_are_rejected(copy: Path) -> None:
    change_config(copy, num_hidden_layers=4)
    refused(WeightsError, "num_hidden_layers is 4", "3 layers", model=copy)
    change_config(copy, num_hidden_layers=3, intermediate_size=128)
    refused(WeightsError, "[96, 64]", "[128, 64]", model=copy)


# ---- options ----


def test_unknown_option_is_rejected(folder: Folder) -> None:
    refused(ConfigError, "max_tokens", "max_model_len", model=folder(), max_tokens=5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"policy": "fastest"}, ("fastest", "continuous", "fair")),
        ({"policy": "no.such.module:Policy"}, ("no.such.module:Policy",)),
        ({"policy": dict}, ("dict", "Policy")),
        ({"policy": 5}, ("policy 5",)),
        ({"dtype": "int8"}, ("int8", "float32")),
        ({"load_format": "pickle"}, ("pickle", "safetensors")),
        ({"device": "abacus"}, ("abacus", "cpu")),
        ({"max_model_len": 513}, ("513", "512")),
        ({"max_model_len": 1}, ("max_model_len is 1", "at least 2")),
        ({"block_size": 0}, ("block_size is 0", "1 to 1024")),
        ({"max_num_seqs": 0}, ("max_num_seqs is 0",)),
        ({"pipeline_depth": 3}, ("pipeline_depth is 3", "None, 1, 2")),
        ({"gpu_memory_utilization": 1.5}, ("1.5",)),
    ],
)
def test_options_out_of_range_are_rejected(
    options: dict[str, Any], words: tuple[str, ...], folder: Folder
) -> None:
    refused(ConfigError, *words, model=folder(), **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_cache_memory": 100}, ("100 bytes", "one block of 16 tokens")),
        ({"num_blocks": 1, "block_size": 1}, ("1 token", "at least 2")),
        ({"num_blocks": 2, "max_model_len": 40}, ("max_model_len is 40", "32 tokens", "2 blocks of 16")),
        ({"max_kv_tokens": 20, "max_model_len": 40}, ("max_model_len is 40", "20 tokens")),
        ({"num_blocks": 10**12}, ("num_blocks is 1000000000000", "GiB are free")),
        (
            {"kv_cache_memory": 10**16},
            ("kv_cache_memory is 10000000000000000", "9,313,225.75 GiB", "GiB are free"),
        ),
    ],
)
def test_too_small_kv_budgets_are_rejected(
    options: dict[str, Any], words: tuple[str, ...], folder: Folder
) -> None:
    refused(KVBudgetError, *words, model=folder(), **options)


def test_small_kv_budget_shortens_the_context(folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM(folder(), num_blocks=2)
    assert llm.max_model_len == 32
    assert "32" in caplog.text
    with pytest.raises(PromptError, match="32 tokens: at most 31"):
        llm.generate([5] * 32, GREEDY)


# ---- requests ----


@pytest.fixture(scope="module")
def llm(folder: Folder) -> LLM:
    return LLM(folder(), max_model_len=64)


@pytest.fixture(autouse=True)
def goes_on(request: pytest.FixtureRequest) -> Any:
    """After every refusal the same engine gives the same tokens, and no request is left in it."""
    if "llm" not in request.fixturenames:
        yield
        return
    llm: LLM = request.getfixturevalue("llm")
    before = llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids
    yield
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv.num_used) == (0, 0, 0)
    assert llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids == before


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "empty"),
        ([[]], "empty"),
        ({"prompt_token_ids": []}, "empty"),
        ([5] * 64, "64 tokens: at most 63"),
        ("word " * 500, "at most 63"),
        ([5, 320], "token id 320: ids must be from 0 to 319"),
        ([5, -1], "token id -1: ids must be from 0 to 319"),
        ([5, 2**62], "from 0 to 319"),
        ([5, 2**70], str(2**70)),
        pytest.param([5, 10**5000], "a huge int", id="huge"),
        ([[5, 1.5]], "token id 1.5: ids must be integers"),
        ([[5, "6"]], "token id '6': ids must be integers"),
        ([[5, None]], "token id None"),
        ([5, "text"], "int"),
        (None, "NoneType"),
        (7, "of type int"),
        (b"bytes", "of type bytes"),
        ([b"12345678"], "of type bytes"),
        ([None], "of type NoneType"),
        ({}, "give either 'prompt' or 'prompt_token_ids'"),
        ({"prompt": "a", "prompt_token_ids": [5]}, "give either"),
        ({"text": "a"}, "['text']"),
        ({"prompt": [5, 6]}, "prompt is of type list: it must be text"),
        ({"prompt_token_ids": "abc"}, "prompt_token_ids is of type str"),
        ({"prompt_token_ids": {1: 2}}, "prompt_token_ids is of type dict"),
        pytest.param("a lone \ud800", "U+D800", id="surrogate"),
    ],
)
def test_invalid_prompts_are_rejected(prompt: Any, words: str, llm: LLM) -> None:
    with pytest.raises(PromptError) as caught:
        llm.generate(prompt, GREEDY)
    assert words in str(caught.value)


def test_rejected_prompt_is_named_and_none_runs(llm: LLM) -> None:
    steps = llm.stats().num_steps
    with pytest.raises(PromptError) as caught:
        llm.generate([PROMPT, PROMPT, [999], PROMPT], GREEDY)
    assert caught.value.__notes__ == ["in prompt 2 of 4"]
    assert llm.stats().num_steps == steps


@pytest.mark.parametrize(
    "make",
    [
        lambda: SamplingParams(temperature=float("nan")),
        lambda: SamplingParams(temperature=float("inf")),
        lambda: SamplingParams(temperature=-0.1),
        lambda: SamplingParams(top_p=0),
        lambda: SamplingParams(top_p=float("nan")),
        lambda: SamplingParams(min_p=1.1),
        lambda: SamplingParams(top_k=-2),
        lambda: SamplingParams(max_tokens=0),
        lambda: SamplingParams(n=0),
        lambda: SamplingParams(n=10**6),
        lambda: SamplingParams(seed=2**65),
        lambda: SamplingParams(logprobs=101),
        lambda: SamplingParams(presence_penalty=2.5),
        lambda: SamplingParams(repetition_penalty=0),
        lambda: SamplingParams(logit_bias={5: float("nan")}),
        lambda: SamplingParams(logit_bias={5: 101}),
        lambda: SamplingParams(stop=[""]),
        lambda: SamplingParams(allowed_token_ids=[]),
        lambda: SamplingParams(max_tokens=5, min_tokens=6),
    ],
)
def test_params_out_of_range_are_rejected(make: Callable[[], SamplingParams]) -> None:
    with pytest.raises(ParameterError, match=r" is |must"):
        make()


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_token_ids_beyond_the_vocabulary_are_rejected(name: str, llm: LLM) -> None:
    value: Any = {320: 1.0} if name == "logit_bias" else [320]
    params = SamplingParams(**{name: value})
    with pytest.raises(ParameterError, match=f"{name} has the token id 320: ids must be from 0 to 319"):
        llm.generate(PROMPT, params)


@pytest.mark.parametrize("priority", [1.5, "1", None, True, float("nan"), 2**40])
def test_invalid_priorities_are_rejected(priority: Any, llm: LLM) -> None:
    with pytest.raises(ParameterError, match="priorit"):
        llm.generate([PROMPT], GREEDY, priority=[priority])


@pytest.mark.parametrize("tenant", [5, None, "x" * 300, b"x"])
def test_invalid_tenants_are_rejected(tenant: Any, llm: LLM) -> None:
    with pytest.raises(ParameterError, match="tenant"):
        llm.generate([PROMPT], GREEDY, tenant=[tenant])


@pytest.mark.parametrize("salt", [5, "x" * 300, "\udc80"])
def test_invalid_salts_are_rejected(salt: Any, llm: LLM) -> None:
    with pytest.raises(ParameterError, match="cache_salt is"):
        llm.generate({"prompt_token_ids": PROMPT, "cache_salt": salt}, GREEDY)


def test_extreme_but_legal_params_run(llm: LLM) -> None:
    extremes = [
        SamplingParams(temperature=1e-300, max_tokens=4),
        SamplingParams(temperature=1e300, max_tokens=4),
        SamplingParams(top_p=1e-300, max_tokens=4),
        SamplingParams(min_p=1.0, max_tokens=4),
        SamplingParams(top_k=10**9, max_tokens=4),
        SamplingParams(repetition_penalty=1e-300, max_tokens=4),
        SamplingParams(repetition_penalty=1e6, max_tokens=4),
        SamplingParams(logit_bias=dict.fromkeys(range(320), -100.0), max_tokens=4),
        SamplingParams(max_tokens=10**30, ignore_eos=True),
        SamplingParams(min_tokens=10**6, max_tokens=None),
        SamplingParams(seed=-(2**63), max_tokens=4),
        SamplingParams(seed=2**64 - 1, max_tokens=4),
        SamplingParams(logprobs=100, prompt_logprobs=100, max_tokens=4),
        SamplingParams(stop=["x" * 1024] * 64, max_tokens=4),
        SamplingParams(n=128, max_tokens=2),
    ]
    for output in llm.generate([PROMPT] * len(extremes), extremes):
        for answer in output.outputs:
            assert answer.finish_reason in ("length", "stop")
            assert answer.token_ids
            assert len(answer.token_ids) + len(PROMPT) <= 64


def test_full_queue_rejects_requests_and_keeps_nothing(folder: Folder) -> None:
    llm = LLM(folder(), max_queue=2, max_num_seqs=1)
    expected = llm.generate([PROMPT] * 3, GREEDY)
    with pytest.raises(
        QueueFullError, match="3 requests are waiting, and max_queue is 2, plus 1 that can run at once"
    ):
        llm.generate([PROMPT] * 4, GREEDY)
    again = llm.generate([PROMPT] * 3, GREEDY)
    assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in expected]


def test_text_with_tokens_beyond_the_vocabulary_is_rejected(copy: Path) -> None:
    """A tokenizer that knows more tokens than the model must not make a neighbour's step fail."""
    from transformers import LlamaForCausalLM

    from tests.support.checkpoints import FAMILIES

    LlamaForCausalLM(FAMILIES["llama"](vocab_size=300)).save_pretrained(copy)
    write_tokenizer(copy, 320)
    llm = LLM(copy)
    tokenizer = llm.get_tokenizer()
    word = next(text for i in range(300, 320) if tokenizer.encode(text := tokenizer.decode([i])) == [i])
    with pytest.raises(PromptError, match="from 0 to 299"):
        llm.generate(word, GREEDY)
    # What cannot be sampled need not be forbidden.
    params = SamplingParams(temperature=0, max_tokens=4, bad_words=[word], min_tokens=2)
    assert len(llm.generate(PROMPT, params)[0].outputs[0].token_ids) >= 2
