"""What the bodies of several routes share."""

from __future__ import annotations

import re
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    WithJsonSchema,
    model_validator,
)

from inflight.request import MAX_SALT_LENGTH
from inflight.sampling_params import MAX_LOGPROBS, MAX_N

REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


T = TypeVar("T")
# One mistake is enough: a list of a million would otherwise be told one by one.
Items = Annotated[list[T], Field(fail_fast=True)]


def ranged(default: Any = None, **schema: Any) -> Any:
    """A field whose range the document tells and `SamplingParams`, the one validator, checks."""
    return Field(default, json_schema_extra=schema)


def missing(instead: str) -> Any:
    """A field of OpenAI's or vLLM's requests that is refused unless its value changes nothing, which are those that its
    type allows; and what to do instead."""
    return Field(None, description=f"Not supported: {instead}.", json_schema_extra={INSTEAD: instead})


INSTEAD = "x-instead"


def _check_unset(value: Any) -> Any:
    if value:
        raise ValueError("it is not supported")
    return value


# null, false, 0, "", [] and {}: what clients send for what they do not want.
Unset = Annotated[Any, AfterValidator(_check_unset), WithJsonSchema({"enum": [None, False, 0, "", [], {}]})]
# Whatever is sent is taken, and changes nothing.
Ignored = Annotated[Any, WithJsonSchema({"description": "Taken, and without effect."})]


class Body(BaseModel):
    """A body that a client sends: no unknown parameters, no types that only look alike."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    _is_large: bool = PrivateAttr(default=False)

    @property
    def is_large(self) -> bool:
        """Whether work on all of it takes so long that other streams would notice."""
        return self._is_large

    @classmethod
    @cache
    def unsupported(cls) -> dict[str, str]:
        """Fields that are refused unless they change nothing, and what to do instead."""
        extras = ((name, field.json_schema_extra) for name, field in cls.model_fields.items())
        return {
            name: str(extra[INSTEAD]) for name, extra in extras if type(extra) is dict and INSTEAD in extra
        }


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
    continuous_usage_stats: bool | None = Field(
        None, description="With include_usage: every event has the usage of its answer so far."
    )
    include_obfuscation: Ignored = None


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

    # They inform whoever keeps answers, or choose where there is no choice.
    store: Ignored = None
    metadata: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    session_id: Ignored = None
    guided_decoding_backend: Ignored = None
    length_penalty: Ignored = None  # of beam search alone
    spaces_between_special_tokens: Ignored = None  # text is what the tokenizer makes of tokens
    prediction: Ignored = None  # would be faster, and is the same answer

    extra_body: Unset = missing(
        "its fields belong beside the others: Python's openai package puts them there"
    )
    use_beam_search: Unset = missing("ask for n answers and choose by their logprobs, or use LLM.beam_search")
    truncate_prompt_tokens: Unset = missing("leave out what does not fit")
    truncation_side: Unset = missing("leave out what does not fit")
    logprob_token_ids: Unset = missing("ask for more logprobs, or set allowed_token_ids")
    guided_whitespace_pattern: Unset = missing("use a regex or a grammar")
    return_tokens_as_token_ids: Unset = missing("set return_token_ids")
    return_prompt_text: Unset = missing("ask /tokenize for the tokens, and /detokenize for their text")
    repetition_detection: Unset = missing("use repetition_penalty or frequency_penalty")
    logits_processors: Unset = missing("code is never taken from a request; use logit_bias or bad_words")
    vllm_xargs: Unset = missing("there are no plug-ins that read it")
    kv_transfer_params: Unset = missing("KV stays in the engine that computed it")
    mm_processor_kwargs: Unset = missing("only text is read")
    media_io_kwargs: Unset = missing("only text is read")
    watermarking: Unset = missing("answers have no watermark")


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


class ReturnedPart(Body):
    """A part of a conversation. What a client got in an answer it may send back as it was: null is nothing."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}


def by_type(allowed: str, default: str | None = None) -> Discriminator:
    """Tells the members of a union apart, each of which is tagged with its type in angle brackets: no parameter is
    named so, and messages leave them out. `default` is the type of a part that does not say."""

    def tag(given: Any) -> str:
        kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
        return f"<{kind or default}>"

    return Discriminator(tag, custom_error_type="unsupported_type", custom_error_message=allowed)


GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


class JsonSchemaFormat(Body):
    name: str | None = Field(None, max_length=256)
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(
        None, alias="schema", description="Any object, if there is none."
    )
    strict: bool | None = Field(None, description="Answers match the schema in any case.")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: Items[dict[str, Any]] | None = Field(None, description="Of a structural tag.")
    triggers: Items[str] | None = Field(None, description="Of a structural tag.")


class ConstrainedBody(GenerationBody):
    """At most one of these. Those that begin with guided are older names."""

    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = Field(
        None, description="One of json, regex, choice, grammar, json_object and structural_tag."
    )
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: Items[str] | None = None
    guided_grammar: str | None = None
