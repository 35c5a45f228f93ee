"""/score: pairs of texts."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from inflight.pooling import Scale
from inflight.server.schemas.common import ranged
from inflight.server.schemas.pooling import PoolingBody, ScaledAnswer, Texts


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
