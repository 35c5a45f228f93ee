"""What the bodies of embeddings, classifications, scores and rankings share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, WithJsonSchema

from inflight.pooling import Scale
from inflight.request import MAX_SALT_LENGTH
from inflight.server.schemas.common import REQUEST_ID, Body, Ignored, Unset, Usage, missing

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
