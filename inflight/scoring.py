"""Embedding, classification, scoring and reranking: the tasks, their parameters, and the facts about a model's head.

A parameter of a task is declared once, as a key of `EmbedParams`, `ClassifyParams` or `ScoreParams`: the methods of
`LLM` and `AsyncEngine` take these keys as keyword arguments, and the command line makes a flag of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypedDict, get_args, get_type_hints

Scale = Literal["logit", "sigmoid", "softmax", "cosine"]
Task = Literal["generate", "embed", "classify", "score", "rerank"]

_Truncate = Annotated[bool, "Cut texts that are longer than the model reads instead of rejecting them."]
_TruncatePromptTokens = Annotated[
    int | None, "Cut each text to at most this many tokens, not counting special tokens."
]
_Scale = Annotated[Scale | None, "Scale of the results; by default the one that the model was trained for."]


class EmbedParams(TypedDict, total=False):
    """How texts are embedded."""

    prompt_name: Annotated[str | None, "Name of the model's own prompt to put before each text."]
    prompt: Annotated[str | None, "Text to put before each text, instead of one of the model's prompts."]
    dimensions: Annotated[int | None, "Cut embeddings to this size; only for models trained for it."]
    normalize: Annotated[bool | None, "Scale embeddings to length 1; by default as the checkpoint says."]
    truncate: _Truncate
    truncate_prompt_tokens: _TruncatePromptTokens


class ClassifyParams(TypedDict, total=False):
    """How texts are classified."""

    scale: _Scale
    truncate: _Truncate
    truncate_prompt_tokens: _TruncatePromptTokens


class ScoreParams(TypedDict, total=False):
    """How documents are scored against a query, by `score` and by `rerank`. Queries are never cut."""

    scale: _Scale
    instruction: Annotated[str | None, "Instruction for models whose template has one."]
    truncate: _Truncate
    max_tokens_per_doc: Annotated[int | None, "Cut each document to at most this many tokens."]


def parameter_help(params: type) -> dict[str, str]:
    """Return the description of each parameter of a task, by name."""
    hints = get_type_hints(params, include_extras=True)
    return {name: get_args(hint)[1] for name, hint in hints.items()}


@dataclass(frozen=True, slots=True)
class PairTemplate:
    """The text in which a decoder that scores reads a query and a document.

    The query comes before the document, so that all documents of a query share a prefix.
    """

    prefix: str  # tokenized on its own, with special tokens; so is the suffix
    instruction: str  # the default
    body: str  # a format of {instruction}, {query} and {document}, read as plain text
    suffix: str


@dataclass(frozen=True, slots=True)
class PoolingFacts:
    """The head of a model that embeds, classifies or scores.

    The head returns raw vectors. The frontend normalizes, scales and cuts them.
    """

    task: Literal["embed", "classify"]
    size: int  # of a vector: dimensions of an embedding, or number of labels
    splittable: bool  # a text may be computed in several steps; not with bidirectional attention
    # Embedders:
    normalize: bool = False  # scale embeddings to length 1
    dimensions: tuple[int, ...] | None = None  # sizes that the model was trained for; None: not stated
    prompts: Mapping[str, str] = field(default_factory=dict)  # text to put before a text, by name ("query")
    default_prompt: str | None = None  # one of these names
    lowercase: bool = False  # texts are lowercased before they are tokenized
    # Classifiers:
    labels: tuple[str, ...] = ()
    scale: Scale = "logit"  # the default scale of `classify` and `score`
    # How a query and a document are scored: as one text of two segments ("pair"), as one text by a template, or by the
    # cosine of two embeddings. None: the model cannot score.
    scores: Literal["pair", "template", "cosine"] | None = None
    template: PairTemplate | None = None


def tasks_of(generates: bool, pooling: PoolingFacts | None) -> tuple[Task, ...]:
    """Return the tasks that a model can do."""
    tasks: list[Task] = ["generate"] if generates else []
    if pooling is not None:
        if pooling.template is None:
            tasks.append(pooling.task)
        # With more than two labels, none of them means that a document is relevant.
        if pooling.scores == "cosine" or (pooling.scores is not None and pooling.size <= 2):
            tasks += ["score", "rerank"]
    return tuple(tasks)
