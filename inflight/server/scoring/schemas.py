"""What the bodies of embeddings, classifications, scores and rankings share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

from inflight.request import MAX_SALT_LENGTH
from inflight.scoring import Scale
from inflight.server.schemas.common import REQUEST_ID, Body, Ignored, Unset, Usage, missing, ranged

_TEXT = {"type": "string"}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}


def _one_or_many(*kinds: dict[str, Any], description: str) -> WithJsonSchema:
    lists = [{"type": "array", "items": kind, "minItems": 1} for kind in kinds]
    return WithJsonSchema({"anyOf": [*kinds, *lists], "description": description})


# Read by hand: a union would report several mistakes where there is one, and millions of them.
Inputs = Annotated[Any, _one_or_many(_TEXT, _IDS, description="A text, its token ids, or a list of either.")]
Texts = Annotated[Any, _one_or_many(_TEXT, description="A text, or a list of texts.")]
DOCUMENT = {"anyOf": [_TEXT, {"type": "object", "properties": {"text": _TEXT}, "required": ["text"]}]}
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


class PoolingBody(Body):
    model: str | None = Field(None, description="A name that /v1/models lists; may be left out.")
    user: str | None = Field(None, max_length=256, description="Whom fair scheduling counts this against.")
    priority: int | None = Field(None, description="Smaller goes first, with --policy priority.")
    cache_salt: str | None = Field(None, max_length=MAX_SALT_LENGTH, description="Separates cached prefixes.")
    request_id: Annotated[str, Field(pattern=f"^{REQUEST_ID.pattern}$")] | None = Field(
        None, description="The answer's id, and its name under /v1/requests."
    )
    truncate: bool | None = Field(None, description="Cut what is too long at its end, else it is refused.")

    # They inform, or choose where there is no choice.
    metadata: Ignored = None
    safety_identifier: Ignored = None
    additional_data: Ignored = None
    add_special_tokens: Literal[True] | None = missing("send token ids, which are taken as they are")
    mm_processor_kwargs: Unset = missing("only text is read")


class PooledAnswer(BaseModel):
    """What every answer has."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    usage: Usage


class ScaledAnswer(PooledAnswer):
    """`scale` says what the numbers are: "logit" (as the head gave them), "sigmoid", "softmax", or "cosine"."""

    scale: Scale


class ClassifyBody(PoolingBody):
    input: Inputs
    scale: Scale | None = None
    truncate_prompt_tokens: int | None = ranged(
        minimum=-1, description="Cut each text to so many tokens; -1: to as many as the model takes."
    )


class Classification(BaseModel):
    """`probs` has one number for each label, on the answer's scale."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyAnswer(ScaledAnswer):
    labels: list[str]
    data: list[Classification]


class EmbeddingsBody(PoolingBody):
    input: Inputs
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="float unless told otherwise; base64 is that of float32, the smaller byte first."
    )
    dimensions: int | None = ranged(minimum=1, description="Of models that were trained to be cut.")
    prompt_name: str | None = Field(None, description="One of the model's own prompts.")
    truncate_prompt_tokens: int | None = ranged(
        minimum=-1, description="Cut each text to so many tokens; -1: to as many as the model takes."
    )

    messages: Unset = missing("send their text as input")
    embed_dtype: Literal["float32"] | None = missing("numbers are float32")
    endianness: Literal["native", "little"] | None = missing("the smaller byte comes first")


class Embedding(BaseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingsAnswer(PooledAnswer):
    data: list[Embedding]


class ScoringBody(PoolingBody):
    """What scores and rankings share."""

    scale: Scale | None = Field(None, description="The model's own unless told otherwise.")
    instruction: str | None = Field(None, description="Of models whose template has one.")
    max_tokens_per_doc: int | None = ranged(minimum=1, description="Cut each document to so many tokens.")


class ScoreBody(ScoringBody):
    """`text_1` and `text_2`, or `queries` and `documents`: one for all of the others, or as many."""

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
        given = [
            name for name in ("text_1", "text_2", "queries", "documents") if getattr(self, name) is not None
        ]
        if given not in (["text_1", "text_2"], ["queries", "documents"]):
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
    top_n: int | None = ranged(minimum=1, description="How many of the best are returned; all unless given.")
    return_documents: bool | None = Field(None, description="With the documents; false unless given.")

    rank_fields: Unset = missing("put what is to be read into each document's text")
    max_chunks_per_doc: Unset = missing("documents are read as one: max_tokens_per_doc cuts them")


class RerankItem(BaseModel):
    index: int
    relevance_score: float
    document: dict[str, Any] | None = None


class RerankTokens(BaseModel):
    input_tokens: int
    output_tokens: int = 0


class RerankMeta(BaseModel):
    """As Cohere's clients read it."""

    api_version: dict[str, str]
    tokens: RerankTokens
    cached_tokens: int


class RerankAnswer(BaseModel):
    """The best document first."""

    id: str
    model: str
    results: list[RerankItem]
    scale: Scale
    usage: Usage
    meta: RerankMeta
