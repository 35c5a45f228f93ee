"""What the bodies of several routes share."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from inflight.request import MAX_LOGPROBS, MAX_N, MAX_SALT_LENGTH

REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


T = TypeVar("T")
# One mistake is enough: a list of a million would otherwise be told one by one.
Items = Annotated[list[T], Field(fail_fast=True)]


def ranged(default: Any = None, **schema: Any) -> Any:
    """A field whose range the document tells and `SamplingParams`, the one validator, checks."""
    return Field(default, json_schema_extra=schema)


class Body(BaseModel):
    """A body that a client sends: no unknown parameters, no types that only look alike."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    # Parameters of OpenAI's API that are refused unless they have no effect, and what to do instead.
    unsupported: ClassVar[dict[str, str]] = {}

    _is_large: bool = PrivateAttr(default=False)

    @property
    def is_large(self) -> bool:
        """Whether work on all of it takes so long that other streams would notice."""
        return self._is_large


class SampledBody(Body):
    """What all that generate have in common, whatever their API."""

    model: str | None = Field(None, description="A name that /v1/models lists; may be left out.")
    stream: bool | None = None
    user: str | None = Field(None, max_length=256, description="Whom fair scheduling counts this against.")

    temperature: float | None = ranged(minimum=0)
    top_p: float | None = ranged(exclusiveMinimum=0, maximum=1)
    top_k: int | None = ranged(minimum=-1)
    min_p: float | None = ranged(minimum=0, maximum=1)
    presence_penalty: float | None = ranged(minimum=-2, maximum=2)
    frequency_penalty: float | None = ranged(minimum=-2, maximum=2)
    repetition_penalty: float | None = ranged(exclusiveMinimum=0)
    seed: int | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = ranged(minimum=0)

    priority: int | None = Field(None, description="Smaller goes first, with --policy priority.")
    cache_salt: str | None = Field(None, max_length=MAX_SALT_LENGTH, description="Separates cached prefixes.")
    request_id: Annotated[str, Field(pattern=f"^{REQUEST_ID.pattern}$")] | None = Field(
        None, description="The answer's id, and its name under /v1/requests."
    )

    def sampling(self) -> dict[str, Any]:
        """The fields of `SamplingParams` that the client has set."""
        return {name: value for name in SAMPLING if (value := getattr(self, name, None)) is not None}


class StreamOptions(Body):
    include_usage: bool | None = Field(None, description="A last event with the usage of the whole request.")


class GenerationBody(SampledBody):
    """What completions and chats have in common."""

    stream_options: StreamOptions | None = None
    n: int | None = ranged(minimum=1, maximum=MAX_N)
    stop: str | Items[str] | None = None
    stop_token_ids: Items[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: Items[int] | None = None
    bad_words: Items[str] | None = None
    prompt_logprobs: int | None = ranged(minimum=0, maximum=MAX_LOGPROBS)

    return_token_ids: bool | None = Field(None, description="Token ids beside the text.")


SAMPLING = (
    *("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos"),
    *("min_tokens", "skip_special_tokens", "logit_bias", "allowed_token_ids", "bad_words", "prompt_logprobs"),
)


# ---- what comes back ----


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """Every error, whatever its status."""

    error: ErrorDetail


class PromptDetails(BaseModel):
    cached_tokens: int = 0


class CompletionDetails(BaseModel):
    reasoning_tokens: int = 0


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | None = Field(
        None, description="Of chats, where it is known."
    )


FinishReason = Literal["stop", "length", "abort"]
