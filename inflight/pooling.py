"""What a model's head returns for a text, and how texts become its input: the checkpoint tells, the front needs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Scale = Literal["logit", "sigmoid", "softmax", "cosine"]
Task = Literal["generate", "embed", "classify", "score", "rerank"]  # what a model may be asked for


@dataclass(frozen=True, slots=True)
class PairTemplate:
    """How a decoder that scores reads a query and a document: as one text, with what it was trained to find around
    them. The query stands before the document, so that all documents of a query begin alike."""

    prefix: str  # as token ids of their own, special tokens included; so is the suffix
    instruction: str  # unless the request gives one
    body: str  # a format of {instruction}, {query} and {document}; all of it is text
    suffix: str


@dataclass(frozen=True, slots=True)
class PoolingFacts:
    """One model has one head. Vectors come from it as they are: norms, sigmoids and cuts are for the front."""

    task: Literal["embed", "classify"]
    size: int  # numbers in a vector: dimensions of an embedding, or labels
    splittable: bool  # whether a text may be computed in several steps: not where attention is bidirectional
    # Of an embedder.
    normalize: bool = False  # embeddings have length 1
    dimensions: tuple[int, ...] | None = (
        None  # to which the model was trained to be cut; None: it does not say
    )
    prompts: Mapping[str, str] = field(
        default_factory=dict
    )  # by name ("query", "document"): text put before a text
    default_prompt: str | None = None  # one of these names
    lowercase: bool = False  # texts are made lower case before they are tokenized
    # Of a classifier.
    labels: tuple[str, ...] = ()
    scale: Scale = "logit"  # of what `classify` and `score` return, unless asked for another
    # How a query and a document become one score: one text of two segments, as the tokenizer puts them together
    # ("pair"); one text by a template; the angle between two embeddings; None: the model cannot score.
    scores: Literal["pair", "template", "cosine"] | None = None
    template: PairTemplate | None = None


def tasks_of(generates: bool, pooling: PoolingFacts | None) -> tuple[Task, ...]:
    """What a model can do."""
    found: list[Task] = ["generate"] if generates else []
    if pooling is not None:
        if pooling.template is None:
            found.append(pooling.task)
        # Of more than two labels none speaks for a document.
        if pooling.scores == "cosine" or (pooling.scores is not None and pooling.size <= 2):
            found += ["score", "rerank"]
    return tuple(found)
