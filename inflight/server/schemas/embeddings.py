"""/v1/embeddings."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from inflight.server.schemas.common import Unset, missing, ranged
from inflight.server.schemas.pooling import Inputs, PooledAnswer, PoolingBody


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
