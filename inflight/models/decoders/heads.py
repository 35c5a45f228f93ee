"""Decoders that embed, classify or rerank: choose the pooling head by the checkpoint's files, and the heads themselves.

Qwen3-Reranker                the logits of "no" and "yes" after its template; it can also generate
...ForSequenceClassification  a linear layer, score.weight
modules.json with lasttoken   an embedder: the last token's hidden state, through the layers of sentence-transformers
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inflight.checkpoint.checkpoint import Checkpoint
from inflight.errors import ModelError, shown
from inflight.layers.kernels import Linear
from inflight.models.decoders.decoder import Decoder
from inflight.models.decoders.families import decoder_spec, without_lm_head
from inflight.models.decoders.spec import DecoderSpec
from inflight.models.head_config import (
    SentenceFiles,
    classifier_facts,
    embedding_facts,
    read_sentence_files,
)
from inflight.models.heads import Head, LayeredHead, head_size, load_head
from inflight.scoring import PairTemplate, PoolingFacts

# The two answer tokens, under the config.json field that vLLM uses, too.
ANSWERS = ("no", "yes")
ANSWERS_FIELD = "classifier_from_token"
RERANKERS = ("Qwen3ForCausalLM", "Qwen3ForSequenceClassification")
QWEN3_RERANKER = PairTemplate(
    prefix="<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
    instruction="Given a web search query, retrieve relevant passages that answer the query",
    body="<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
    suffix="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)

# Encodes a text without adding special tokens.
Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class DecoderPlan:
    """The decoder to load from a checkpoint, and what its pooled vectors mean."""

    spec: DecoderSpec
    pooling: PoolingFacts | None = None  # None: it only generates
    make_head: Callable[[Decoder], Head] | None = None

    def complete(self, decoder: Decoder) -> None:
        """Attach the pooling head once the decoder's weights are loaded."""
        if self.make_head is not None:
            decoder.pooling_head = self.make_head(decoder)


def plan_decoder(
    model: str, checkpoint: Checkpoint, encode: Encode | None, expert_parallel: bool = False
) -> DecoderPlan:
    """Choose what to load. `model` is the configured folder or hub id; `encode` is None without a tokenizer."""
    config = checkpoint.config
    spec = replace(decoder_spec(config), expert_parallel=expert_parallel)
    named = is_qwen3_reranker(model, config)
    if ANSWERS_FIELD in config or (named and spec.architecture == "Qwen3ForCausalLM"):
        return _reranker(config, spec, encode)
    files = None if checkpoint.folder is None else read_sentence_files(checkpoint.folder)
    if spec.num_labels:
        return _classifier(config, spec, files, named)
    if files is not None and files.pooling:
        return _embedder(checkpoint, without_lm_head(spec), files)
    if not spec.has_lm_head:
        raise ModelError(
            f"cannot serve {spec.architecture}: it has no head, and no modules.json that says how a text becomes a "
            "vector"
        )
    return DecoderPlan(spec)


def is_qwen3_reranker(model: str, config: dict[str, Any]) -> bool:
    """Return whether this is a Qwen3-Reranker. Its files look like any Qwen3, so only the hub or folder name tells."""
    path = Path(model)
    names = [path.name, *(part for part in path.parts if part.startswith("models--"))]
    names.append(str(config.get("_name_or_path", "")))
    return any(re.search(r"qwen3-reranker", name, re.IGNORECASE) for name in names)


# ---- choosing the head ----


def _reranker(config: dict[str, Any], spec: DecoderSpec, encode: Encode | None) -> DecoderPlan:
    """Plan a causal model that answers one of two words. It is loaded whole, since it can also generate."""
    if spec.architecture not in RERANKERS:
        raise ModelError(
            f"config.json has {ANSWERS_FIELD}, but the architecture is {spec.architecture}: a reranker's template is "
            f"known only for {' and '.join(RERANKERS)}"
        )
    spec = decoder_spec(config | {"architectures": ["Qwen3ForCausalLM"]})
    ids = _answer_ids(config.get(ANSWERS_FIELD, list(ANSWERS)), spec, encode)
    facts = PoolingFacts(
        "classify",
        len(ids),
        splittable=True,
        labels=ANSWERS,
        scale="softmax",
        scores="template",
        template=QWEN3_RERANKER,
    )

    def make(decoder: Decoder) -> Head:
        """Build a head from the LM head's rows of the answer tokens."""
        rows = decoder.head_rows(torch.tensor(ids, device=decoder.device))
        linear = decoder.kernels.linear(spec.hidden_size, len(ids), decoder.dtype, False)
        linear.load(rows)
        return ScoreHead(decoder, linear)

    return DecoderPlan(spec, facts, make)


def _answer_ids(answers: Any, spec: DecoderSpec, encode: Encode | None) -> list[int]:
    """Return the token ids of "no" and "yes". The config may contain the ids instead of the words."""
    if isinstance(answers, list) and len(answers) == len(ANSWERS) and all(type(i) is int for i in answers):
        ids = answers
    elif answers != list(ANSWERS):
        raise ModelError(
            f"{ANSWERS_FIELD} in config.json is {shown(answers)}: it must be {list(ANSWERS)} or their token ids"
        )
    elif encode is None:
        raise ModelError(
            "a Qwen3-Reranker needs its tokenizer to find the tokens of its answers: without one, set their ids as "
            f"{ANSWERS_FIELD} in the config"
        )
    else:
        ids = [_only(encode(word), word) for word in ANSWERS]
    if not all(0 <= token_id < spec.vocab_size for token_id in ids):
        raise ModelError(f"the answers' token ids are {ids}: the model has {spec.vocab_size} tokens")
    return ids


def _only(ids: Sequence[int], word: str) -> int:
    if len(ids) != 1:
        raise ModelError(
            f"the tokenizer splits {word!r} into {len(ids)} tokens, but a Qwen3-Reranker answers with one: this is not "
            "the model's tokenizer"
        )
    return ids[0]


def _classifier(
    config: dict[str, Any], spec: DecoderSpec, files: SentenceFiles | None, is_reranker: bool
) -> DecoderPlan:
    """Plan a classifier. Any text has labels; a pair has a score only if the model's template is known."""
    is_reranker = is_reranker and spec.architecture in RERANKERS
    facts = classifier_facts(config, files, True, scores="template" if is_reranker else None)
    if facts.scores is not None:
        facts = replace(facts, template=QWEN3_RERANKER)

    def make(decoder: Decoder) -> Head:
        assert decoder.classifier is not None
        return ScoreHead(decoder, decoder.classifier)

    return DecoderPlan(spec, facts, make)


def _embedder(checkpoint: Checkpoint, spec: DecoderSpec, files: SentenceFiles) -> DecoderPlan:
    if files.pooling != ("lasttoken",):
        raise ModelError(
            f"modules.json pools {spec.architecture} by {' and '.join(files.pooling)}: only lasttoken is supported for "
            "decoders, since earlier tokens may be computed in other steps or come from the prefix cache"
        )
    if files.width != spec.hidden_size:
        raise ModelError(
            f"modules.json pools {files.width} features, but hidden_size in config.json is {spec.hidden_size}"
        )
    facts = embedding_facts(files, checkpoint.config, head_size(files.width, files.head), splittable=True)
    if files.max_length is not None:
        spec = replace(spec, default_context=min(spec.default_context, files.max_length))

    def make(decoder: Decoder) -> Head:
        kernels, dtype, device = decoder.kernels, decoder.dtype, decoder.device
        return EmbeddingHead(decoder, load_head(checkpoint, files.width, files.head, kernels, dtype, device))

    return DecoderPlan(spec, facts, make)


# ---- the heads, which read hidden states before the final norm ----


class ScoreHead:
    """Implements `Head`: a logit per label, always in float32."""

    def __init__(self, decoder: Decoder, linear: Linear) -> None:
        self.size = linear.out_features
        self._linear = linear
        self._decoder = decoder

    def __call__(self, pooled: Tensor) -> Tensor:
        return self._linear.logits(pooled, self._decoder.final_norm, self._decoder.spec.norm_eps)


class EmbeddingHead:
    """Implements `Head`: the normalised hidden state, through the checkpoint's layers after it."""

    def __init__(self, decoder: Decoder, layers: LayeredHead) -> None:
        self.size = layers.size
        self._layers = layers
        self._decoder = decoder

    def __call__(self, pooled: Tensor) -> Tensor:
        decoder = self._decoder
        normed = decoder.kernels.rms_norm(pooled, decoder.final_norm, decoder.spec.norm_eps)
        return self._layers(normed)
