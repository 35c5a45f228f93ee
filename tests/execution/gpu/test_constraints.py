"""Constrained rows on the GPU runner with two steps in flight give the tokens of the CPU runner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inflight import LLM, SamplingParams, StructuredOutputs
from inflight.execution import platforms
from inflight.layers.attention.triton import rope_write
from tests.e2e.policies import GREEDY_CONTINUOUS
from tests.execution.gpu.interpreted import InterpretedPlatform
from tests.execution.gpu.test_runner import SHAPE, pytestmark  # noqa: F401
from tests.support.checkpoints import VOCAB_SIZE, write_checkpoint, write_tokenizer

PROMPTS = ["The dog", "A batch of", "When the sun is"]
PLAIN = SamplingParams(temperature=0.8, seed=2, max_tokens=4, ignore_eos=True)


def constrained_params(**constraint: Any) -> SamplingParams:
    outputs = StructuredOutputs(**constraint)
    return SamplingParams(temperature=0.8, seed=2, max_tokens=5, logprobs=1, structured_outputs=outputs)


MIXED = [constrained_params(regex="[ab]{2}-\\d"), PLAIN, constrained_params(choice=["yes", "no"])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("constrained")
    write_checkpoint(where, "qwen3", **SHAPE | {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 1})
    return write_tokenizer(where)


def answers(folder: Path, **options: Any) -> list[Any]:
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "block_size": 4, "num_blocks": 60}
    with LLM(folder, show_progress=False, **sizes | options) as llm:
        outputs = llm.generate(PROMPTS, MIXED, use_tqdm=False)
        assert (llm.stats().num_preemptions > 0) == (options.get("num_blocks") is not None)
    return [(only.token_ids, only.finish_reason, only.text) for (only,) in (o.outputs for o in outputs)]


def test_tokens_match_the_cpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answers(folder, device="cpu")
    assert [text for _, _, text in expected][2] in ("yes", "no")
    place = InterpretedPlatform()
    monkeypatch.setattr(platforms, "platform", lambda _: place)
    monkeypatch.setattr(rope_write, "FEW_TOKENS", rope_write.HeadTile(tokens=32, heads=8, num_warps=4))
    # With so little memory, some are preempted while their next token is in flight.
    assert answers(folder, num_blocks=5, policy=GREEDY_CONTINUOUS) == expected
