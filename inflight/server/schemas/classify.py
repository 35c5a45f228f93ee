"""/classify."""

from __future__ import annotations

from pydantic import BaseModel

from inflight.pooling import Scale
from inflight.server.schemas.common import ranged
from inflight.server.schemas.pooling import Inputs, PoolingBody, ScaledAnswer


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
