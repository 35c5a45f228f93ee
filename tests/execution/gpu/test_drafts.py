"""Drafts in the GPU runner, in Triton's interpreter: the tokens and log-probabilities are those of the CPU without."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from inflight import LLM, SamplingParams, StructuredOutputs
from inflight.constraints.compiler import GrammarCompiler
from inflight.execution import platforms
from inflight.layers.attention.triton import rope_write
from inflight.loading import load
from inflight.outputs import RequestOutput
from inflight.request import Request
from inflight.scheduling.drafts import AdaptiveSpeculation
from inflight.scheduling.model_drafts import ModelDrafter
from tests.e2e.test_speculation import Oracle
from tests.execution.gpu.interpreted import InterpretedPlatform
from tests.scheduling.guessing import Eager, EagerModel
from tests.support.checkpoints import write_checkpoint, write_tokenizer
from tests.support.predictors import write_eagle, write_with_predictor

# Padding is computed from whatever was in memory, as are samples behind refused drafts. The results are dropped.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning"),
]

PROMPTS = [[*range(40, 65)], [9, 8], [*range(20, 33)], [*range(40, 43)], [7, 7, 7]]
PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "logprobs": 2},
    {"temperature": 1.0, "top_p": 0.9, "seed": 1},
    {
        "temperature": 0,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "logprobs": 0,
    },
    {"temperature": 0, "logit_bias": {3: 2.0}, "min_tokens": 6, "stop_token_ids": [*range(100)]},
    {"temperature": 0.7, "top_k": 5, "seed": 2, "n": 2},
)


def answer(
    folder: Path, oracle: Oracle | None = None, **options: Any
) -> tuple[list[RequestOutput], int, int]:
    sizes = {"max_num_seqs": 6, "max_num_batched_tokens": 24, "block_size": 8, "num_blocks": 200}
    params = [SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False, **fields) for fields in PARAMS]
    speculative = None if oracle is None else {"method": "suffix"}
    with LLM(
        folder,
        skip_tokenizer_init=True,
        show_progress=False,
        speculative_config=speculative,
        **sizes,
        **options,
    ) as llm:
        if oracle is not None:
            llm._engine.core.scheduler.speculation = Eager([oracle], 3)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        # A second turn continues the first, from what the first has left in the prefix cache.
        turns = [
            [*prompt, *output.outputs[0].token_ids, 3]
            for prompt, output in zip(PROMPTS, outputs, strict=True)
        ]
        outputs += llm.generate(turns, params, use_tqdm=False)
        stats = llm.stats()
        assert stats.num_prefix_hits > 0
        assert stats.kv.num_used == 0
    return outputs, stats.num_draft_tokens, stats.num_accepted_tokens


LAYERS: dict[str, dict[str, Any]] = {
    "qwen3": {"num_hidden_layers": 1},
    "qwen3.5": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
}


@pytest.mark.parametrize("family", LAYERS)
def test_drafts_change_no_token(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(tmp_path, family, **LAYERS[family])
    expected, _, _ = answer(folder, device="cpu")
    oracle = Oracle(random.Random(0), 0.7)
    oracle.learn(expected)
    monkeypatch.setattr(platforms, "platform", lambda _: InterpretedPlatform())
    monkeypatch.setattr(rope_write, "FEW_TOKENS", rope_write.HeadTile(tokens=32, heads=8, num_warps=4))
    outputs, num_drafted, num_accepted = answer(folder, oracle, dtype="float32")
    check_same(outputs, expected)
    assert 0 < num_accepted < num_drafted


def check_same(outputs: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    for output, whole in zip(outputs, expected, strict=True):
        for ours, theirs in zip(output.outputs, whole.outputs, strict=True):
            assert ours.token_ids == theirs.token_ids
            assert ours.finish_reason == theirs.finish_reason
            if theirs.logprobs is not None:
                assert ours.logprobs is not None
                assert [[*position] for position in ours.logprobs] == [
                    [*position] for position in theirs.logprobs
                ]


class Recorder(ModelDrafter):
    """Remembers what the model guessed, by the tokens that it follows."""

    def __init__(self) -> None:
        self.guesses: dict[tuple[int, ...], list[int]] = {}

    def receive(self, request: Request, token_ids: list[int]) -> None:
        super().receive(request, token_ids)
        self.guesses[tuple(request.token_ids)] = token_ids


def guesses(folder: Path, speculation: dict[str, Any], **options: Any) -> tuple[list[list[int]], Recorder]:
    sizes: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 24,
        "block_size": 8,
        "num_blocks": 200,
    }
    params = [
        SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False, **PARAMS[index])
        for index in (0, 1, 3)  # on GPUs, penalties do not count guesses
    ]
    options |= {"skip_tokenizer_init": True, "show_progress": False, "speculative_config": speculation}
    with LLM(folder, **sizes, **options) as llm:
        recorder = Recorder()
        read_ahead = llm._engine.core.scheduler.speculation.read_ahead
        llm._engine.core.scheduler.speculation = EagerModel(3, recorder)
        llm._engine.core.scheduler.speculation.read_ahead = read_ahead
        outputs = llm.generate(PROMPTS[:3], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs], recorder


@pytest.mark.parametrize(
    ("family", "method"),
    [("qwen3.5", "mtp"), ("glm4-moe", "mtp"), ("qwen3", "eagle3"), ("qwen3", "draft_model")],
)
def test_model_guesses_as_on_a_cpu(
    family: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, layers = tmp_path / "model", LAYERS.get(family, {})
    speculation: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    if method == "mtp":
        write_with_predictor(folder, family, **layers)
    else:
        write_checkpoint(folder, family, **layers | {"num_hidden_layers": 3})
        speculation["model"] = str(tmp_path / "draft")
    if method == "eagle3":
        write_eagle(tmp_path / "draft", eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    elif method == "draft_model":
        write_checkpoint(tmp_path / "draft", "llama", num_hidden_layers=2)
    expected, on_cpu = guesses(folder, speculation, device="cpu")
    monkeypatch.setattr(platforms, "platform", lambda _: InterpretedPlatform())
    monkeypatch.setattr(rope_write, "FEW_TOKENS", rope_write.HeadTile(tokens=32, heads=8, num_warps=4))
    tokens, on_gpu = guesses(folder, speculation, dtype="float32")
    assert tokens == expected
    shared = on_cpu.guesses.keys() & on_gpu.guesses.keys()
    assert len(shared) > 10
    assert {known: on_gpu.guesses[known] for known in shared} == {
        known: on_cpu.guesses[known] for known in shared
    }


LETTERS = range(68, 73)  # the tokens of a to e


def constrained(regex: str, **fields: Any) -> SamplingParams:
    return SamplingParams(
        **{"max_tokens": 16, "temperature": 0} | fields, structured_outputs=StructuredOutputs(regex=regex)
    )


CONSTRAINED = (
    constrained("(ab|cd)*e{3,9}[a-z ]*", logprobs=1),
    constrained("the quick (brown fox|cat)", temperature=1.0, seed=3),  # ends inside a draft
    constrained("[ab]{2,4}", ignore_eos=True, max_tokens=8),  # goes on behind its end
    constrained("[a-d]{16}", allowed_token_ids=[*range(4, 200)], logprobs=2),
    constrained("[a-c]{16}", repetition_penalty=1.3, frequency_penalty=0.5, logprobs=0),
    SamplingParams(max_tokens=8, temperature=0, ignore_eos=True),
)


@pytest.mark.parametrize("native", [False, True])
def test_drafts_of_constrained_requests_change_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    folder = write_tokenizer(write_checkpoint(tmp_path, "qwen3", num_hidden_layers=1))
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "block_size": 8, "num_blocks": 100}
    options: dict[str, Any] = {"show_progress": False, **sizes}
    prompts = [*PROMPTS, [5, 6]]
    with LLM(folder, device="cpu", **options) as llm:
        expected = llm.generate(prompts, CONSTRAINED, use_tqdm=False)
    oracle = Oracle(random.Random(0), 0.6, lies=LETTERS)
    oracle.learn(expected)
    drafts: Counter[str] = Counter()  # of constrained requests that went on

    def count(_: Eager, request: Request, num_drafted: int, num_accepted: int) -> None:
        if request.params.structured_outputs is not None:
            drafts.update(accepted=num_accepted, refused=num_drafted - num_accepted)

    monkeypatch.setattr(Eager, "_learn", count)
    monkeypatch.setattr(platforms, "platform", lambda _: InterpretedPlatform())
    monkeypatch.setattr(rope_write, "FEW_TOKENS", rope_write.HeadTile(tokens=32, heads=8, num_warps=4))
    monkeypatch.setattr(load, "GrammarCompiler", lambda vocabulary, **_: GrammarCompiler(vocabulary, native))
    with LLM(folder, dtype="float32", speculative_config={"method": "grammar"}, **options) as llm:
        scheduler = llm._engine.core.scheduler
        assert isinstance(scheduler.speculation, AdaptiveSpeculation)
        scheduler.speculation = Eager([oracle], 3, scheduler.speculation._constraints)
        outputs = llm.generate(prompts, CONSTRAINED, use_tqdm=False)
        assert llm.stats().kv.num_used == 0
    check_same(outputs, expected)
    assert drafts["accepted"] > 10
    assert drafts["refused"] > 5
