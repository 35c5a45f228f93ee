"""/rerank, /v1/rerank and /v2/rerank: as clients of Cohere's and Jina's API have it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from inflight.pooling import Scale
from inflight.server.schemas.common import Unset, Usage, missing, ranged
from inflight.server.schemas.pooling import Documents
from inflight.server.schemas.score import ScoringBody


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
