"""The use of experts, from a model's layers to step records, statistics and Prometheus."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from inflight import LLM, SamplingParams
from inflight.engine.stats import EngineStats, ExpertStats
from inflight.events import KVUsage
from inflight.server.observability.metrics import Metrics
from tests.support.checkpoints import write_checkpoint

PARAMS = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, detokenize=False)
PROMPTS = [[1, 2, 3, 4], [5, 6, 7]]
NUM_TOKENS = sum(map(len, PROMPTS)) + len(PROMPTS) * (5 - 1)  # the last token of each is not computed
TOP_K, EXPERTS = 3, 8


@pytest.mark.parametrize("ranks", [{}, {"tensor_parallel_size": 2, "enable_expert_parallel": True}])
def test_every_token_is_counted_in_every_layer(ranks: dict[str, Any], tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "qwen3-moe")
    with LLM(folder, show_progress=False, skip_tokenizer_init=True, **ranks) as llm:
        assert llm.stats().experts is None, "warm-up steps do not count"
        with llm.recorded() as steps:
            llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        experts = llm.stats().experts
    readings = [step.experts.tokens for step in steps if step.experts is not None]
    layers = [[sum(counts) for counts in zip(*layer, strict=True)] for layer in zip(*readings, strict=True)]
    # The last layer computes only the tokens that are sampled from.
    num_sampled = len(PROMPTS) * 5
    assert [sum(layer) for layer in layers[:-1]] == [NUM_TOKENS * TOP_K] * (len(layers) - 1)
    assert sum(layers[-1]) == num_sampled * TOP_K
    assert experts is not None
    assert sum(experts.tokens) == sum(chain(*layers))
    assert len(experts.tokens) == EXPERTS
    assert 1 <= experts.imbalance <= experts.worst_imbalance <= EXPERTS


def test_metrics_show_the_use_of_experts() -> None:
    kv = KVUsage(num_blocks=4, num_empty=1, num_cached=1, num_used=2, num_tokens=20, block_size=16)
    stats = EngineStats(1, 1, 1, 1, 1, 1, 1, 1, 1, kv, experts=ExpertStats((30, 10), 1.5, 1.75))
    samples = [
        sample
        for family in Metrics("m").families(stats, 0, [])
        for sample in family.samples
        if sample.name.startswith("inflight:expert_")
    ]
    tokens = {s.labels["expert"]: s.value for s in samples if s.name == "inflight:expert_tokens_total"}
    imbalances = {s.labels["layers"]: s.value for s in samples if s.name == "inflight:expert_imbalance"}
    assert tokens == {"0": 30, "1": 10}
    assert imbalances == {"average": 1.5, "worst": 1.75}
