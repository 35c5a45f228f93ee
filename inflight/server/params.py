"""The parameters of a body as `SamplingParams`, within the server's own limits, and its constraint on the text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from inflight.errors import ParameterError
from inflight.sampling_params import SamplingParams
from inflight.server.errors import ApiError
from inflight.server.openai.schemas import ChatBody, CompletionBody
from inflight.server.schemas import (
    GUIDED,
    ConstrainedBody,
    GenerationBody,
    ResponseFormat,
    SampledBody,
)
from inflight.server.state import ServedModel
from inflight.structured_outputs import PARAM, StructuredOutputs


@dataclass(frozen=True, slots=True)
class ContentConstraint:
    """A constraint on the text of an answer, and the parameter in which the client has written it."""

    kind: str  # a field of `StructuredOutputs`; empty if the value is all of them
    value: Any
    param: str
    path: str  # from the parameter down to the value

    def structured_outputs(self) -> StructuredOutputs | None:
        with self.translated_errors():
            fields: Any = {self.kind: self.value} if self.kind else self.value
            return SamplingParams(structured_outputs=fields).structured_outputs

    @contextmanager
    def translated_errors(self) -> Iterator[None]:
        """Let errors raised inside name the parameter that the client has written."""
        try:
            yield
        except ParameterError as error:
            if error.param != PARAM:
                raise
            message = str(error)
            if self.kind:
                message = message.replace(f"{PARAM}.{self.kind}", self.path).replace(PARAM, self.param)
            raise ParameterError(message, param=self.param, code=error.code) from None


def read_constraint(body: ConstrainedBody) -> ContentConstraint | None:
    """Return the constraint of a body. Raise ApiError if it has several."""
    constraints = [*_guided(body)]
    if body.structured_outputs is not None:
        constraints.append(ContentConstraint("", body.structured_outputs, PARAM, PARAM))
    if body.response_format is not None:
        constraints += _response_format(body.response_format)
    if len(constraints) > 1:
        first, second = constraints[0].param, constraints[1].param
        message = f"{first} and {second} are both given: only one constraint is allowed"
        raise ApiError(400, message, code="invalid_value", param=second)
    return constraints[0] if constraints else None


def _response_format(response_format: ResponseFormat) -> Iterator[ContentConstraint]:
    name, schema = "response_format", response_format.json_schema
    if response_format.type == "json_schema" and schema is None:
        message = "response_format.json_schema is missing: the type json_schema needs it"
        raise ApiError(400, message, code="missing_parameter", param="response_format.json_schema")
    if response_format.type == "json_schema" and schema is not None and schema.schema_ is not None:
        yield ContentConstraint("json", schema.schema_, name, f"{name}.json_schema.schema")
    elif response_format.type in ("json_object", "json_schema"):
        yield ContentConstraint("json_object", True, name, name)
    elif response_format.type == "structural_tag":
        tag = response_format.model_dump(include={"structures", "triggers"}, exclude_none=True)
        yield ContentConstraint("structural_tag", tag, name, name)


def _guided(body: ConstrainedBody) -> Iterator[ContentConstraint]:
    for name in GUIDED:
        value = getattr(body, name)
        if value is not None:
            yield ContentConstraint(name.removeprefix("guided_"), value, name, name)


DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default


@dataclass(frozen=True, slots=True)
class GenerationParams:
    """The parameters of a body, checked as far as that is possible without its tokens."""

    sampling: SamplingParams
    num_logprobs: int | None = None
    echo: bool = False
    kind: str = "generate"  # of the engine's requests
    constraint: ContentConstraint | None = None  # also part of `sampling`
    max_tokens: int | None = None  # as the body gives it
    max_tokens_name: str = "max_tokens"  # the parameter that gives it

    @property
    def has_logprobs(self) -> bool:
        """Whether answers have logprobs, whose JSON is many times as long as the text."""
        return self.num_logprobs is not None or self.sampling.prompt_logprobs is not None

    def translated_errors(self) -> AbstractContextManager[None]:
        """Let errors raised inside name the parameter that the client has written."""
        return nullcontext() if self.constraint is None else self.constraint.translated_errors()


def completion_params(model: ServedModel, body: CompletionBody) -> GenerationParams:
    """Return the parameters of a completion. With max_tokens of 0, only the prompt's logprobs are computed."""
    prompt_only = body.max_tokens == 0
    if prompt_only and not body.echo:
        raise ApiError(400, "max_tokens is 0: this is only allowed with echo", param="max_tokens")
    max_tokens = 1 if prompt_only else body.max_tokens
    fields: dict[str, Any] = {"max_tokens": _max_tokens(model, max_tokens, DEFAULT_COMPLETION_TOKENS)}
    if body.logprobs is not None:
        fields["logprobs"] = _num_logprobs(model, "logprobs", body.logprobs)
        if body.echo:
            fields["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    constraint = _read_constraint(body, fields)
    sampling = _sampling(model, body, fields)
    kind = "prompt_logprobs" if prompt_only else "generate"
    return GenerationParams(sampling, body.logprobs, bool(body.echo), kind, constraint, body.max_tokens)


def chat_params(model: ServedModel, body: ChatBody) -> GenerationParams:
    """Return the parameters of a chat."""
    max_tokens, name = body.max_completion_tokens, "max_completion_tokens"
    if max_tokens is None:
        max_tokens, name = body.max_tokens, "max_tokens"
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs is given: it needs logprobs to be true", param="top_logprobs")
    num_logprobs = _num_logprobs(model, "top_logprobs", body.top_logprobs or 0) if body.logprobs else None
    default = model.frontend.default_params.get("max_tokens")
    fields: dict[str, Any] = {}
    if num_logprobs is not None:
        fields["logprobs"] = num_logprobs
        default = _max_tokens_with_logprobs(model, body.n or 1, num_logprobs, default)
    fields["max_tokens"] = _max_tokens(model, max_tokens, default, name)
    constraint = _read_constraint(body, fields)
    return GenerationParams(
        _sampling(model, body, fields),
        num_logprobs,
        constraint=constraint,
        max_tokens=max_tokens,
        max_tokens_name=name,
    )


def conversation_params(
    model: ServedModel,
    body: SampledBody,
    *,
    max_tokens: int | None,
    max_tokens_name: str = "max_tokens",
    stop: Sequence[str] = (),
    stop_name: str = "stop",
    constraint: ContentConstraint | None = None,
) -> GenerationParams:
    """Return the parameters of a conversation in an API that has its own names for some of them."""
    default = model.frontend.default_params.get("max_tokens")
    fields: dict[str, Any] = {"max_tokens": _max_tokens(model, max_tokens, default, max_tokens_name)}
    _check_stops(model, stop_name, stop)
    if stop:
        fields["stop"] = stop
    if constraint is not None:
        fields["structured_outputs"] = constraint.structured_outputs()
    sampling = SamplingParams(**{**model.frontend.default_params, **body.sampling(), **fields})
    return GenerationParams(
        sampling, constraint=constraint, max_tokens=max_tokens, max_tokens_name=max_tokens_name
    )


def _read_constraint(body: ConstrainedBody, fields: dict[str, Any]) -> ContentConstraint | None:
    """Return the constraint of a body, after adding it to the fields of its `SamplingParams`."""
    constraint = read_constraint(body)
    if constraint is not None:
        fields["structured_outputs"] = constraint.structured_outputs()
    return constraint


def _max_tokens(
    model: ServedModel, max_tokens: int | None, default: int | None, name: str = "max_tokens"
) -> int | None:
    """Return the length limit of an answer: the body's own, or a default that the server's limit cuts."""
    limit = model.options.max_output_tokens
    if max_tokens is None:
        return min(filter(None, (default, limit)), default=None)
    if max_tokens < 1:
        raise ApiError(400, f"{name} is {max_tokens}: it must be an integer of at least 1", param=name)
    if limit is not None and max_tokens > limit:
        message = f"{name} is {max_tokens}: at most {limit} are allowed on this server"
        raise ApiError(400, message, param=name)
    return max_tokens


def _max_tokens_with_logprobs(model: ServedModel, n: int, num_logprobs: int, default: int | None) -> int:
    """Return the default length limit of an answer with logprobs: as many tokens as the limit on logprobs allows.

    If that is not even one, the check of the request refuses it.
    """
    num_tokens = max(1, model.options.max_answer_logprobs // (max(n, 1) * (num_logprobs + 1)))
    return num_tokens if default is None else min(default, num_tokens)


def _num_logprobs(model: ServedModel, name: str, num_logprobs: int) -> int:
    limit = model.options.max_logprobs
    if not 0 <= num_logprobs <= limit:
        message = f"{name} is {num_logprobs}: it must be an integer from 0 to {limit}"
        raise ApiError(400, message, param=name)
    return num_logprobs


def _sampling(model: ServedModel, body: GenerationBody, fields: dict[str, Any]) -> SamplingParams:
    if body.stream_options is not None and body.stream_options.include_usage and not body.stream:
        raise ApiError(400, "stream_options is given: it needs stream to be true", param="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise ApiError(400, "prompt_logprobs is given: it needs stream to be false", param="prompt_logprobs")
    if body.prompt_logprobs is not None:
        _num_logprobs(model, "prompt_logprobs", body.prompt_logprobs)
    _check_lists(model, body)
    return SamplingParams(**{**model.frontend.default_params, **body.sampling(), **fields})


def _check_lists(model: ServedModel, body: GenerationBody) -> None:
    """Refuse lists that are longer than useful: they are looked at in every step."""
    _check_stops(model, "stop", [body.stop] if isinstance(body.stop, str) else body.stop or [])
    _check_strings(model, "bad_words", body.bad_words or ())
    size = model.frontend.input_processor.vocab_size
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        token_ids = getattr(body, name) or ()
        if len(token_ids) > size:
            message = f"{name} has {len(token_ids)} token ids: the vocabulary has only {size}"
            raise ApiError(400, message, param=name)


def _check_stops(model: ServedModel, name: str, stops: Sequence[str]) -> None:
    limit = model.options.max_stop_strings
    if len(stops) > limit:
        raise ApiError(400, f"{name} has {len(stops)} strings: at most {limit} are allowed", param=name)
    if "" in stops:
        raise ApiError(400, f"{name} has an empty string: each must have at least 1 character", param=name)
    _check_strings(model, name, stops)


def _check_strings(model: ServedModel, name: str, texts: Sequence[str]) -> None:
    longest, limit = max(map(len, texts), default=0), model.options.max_stop_length
    if longest > limit:
        message = f"{name} has a string of {longest} characters: at most {limit} are allowed"
        raise ApiError(400, message, param=name)
