"""What the front must know of a model's head: from config.json and the files of sentence-transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from inflight.errors import ModelError, shown
from inflight.models.fields import Fields
from inflight.models.sentence_files import PROMPTS, SentenceFiles, torch_class
from inflight.scoring import PoolingFacts, Scale

MAX_LABELS = 1 << 16


def embedding_facts(
    files: SentenceFiles, config: Mapping[str, Any], size: int, splittable: bool
) -> PoolingFacts:
    """Of an embedder. Scores are angles where the checkpoint compares embeddings so."""
    by_angle = files.similarity == "cosine" or (files.similarity == "dot" and files.normalize)
    return PoolingFacts(
        task="embed",
        size=size,
        splittable=splittable,
        normalize=files.normalize,
        dimensions=_dimensions(Fields(config), size),
        prompts=files.prompts,
        default_prompt=files.default_prompt,
        lowercase=files.lowercase,
        scale="cosine",
        scores="cosine" if by_angle else None,
    )


def classifier_facts(
    config: Mapping[str, Any],
    files: SentenceFiles | None,
    splittable: bool,
    scores: Literal["pair", "template"] | None = "pair",
) -> PoolingFacts:
    """Of a model that ends in labels. `scores`: how a pair becomes one score, where there is one label."""
    labels = read_labels(config)
    return PoolingFacts(
        task="classify",
        size=len(labels),
        splittable=splittable,
        prompts={} if files is None else files.prompts,
        default_prompt=None if files is None else files.default_prompt,
        lowercase=files is not None and files.lowercase,
        labels=labels,
        scale=_scale(Fields(config), files, len(labels)),
        scores=scores if len(labels) == 1 else None,
    )


def read_labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """A classifier's labels in order. Without any in the config there are two, as transformers has it."""
    fields = Fields(config)
    if "id2label" not in fields:
        count = fields.integer("num_labels", 2)
        if count > MAX_LABELS:
            raise fields.error("num_labels", f"at most {MAX_LABELS}")
        return tuple(f"LABEL_{index}" for index in range(count))
    names = fields.part("id2label").values
    labels = tuple(names.get(str(index)) for index in range(len(names)))
    if not 1 <= len(labels) <= MAX_LABELS or not all(isinstance(label, str) for label in labels):
        raise ModelError(
            f"id2label in config.json is {shown(names)}: it must name each of 1 to {MAX_LABELS} labels, from 0"
        )
    return labels  # type: ignore[return-value]  # all are strings


def _scale(config: Fields, files: SentenceFiles | None, num_labels: int) -> Scale:
    """What the checkpoint's makers do with its logits; else what sentence-transformers and transformers do."""
    stated: tuple[Fields, str] | None = None
    if files is not None and files.activation is not None:
        stated = Fields({"activation_fn": files.activation}, PROMPTS), "activation_fn"
    elif "sentence_transformers" in config and "activation_fn" in config.part("sentence_transformers"):
        stated = config.part("sentence_transformers"), "activation_fn"
    elif "sbert_ce_default_activation_function" in config:
        stated = config, "sbert_ce_default_activation_function"
    if stated is not None:
        kind = torch_class(*stated, ("Identity", "Sigmoid", "Softmax"))
        scales: dict[str, Scale] = {"Identity": "logit", "Sigmoid": "sigmoid", "Softmax": "softmax"}
        return scales[kind]
    several = config.values.get("problem_type") == "multi_label_classification"
    return "sigmoid" if num_labels == 1 or several else "softmax"


def _dimensions(config: Fields, size: int) -> tuple[int, ...] | None:
    """To which an embedding may be cut, where the config tells."""
    given = config.values.get("matryoshka_dimensions")
    if given is None:
        return None
    whole = isinstance(given, list) and all(type(item) is int and 0 < item <= size for item in given)
    if not whole or not given:
        raise config.error("matryoshka_dimensions", f"a list of sizes up to {size}")
    return tuple(sorted(set(given)))
