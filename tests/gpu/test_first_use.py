"""Nothing is compiled once the engine is ready: a first request of its kind is as fast as the next."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import triton

from inflight import LLM, SamplingParams

LONG = 2000


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that Triton compiles from now on, read from its cache on disk or not.

    Engines are fixtures of the module, since Triton cannot describe a kernel that takes another as a constant to a
    hook.
    """
    names: list[str] = []
    hooks = triton.knobs.runtime
    monkeypatch.setattr(hooks, "jit_post_compile_hook", lambda *, fn, **_: names.append(fn.name))
    return names


@pytest.fixture(scope="module")
def llm(checkpoint: Callable[..., Path]) -> Iterator[LLM]:
    with start(checkpoint("qwen3", max_position_embeddings=4096)) as llm:
        yield llm


@pytest.fixture(scope="module")
def hybrid_llm(checkpoint: Callable[..., Path]) -> Iterator[LLM]:
    with start(checkpoint("qwen3.5")) as llm:
        yield llm


def start(folder: Path) -> LLM:
    return LLM(folder, skip_tokenizer_init=True, show_progress=False, num_blocks=1000, max_num_seqs=64)


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(200) for _ in range(length)]


CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "top_k and min_p": {"temperature": 0.8, "top_k": 5, "min_p": 0.01},
    "penalties": {"presence_penalty": 0.5, "repetition_penalty": 1.1},
    "logit_bias": {"logit_bias": {7: 1.0}},
    "allowed tokens": {"allowed_token_ids": [1, 2, 3]},
    "logprobs": {"logprobs": 5},
    "prompt logprobs": {"prompt_logprobs": 3},
    "several answers": {"n": 3, "temperature": 1.0},
}


@pytest.mark.parametrize("case", CASES)
def test_first_request_of_each_kind_compiles_nothing(llm: LLM, compiled: list[str], case: str) -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False, **CASES[case])
    llm.generate([prompt(1, 40), prompt(2, 3)], params, use_tqdm=False)
    assert compiled == []


@pytest.mark.parametrize("num_own", [1, 2, 3, 17, 64])
def test_first_hit_of_a_long_prefix_compiles_nothing(llm: LLM, compiled: list[str], num_own: int) -> None:
    """More blocks than fit a step are written by a separate launch, whatever their number."""
    shared = prompt(3, LONG)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    llm.generate([shared], params, use_tqdm=False)
    (output,) = llm.generate([shared + prompt(10 + num_own, num_own)], params, use_tqdm=False)
    assert output.num_cached_tokens
    wave = [shared + prompt(100 + index, num_own) for index in range(8)]
    llm.generate(wave, params, use_tqdm=False)
    assert compiled == []


def test_first_snapshots_of_a_hybrid_model_compile_nothing(hybrid_llm: LLM, compiled: list[str]) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
    (first,) = hybrid_llm.generate([prompt(4, 40)], params, use_tqdm=False)
    (output,) = hybrid_llm.generate([prompt(4, 40) + first.outputs[0].token_ids], params, use_tqdm=False)
    assert output.num_cached_tokens
    assert compiled == []
