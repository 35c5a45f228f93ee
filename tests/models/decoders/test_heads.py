"""The pooling head of a decoder's checkpoint, chosen by its files, and what is rejected."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from inflight.checkpoint.checkpoint import Checkpoint
from inflight.errors import ModelError, WeightsError
from inflight.models.decoders.heads import QWEN3_RERANKER, DecoderPlan, plan_decoder
from tests.models.running import load
from tests.support.checkpoints import FAMILIES
from tests.support.pooled import write_classifier

CAUSAL: dict[str, Any] = FAMILIES["qwen3"]().to_dict() | {"architectures": ["Qwen3ForCausalLM"]}
CLASSIFIER = CAUSAL | {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "relevant"}}
RERANKER = "Qwen/Qwen3-Reranker-0.6B"


def encode(text: str) -> Sequence[int]:
    return {"no": [5], "yes": [6]}[text]


def plan(model: str, config: dict[str, Any], folder: Path | None = None, **options: Any) -> DecoderPlan:
    return plan_decoder(model, Checkpoint(folder, config), **{"encode": encode} | options)


@pytest.mark.parametrize(
    ("model", "config"),
    [
        (RERANKER, CAUSAL),
        ("/models/qwen3-reranker-8b-finetuned", CAUSAL),
        ("/cache/models--Qwen--Qwen3-Reranker-4B/snapshots/8f3a", CAUSAL),
        ("here", CAUSAL | {"_name_or_path": RERANKER}),
        ("here", CAUSAL | {"classifier_from_token": ["no", "yes"]}),
        ("here", CLASSIFIER | {"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True}),
        ("here", CAUSAL | {"classifier_from_token": [5, 6]}),
    ],
)
def test_reranker_is_recognised_by_its_name_or_config(model: str, config: dict[str, Any]) -> None:
    actual = plan(model, config)
    assert actual.spec.has_lm_head
    assert actual.spec.num_labels == 0
    facts = actual.pooling
    assert facts is not None
    assert (facts.scores, facts.template, facts.scale) == ("template", QWEN3_RERANKER, "softmax")
    assert (facts.size, facts.labels, facts.splittable) == (2, ("no", "yes"), True)


@pytest.mark.parametrize("model", ["Qwen/Qwen3-0.6B", "/qwen3-reranker-tests/Qwen3-0.6B"])
def test_other_causal_models_only_generate(model: str) -> None:
    actual = plan(model, CAUSAL)
    assert actual.spec.has_lm_head
    assert actual.pooling is None
    assert actual.make_head is None


def test_classifier_scores_pairs_only_with_a_known_template() -> None:
    scores = plan("Qwen3-Reranker-0.6B-seq-cls", CLASSIFIER).pooling
    assert scores is not None
    assert (scores.scores, scores.template, scores.scale) == ("template", QWEN3_RERANKER, "sigmoid")
    for model, config in (
        ("some-classifier", CLASSIFIER),
        ("Qwen3-Reranker", CLASSIFIER | {"id2label": {"0": "bad", "1": "good"}}),
        ("Qwen3-Reranker", CLASSIFIER | {"architectures": ["Qwen2ForSequenceClassification"]}),
    ):
        facts = plan(model, config).pooling
        assert facts is not None
        assert (facts.task, facts.scores, facts.template) == ("classify", None, None)


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        (CAUSAL, {"encode": lambda _: [1, 2]}, "splits 'no' into 2 tokens, .* not the model's"),
        (CAUSAL, {"encode": lambda _: [320]}, r"token ids are \[320, 320\]: the model has 320"),
        (CAUSAL, {"encode": None}, "needs its tokenizer"),
        (CAUSAL | {"classifier_from_token": ["Yes"]}, {}, r"is \['Yes'\]: it must be \['no', 'yes'\]"),
        (CAUSAL | {"classifier_from_token": [True, 1]}, {}, "classifier_from_token in config.json is"),
        (
            CAUSAL | {"architectures": ["Qwen2ForCausalLM"], "classifier_from_token": ["no", "yes"]},
            {},
            "architecture is Qwen2ForCausalLM: a reranker's template",
        ),
        (CAUSAL | {"architectures": ["Qwen3Model"]}, {}, "cannot serve Qwen3Model: it has no head"),
        (CAUSAL | {"is_causal": False}, {}, "is_causal in config.json is False"),
    ],
)
def test_unknown_checkpoints_are_rejected_with_the_reason(
    config: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        plan(RERANKER, config, **options)


@pytest.mark.parametrize(
    ("pooling", "words"),
    [
        (
            {"pooling_mode_mean_tokens": True, "word_embedding_dimension": 64},
            "by mean: only lasttoken is supported",
        ),
        (
            {"pooling_mode": ["lasttoken", "cls"], "word_embedding_dimension": 64},
            "by lasttoken and cls: only lasttoken is supported",
        ),
        ({"pooling_mode": "lasttoken", "word_embedding_dimension": 65}, "pools 65 features, .* is 64"),
    ],
)
def test_other_poolings_are_rejected(pooling: dict[str, Any], words: str, tmp_path: Path) -> None:
    kinds = {"": "Transformer", "1_Pooling": "Pooling"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    with pytest.raises(ModelError, match=words):
        plan("embedder", CAUSAL, tmp_path)


def test_classifier_of_another_size_is_rejected_before_memory_is_allocated(tmp_path: Path) -> None:
    write_classifier(tmp_path, "llama", 3)
    path = tmp_path / "config.json"
    config = {name: value for name, value in json.loads(path.read_text()).items() if name != "id2label"}
    path.write_text(json.dumps(config | {"num_labels": 60_000}))
    with pytest.raises(
        WeightsError, match=r"score\.weight .* has shape \[3, 64\]: .* requires \[60000, 64\]"
    ):
        load(tmp_path)
