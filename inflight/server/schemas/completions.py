"""/v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, WithJsonSchema

from inflight.sampling_params import MAX_LOGPROBS
from inflight.server.schemas.common import FinishReason, Unset, Usage, missing, ranged
from inflight.server.schemas.constraints import ConstrainedBody

_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
# Read by hand: a union of four lists would report four mistakes where there is one.
Prompts = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT,
                _IDS,
                {"type": "array", "items": _TEXT, "minItems": 1},
                {"type": "array", "items": _IDS, "minItems": 1},
            ],
            "description": "A text, its token ids, or a list of either.",
        }
    ),
]


class CompletionBody(ConstrainedBody):
    prompt: Prompts
    max_tokens: int | None = ranged(minimum=0, description="0 only with echo: to score the prompt.")
    logprobs: int | None = ranged(minimum=0, maximum=MAX_LOGPROBS)
    echo: bool | None = None

    add_special_tokens: bool | None = Field(None, description="To a text; true unless told otherwise.")

    suffix: Unset = missing("put what follows into the prompt, in the form that the model was trained on")
    best_of: Literal[1] | None = missing("ask for n answers and choose by their logprobs")
    prompt_embeds: Unset = missing("send a text or token ids")


class CompletionLogprobs(BaseModel):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None] | None


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class Completion(BaseModel):
    """An answer; streamed, each event is one, with what is new."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
