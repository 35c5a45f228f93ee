"""Bodies and answers of /v1/embeddings, /classify, /score and /rerank."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, WithJsonSchema, model_validator

from inflight.scoring import Scale
from inflight.server.schemas import (
    TEXT,
    EngineBody,
    Ignored,
    TextsOrIds,
    Unset,
    Usage,
    missing,
    one_or_many,
    optional,
    ranged,
)

# Validated in routes.py.
Texts = Annotated[Any, one_or_many(TEXT, description="A text, or a list of texts.")]
DOCUMENT = {"anyOf": [TEXT, {"type": "object", "properties": {"text": TEXT}, "required": ["text"]}]}
Documents = Annotated[
    Any,
    WithJsonSchema(
        {
            "type": "array",
            "items": DOCUMENT,
            "minItems": 1,
            "description": "Texts, or objects whose `text` is read.",
        }
    ),
]


class PoolingBody(EngineBody):
    truncate: bool | None = optional("Truncate texts that are too long instead of refusing them.")

    # These have no effect here.
    metadata: Ignored = None
    safety_identifier: Ignored = None
    additional_data: Ignored = None
    add_special_tokens: Literal[True] | None = missing("send token ids to control them")
    mm_processor_kwargs: Unset = missing("only text input is supported")


class TextsBody(PoolingBody):
    """The parameters of embeddings and classes."""

    input: TextsOrIds
    truncate_prompt_tokens: int | None = ranged(
        minimum=-1, description="Truncate each text to this many tokens; -1: to the model's maximum."
    )


class PooledAnswer(BaseModel):
    """The fields of every answer."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    usage: Usage


class ScaledAnswer(PooledAnswer):
    """An answer with a `scale`: "logit" (the head's raw output), "sigmoid", "softmax" or "cosine"."""

    scale: Scale


class ClassifyBody(TextsBody):
    scale: Scale | None = None


class Classification(BaseModel):
    """The result of one text. `probs` has one number per label, on the answer's scale."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyAnswer(ScaledAnswer):
    labels: list[str]
    data: list[Classification]


class EmbeddingsBody(TextsBody):
    encoding_format: Literal["float", "base64"] | None = optional(
        "float by default; base64 encodes little-endian float32."
    )
    dimensions: int | None = ranged(
        minimum=1, description="For models trained to have their embeddings truncated."
    )
    prompt_name: str | None = optional("The name of one of the model's own prompts.")

    messages: Unset = missing("send their text as input")
    embed_dtype: Literal["float32"] | None = missing("numbers are float32")
    endianness: Literal["native", "little"] | None = missing("numbers are little-endian")


class Embedding(BaseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingsAnswer(PooledAnswer):
    data: list[Embedding]


class ScoringBody(PoolingBody):
    """The parameters of scores and rankings."""

    scale: Scale | None = optional("The model's own scale by default.")
    instruction: str | None = optional("For models whose template has an instruction.")
    max_tokens_per_doc: int | None = ranged(
        minimum=1, description="Truncate each document to this many tokens."
    )


class ScoreBody(ScoringBody):
    """Either `text_1` and `text_2`, or `queries` and `documents`: one query for all documents, or one for each."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [{"required": ["text_1", "text_2"]}, {"required": ["queries", "documents"]}]
        }
    )

    text_1: Texts = None
    text_2: Texts = None
    queries: Texts = None
    documents: Texts = None

    @model_validator(mode="after")
    def _one_pair(self) -> ScoreBody:
        names = [
            name for name in ("text_1", "text_2", "queries", "documents") if getattr(self, name) is not None
        ]
        if names not in (["text_1", "text_2"], ["queries", "documents"]):
            raise ValueError("give either text_1 and text_2, or queries and documents")
        return self


class Score(BaseModel):
    object: Literal["score"] = "score"
    index: int
    score: float


class ScoreAnswer(ScaledAnswer):
    data: list[Score]


class RerankBody(ScoringBody):
    query: str
    documents: Documents
    top_n: int | None = ranged(
        minimum=1, description="How many of the best documents are returned; all by default."
    )
    return_documents: bool | None = optional("Return the documents too; false by default.")

    rank_fields: Unset = missing("put those fields into each document's text")
    max_chunks_per_doc: Unset = missing("documents are not split; max_tokens_per_doc truncates them")


class RerankItem(BaseModel):
    index: int
    relevance_score: float
    document: dict[str, Any] | None = None


class RerankTokens(BaseModel):
    input_tokens: int
    output_tokens: int = 0


class RerankMeta(BaseModel):
    """Metadata that Cohere's clients read."""

    api_version: dict[str, str]
    tokens: RerankTokens
    cached_tokens: int


class RerankAnswer(BaseModel):
    """The documents, best first."""

    id: str
    model: str
    results: list[RerankItem]
    scale: Scale
    usage: Usage
    meta: RerankMeta
