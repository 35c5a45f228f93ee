"""Drafts change no token on a GPU, whoever made them, and the model's own guesses are those that it makes on a CPU."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from inflight import LLM, SamplingParams, StructuredOutputs
from inflight.outputs import RequestOutput
from inflight.scheduling.drafts import AdaptiveSpeculation
from tests.e2e.test_speculation import Oracle
from tests.execution.gpu.test_drafts import Recorder
from tests.scheduling.guessing import Eager, EagerModel
from tests.support.checkpoints import write_checkpoint, write_tokenizer
from tests.support.predictors import write_eagle, write_with_predictor

KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0.8, "top_p": 0.9, "seed": 1},
    {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"temperature": 0, "min_tokens": 20, "stop_token_ids": [*range(100)]},
)
SIZES: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 128, "num_blocks": 1000}


def params_of(prompts: Sequence[Any], **fields: Any) -> list[SamplingParams]:
    shared = {"max_tokens": 40, "ignore_eos": True, "detokenize": False} | fields
    return [SamplingParams(**shared | KINDS[index % len(KINDS)]) for index in range(len(prompts))]


def token_ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def agree(actual: list[Any], expected: list[Any]) -> bool:
    """A logarithm that rounds differently may change one answer."""
    num_same = sum(bool(a == b) for a, b in zip(actual, expected, strict=True))
    return num_same >= len(expected) - 1


@pytest.mark.parametrize("odds", [1.0, 0.6])
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt-oss", "qwen3-moe", "qwen3.5", "qwen3-next"])
def test_drafts_change_no_token(
    family: str, odds: float, checkpoint: Callable[..., Path], prompts: list[list[int]]
) -> None:
    options = {**SIZES, "skip_tokenizer_init": True, "show_progress": False, "dtype": "float32"}
    params = params_of(prompts)
    with LLM(checkpoint(family), device="cpu", **options) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
    oracle = Oracle(random.Random(0), odds)
    oracle.learn(expected)
    with LLM(checkpoint(family), speculative_config={"method": "suffix"}, **options) as llm:
        llm._engine.core.scheduler.speculation = Eager([oracle], 3)
        for _ in range(2):  # with a cold cache, then with a warm one
            assert agree(token_ids(llm.generate(prompts, params, use_tqdm=False)), token_ids(expected))
        stats = llm.stats()
    assert 0 < stats.num_accepted_tokens <= stats.num_draft_tokens
    assert (stats.num_accepted_tokens < stats.num_draft_tokens) == (odds < 1)


@pytest.mark.parametrize(
    ("family", "method"),
    [("qwen3.5", "mtp"), ("glm4-moe", "mtp"), ("qwen3", "eagle3"), ("qwen3", "draft_model")],
)
def test_model_guesses_as_on_a_cpu(
    family: str, method: str, tmp_path: Path, prompts: list[list[int]]
) -> None:
    folder, speculation = tmp_path / "model", {"method": method, "num_speculative_tokens": 3}
    if method == "mtp":
        write_with_predictor(folder, family)
    else:
        write_checkpoint(folder, family, num_hidden_layers=3)
        speculation["model"] = str(tmp_path / "draft")
    if method == "eagle3":
        write_eagle(tmp_path / "draft", eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    elif method == "draft_model":
        write_checkpoint(tmp_path / "draft", "llama", num_hidden_layers=2)
    options = {**SIZES, "skip_tokenizer_init": True, "show_progress": False, "dtype": "float32"}
    params = [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)] * len(prompts)
    made: list[tuple[list[list[int]], Recorder]] = []
    for device in ("cpu", "cuda"):
        with LLM(folder, device=device, speculative_config=speculation, **options) as llm:
            recorder, scheduler = Recorder(), llm._engine.core.scheduler
            read_ahead = scheduler.speculation.read_ahead
            scheduler.speculation = EagerModel(3, recorder)
            scheduler.speculation.read_ahead = read_ahead
            made.append((token_ids(llm.generate(prompts, params, use_tqdm=False)), recorder))
    (expected, on_cpu), (actual, on_gpu) = made
    assert agree(actual, expected)
    shared = on_cpu.guesses.keys() & on_gpu.guesses.keys()
    same = sum(on_cpu.guesses[known] == on_gpu.guesses[known] for known in shared)
    assert same > 100
    assert same >= 0.98 * len(shared)


def test_drafts_of_constrained_requests_change_no_token(tmp_path: Path) -> None:
    folder = write_tokenizer(write_checkpoint(tmp_path, "qwen3"))
    constraints = ["(ab|cd)*e{3,9}[a-z ]*", "the quick (brown fox|cat)", "[a-c]{16}", None]
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=16,
            structured_outputs=None if regex is None else StructuredOutputs(regex=regex),
        )
        for regex in constraints
    ]
    prompts, options = (
        [[40, 41], [7], [9, 8, 7], [5, 6]],
        {**SIZES, "show_progress": False, "dtype": "float32"},
    )
    with LLM(folder, device="cpu", **options) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
    oracle = Oracle(random.Random(0), 0.7, lies=range(68, 73))
    oracle.learn(expected)
    with LLM(folder, speculative_config={"method": "grammar"}, **options) as llm:
        scheduler = llm._engine.core.scheduler
        speculation = scheduler.speculation
        assert isinstance(speculation, AdaptiveSpeculation)
        scheduler.speculation = Eager([oracle], 3, speculation._constraints)
        assert token_ids(llm.generate(prompts, params, use_tqdm=False)) == token_ids(expected)
        assert llm.stats().num_accepted_tokens > 0
