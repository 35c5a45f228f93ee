"""Bodies and their parts that several APIs share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)

from inflight.request import MAX_SALT_LENGTH
from inflight.sampling_params import MAX_LOGPROBS, MAX_N

REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


T = TypeVar("T")
# Stop at the first error: a list could have a million of them.
Items = Annotated[list[T], Field(fail_fast=True)]


def optional(text: str, **limits: Any) -> Any:
    """Return a field that may be left out, with its description."""
    return Field(None, description=text, **limits)


def ranged(default: Any = None, **schema: Any) -> Any:
    """Return a field whose range is documented here and checked by `SamplingParams`, the only validator."""
    return Field(default, json_schema_extra=schema)


def missing(instead: str) -> Any:
    """Return a field that is not supported: its type allows only values without effect. `instead` says what to do."""
    return Field(None, description=f"Not supported: {instead}.", json_schema_extra={INSTEAD: instead})


INSTEAD = "x-instead"


def _check_unset(value: Any) -> Any:
    if value:
        raise ValueError("it is not supported")
    return value


# null, false, 0, "", [] and {}: what clients send for features that they do not use.
Unset = Annotated[Any, AfterValidator(_check_unset), WithJsonSchema({"enum": [None, False, 0, "", [], {}]})]
# Any value is accepted and ignored.
Ignored = Annotated[Any, WithJsonSchema({"description": "Accepted and ignored."})]


TEXT = {"type": "string"}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}


def one_or_many(*kinds: dict[str, Any], description: str) -> WithJsonSchema:
    """Return the schema of a field that its route validates.

    A union would report several errors for one mistake, and millions for a long list.
    """
    lists = [{"type": "array", "items": schema, "minItems": 1} for schema in kinds]
    return WithJsonSchema({"anyOf": [*kinds, *lists], "description": description})


TextsOrIds = Annotated[
    Any, one_or_many(TEXT, _IDS, description="A text, its token ids, or a list of either.")
]


class Body(BaseModel):
    """A request body: no unknown parameters, and no conversion between types."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    _is_large: bool = PrivateAttr(default=False)

    @property
    def is_large(self) -> bool:
        """Whether it is so large that processing it on the event loop would delay other requests."""
        return self._is_large

    @classmethod
    @cache
    def unsupported(cls) -> dict[str, str]:
        """Return the fields that are not supported, and what to do instead."""
        extras = ((name, field.json_schema_extra) for name, field in cls.model_fields.items())
        return {
            name: str(extra[INSTEAD]) for name, extra in extras if type(extra) is dict and INSTEAD in extra
        }


class EngineBody(Body):
    """The parameters of every request to the engine, in all APIs."""

    model: str | None = optional("A name from /v1/models; optional.")
    user: str | None = optional("The user that fair scheduling counts this request against.", max_length=256)
    priority: int | None = optional("With --policy priority, smaller values go first.")
    cache_salt: str | None = optional(
        "Cached prefixes are shared only between requests with the same salt.", max_length=MAX_SALT_LENGTH
    )
    request_id: Annotated[str, Field(pattern=f"^{REQUEST_ID.pattern}$")] | None = optional(
        "The id of the answer, also for /v1/requests."
    )


class SampledBody(EngineBody):
    """The parameters of every generation, in all APIs."""

    stream: bool | None = None
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

    def sampling(self) -> dict[str, Any]:
        """Return the fields of `SamplingParams` that the client has set."""
        return {name: value for name in SAMPLING if (value := getattr(self, name, None)) is not None}


class StreamOptions(Body):
    include_usage: bool | None = optional("Send the usage of the whole request in a last event.")
    continuous_usage_stats: bool | None = optional(
        "With include_usage: send the usage so far in every event."
    )
    include_obfuscation: Ignored = None


class GenerationBody(SampledBody):
    """The parameters of completions and chats."""

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

    return_token_ids: bool | None = optional("Return token ids in addition to the text.")

    # These have no effect here.
    store: Ignored = None
    metadata: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    session_id: Ignored = None
    guided_decoding_backend: Ignored = None
    length_penalty: Ignored = None  # only for beam search
    spaces_between_special_tokens: Ignored = None  # the tokenizer decides about spaces
    prediction: Ignored = None  # affects only speed

    extra_body: Unset = missing("put its fields at the top level, as Python's openai package does")
    use_beam_search: Unset = missing("request n answers and choose by their logprobs, or use LLM.beam_search")
    truncate_prompt_tokens: Unset = missing("shorten the prompt yourself")
    truncation_side: Unset = missing("shorten the prompt yourself")
    logprob_token_ids: Unset = missing("request more logprobs, or set allowed_token_ids")
    guided_whitespace_pattern: Unset = missing("use a regex or a grammar")
    return_tokens_as_token_ids: Unset = missing("set return_token_ids")
    return_prompt_text: Unset = missing("use /tokenize for the tokens, and /detokenize for their text")
    repetition_detection: Unset = missing("use repetition_penalty or frequency_penalty")
    logits_processors: Unset = missing("requests cannot contain code; use logit_bias or bad_words")
    vllm_xargs: Unset = missing("there are no plug-ins that use it")
    kv_transfer_params: Unset = missing("KV blocks stay in the engine that computed them")
    mm_processor_kwargs: Unset = missing("only text input is supported")
    media_io_kwargs: Unset = missing("only text input is supported")
    watermarking: Unset = missing("watermarking is not implemented")


SAMPLING = (
    *("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos"),
    *("min_tokens", "skip_special_tokens", "logit_bias", "allowed_token_ids", "bad_words", "prompt_logprobs"),
)


class ReturnedPart(Body):
    """A part of a conversation. Clients may send parts of an answer back unchanged: null values are dropped."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        return {name: value for name, value in part.items() if value is not None}


IMAGE_NOTE = "[An image was here. This model cannot see images.]"
IMAGE_TYPES = ("image", "image_url", "input_image")  # of Anthropic's API, of chats and of responses


def images_as(text_type: str) -> BeforeValidator:
    """Return a validator of parts that replaces an image by a note, a part of the type `text_type`.

    The model cannot see images, so this happens only with --replace-images; without it, they are rejected.
    """

    def replaced(part: Any, info: ValidationInfo) -> Any:
        if not isinstance(part, dict) or part.get("type") not in IMAGE_TYPES:
            return part
        if not (info.context or {}).get("replace_images"):
            raise ValueError(
                "images are not supported (with --replace-images, the server replaces them by a note)"
            )
        return {"type": text_type, "text": IMAGE_NOTE}

    return BeforeValidator(replaced)


def by_type(
    allowed: str, default: str | None = None, others: Mapping[str, str] | None = None
) -> Discriminator:
    """Return what tells the members of a union apart by their `type`, which is `default` if it is not given.

    `others` has types that share a member with another, whose tag they get.

    Tags are types in angle brackets. No parameter has such a name, so error messages can leave tags out.
    """

    def tag(part: Any) -> str:
        part_type = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
        return f"<{(others or {}).get(part_type, part_type) if isinstance(part_type, str) else default}>"

    return Discriminator(tag, custom_error_type="unsupported_type", custom_error_message=allowed)


GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


class JsonSchemaFormat(Body):
    name: str | None = Field(None, max_length=256)
    description: str | None = None
    schema_: dict[str, Any] | bool | None = optional(
        "Without a schema, any JSON object is allowed.", alias="schema"
    )
    strict: bool | None = optional("Ignored: answers always match the schema.")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: Items[dict[str, Any]] | None = optional("Only for structural tags.")
    triggers: Items[str] | None = optional("Only for structural tags.")


class ConstrainedBody(GenerationBody):
    """A body that may constrain the text of answers, in at most one way. The `guided_*` names are vLLM's older ones."""

    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = optional(
        "One of json, regex, choice, grammar, json_object and structural_tag."
    )
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: Items[str] | None = None
    guided_grammar: str | None = None


# ---- responses ----


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """An error, of any status."""

    error: ErrorDetail


class PromptDetails(BaseModel):
    cached_tokens: int = 0


class CompletionDetails(BaseModel):
    reasoning_tokens: int | None = optional("Only for chats whose format marks reasoning.")
    accepted_prediction_tokens: int | None = optional(
        "Only with a prediction, if the server drafts: its tokens that were verified and right."
    )
    rejected_prediction_tokens: int | None = optional(
        "Its tokens that were verified and wrong. They are no completion_tokens."
    )


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | None = optional("Only if there are any.")


FinishReason = Literal["stop", "length", "abort"]
