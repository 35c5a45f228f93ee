"""Turn a checked body into engine requests: its constraint, its sampling parameters, and its prompts.

Tokenizing and rendering chat templates take long, so `prepare_completion` and `prepare_conversation` run in a thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from inflight.errors import ParameterError
from inflight.frontend.chat import ChatRequest, checked_tools, num_characters, selected_tools
from inflight.frontend.input_processor import context_length_error
from inflight.frontend.output_processor import OutputProcessor
from inflight.request import RequestContext
from inflight.sampling_params import SamplingParams
from inflight.server.errors import ApiError, invalid
from inflight.server.openai.schemas import ChatBody, CompletionBody
from inflight.server.routes.schemas import TokenizeBody
from inflight.server.schemas import GUIDED, ConstrainedBody, GenerationBody, ResponseFormat, SampledBody
from inflight.server.state import ServedModel
from inflight.structured_outputs import PARAM, StructuredOutputs

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default
NO_BUDGET = -1  # vLLM's value for no limit on thinking


# ---- the constraint on the text ----


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
    constraints = [
        ContentConstraint(name.removeprefix("guided_"), getattr(body, name), name, name)
        for name in GUIDED
        if getattr(body, name) is not None
    ]
    if body.structured_outputs is not None:
        constraints.append(ContentConstraint("", body.structured_outputs, PARAM, PARAM))
    if body.response_format is not None:
        constraints += _response_format(body.response_format)
    if len(constraints) > 1:
        first, second = constraints[0].param, constraints[1].param
        raise invalid(second, f"{first} and {second} are both given: only one constraint is allowed")
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


# ---- sampling parameters ----


@dataclass(frozen=True, slots=True)
class GenerationParams:
    """The parameters of a body, checked as far as that is possible without its tokens."""

    sampling: SamplingParams
    num_logprobs: int | None = None
    echo: bool = False
    task: str = "generate"  # of the engine's requests
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
    _check_generation(model, body)
    max_tokens = 1 if prompt_only else body.max_tokens
    fields: dict[str, Any] = {"max_tokens": _max_tokens(model, max_tokens, DEFAULT_COMPLETION_TOKENS)}
    if body.logprobs is not None:
        _check_num_logprobs(model, "logprobs", body.logprobs)
        fields["logprobs"] = body.logprobs
        if body.echo:
            fields["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    constraint = read_constraint(body)
    sampling = _sampling(model, body, fields, constraint)
    task = "prompt_logprobs" if prompt_only else "generate"
    return GenerationParams(sampling, body.logprobs, bool(body.echo), task, constraint, body.max_tokens)


def chat_params(model: ServedModel, body: ChatBody) -> GenerationParams:
    """Return the parameters of a chat."""
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs is given: it needs logprobs to be true", param="top_logprobs")
    _check_generation(model, body)
    is_new_name = body.max_completion_tokens is not None
    return conversation_params(
        model,
        body,
        max_tokens=body.max_completion_tokens if is_new_name else body.max_tokens,
        max_tokens_name="max_completion_tokens" if is_new_name else "max_tokens",
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        n=body.n or 1,
        constraint=read_constraint(body),
        prediction=None if body.prediction is None else body.prediction.text,
    )


def conversation_params(
    model: ServedModel,
    body: SampledBody,
    *,
    max_tokens: int | None,
    max_tokens_name: str = "max_tokens",
    num_logprobs: int | None = None,
    n: int = 1,
    stop: Sequence[str] = (),
    stop_name: str = "stop",
    constraint: ContentConstraint | None = None,
    prediction: str | None = None,
) -> GenerationParams:
    """Return the parameters of a conversation. Each API has its own names for some of them."""
    default = model.frontend.default_params.get("max_tokens")
    fields: dict[str, Any] = {}
    if num_logprobs is not None:
        _check_num_logprobs(model, "top_logprobs", num_logprobs)
        fields["logprobs"] = num_logprobs
        default = _max_tokens_with_logprobs(model, n, num_logprobs, default)
    fields["max_tokens"] = _max_tokens(model, max_tokens, default, max_tokens_name)
    if stop:
        _check_stops(model, stop_name, stop)
        fields["stop"] = stop
    if prediction is not None:
        fields["prediction"] = prediction
    return GenerationParams(
        _sampling(model, body, fields, constraint),
        num_logprobs,
        constraint=constraint,
        max_tokens=max_tokens,
        max_tokens_name=max_tokens_name,
    )


def _sampling(
    model: ServedModel, body: SampledBody, fields: dict[str, Any], constraint: ContentConstraint | None
) -> SamplingParams:
    if constraint is not None:
        fields["structured_outputs"] = constraint.structured_outputs()
    return SamplingParams(**{**model.frontend.default_params, **body.sampling(), **fields})


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


def _check_num_logprobs(model: ServedModel, name: str, num_logprobs: int) -> None:
    limit = model.options.max_logprobs
    if not 0 <= num_logprobs <= limit:
        message = f"{name} is {num_logprobs}: it must be an integer from 0 to {limit}"
        raise ApiError(400, message, param=name)


def _check_generation(model: ServedModel, body: GenerationBody) -> None:
    """Check the parameters that only completions and chats have.

    Lists that are longer than useful are refused, since every step reads them.
    """
    if body.stream_options is not None and body.stream_options.include_usage and not body.stream:
        raise ApiError(400, "stream_options is given: it needs stream to be true", param="stream_options")
    if body.prompt_logprobs is not None:
        if body.stream:
            message = "prompt_logprobs is given: it needs stream to be false"
            raise ApiError(400, message, param="prompt_logprobs")
        _check_num_logprobs(model, "prompt_logprobs", body.prompt_logprobs)
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


# ---- prompts ----


def prompts_of_body(model: ServedModel, body: CompletionBody, n: int) -> list[str | list[int]]:
    """Return the prompts of a body: one, or several."""
    prompt = body.prompt
    if isinstance(prompt, str):
        prompts: list[Any] = [prompt]
    elif not isinstance(prompt, list):
        raise _bad_prompt(f"prompt is of type {type(prompt).__name__}")
    elif not prompt:
        raise _bad_prompt("prompt is an empty list")
    else:
        prompts = [prompt] if isinstance(prompt[0], int) else prompt
    check_answers(model, len(prompts), n)
    for number, prompt in enumerate(prompts):
        if not isinstance(prompt, str | list):
            raise _bad_prompt(f"prompt[{number}] is of type {type(prompt).__name__}")
    return prompts


def check_answers(model: ServedModel, num_prompts: int, n: int) -> None:
    limit = model.options.max_answers
    if num_prompts * n > limit:
        raise ApiError(
            400,
            f"prompt has {num_prompts} items and n is {n}: at most {limit} answers are allowed in one request",
            code="too_many_answers",
            param="prompt" if num_prompts > n else "n",
        )


def _bad_prompt(problem: str) -> ApiError:
    return invalid("prompt", f"{problem}: it must be a text, a list of token ids, or a list of either")


def prepare_completion(
    model: ServedModel,
    body: CompletionBody,
    params: GenerationParams,
    prompts: list[str | list[int]],
    context: RequestContext,
) -> list[OutputProcessor]:
    """Tokenize and check the prompts. Return an output processor, which holds the requests, for each of them."""
    tokenizer = model.frontend.tokenizer
    processors = []
    _check_listed(model, params, len(prompts))
    for prompt in prompts:
        text = prompt if isinstance(prompt, str) else None
        if text is not None and tokenizer is not None:
            model.frontend.input_processor.check_characters(len(text))
            prompt = tokenizer.encode(text, body.add_special_tokens is not False)
        elif bool in set(map(type, prompt)):  # Python takes them for 0 and 1
            raise _bad_prompt("prompt has true or false among its token ids")
        if isinstance(prompt, list):
            _check_prompt_tokens(model, len(prompt))
        with params.translated_errors():
            processor = model.frontend.prepare(
                model.next_id("g"), prompt, params.sampling, context, text, params.task
            )
        _check_context(model, params, processor)
        processors.append(processor)
    _check_logprobs(model, params, processors)
    return processors


def chat_request(body: ChatBody) -> ChatRequest:
    """Return the conversation of a chat. Raise RequestError if it is not valid."""
    budget = body.max_reasoning_tokens
    if body.thinking_token_budget not in (None, NO_BUDGET):
        if budget is not None:
            message = "max_reasoning_tokens and thinking_token_budget are both given: they mean the same"
            raise ApiError(400, message, param="thinking_token_budget")
        budget = body.thinking_token_budget
    chat = tokenized_chat(body)
    tools, choice = selected_tools(chat.tools, body.tool_choice)
    return replace(
        chat,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning_effort=body.reasoning_effort,
        max_reasoning_tokens=budget,
    )


def tokenized_chat(body: ChatBody | TokenizeBody) -> ChatRequest:
    """Return those parts of a conversation that the prompt depends on."""
    continues = bool(body.continue_final_message)
    adds_prompt = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    return ChatRequest(
        [message.set_fields() for message in body.messages or ()],
        checked_tools(body.tools),
        template_kwargs=body.chat_template_kwargs or {},
        add_generation_prompt=adds_prompt,
        continue_final_message=continues,
    )


def prepare_conversation(
    model: ServedModel, chat: ChatRequest, params: GenerationParams, context: RequestContext
) -> list[OutputProcessor]:
    """Render and check a conversation of any API. Return an output processor, which holds its requests, in a list."""
    check_tokenizer(model)
    contents = (message.get("content") or "" for message in chat.messages)
    # Checked before the template is rendered, which takes time too.
    min_characters = sum(map(_num_content_characters, contents)) + num_characters([*chat.offered_tools])
    model.frontend.input_processor.check_characters(min_characters)
    _check_listed(model, params, 1)
    with params.translated_errors():
        processor = model.frontend.prepare_chat(model.next_id("g"), chat, params.sampling, context)
    _check_prompt_tokens(model, len(processor.prompt_token_ids))
    _check_prediction(model, processor)
    _check_context(model, params, processor)
    _check_logprobs(model, params, [processor], "top_logprobs")
    return [processor]


def _num_content_characters(content: Any) -> int:
    return len(content) if isinstance(content, str) else sum(len(part.get("text") or "") for part in content)


def check_tokenizer(model: ServedModel) -> None:
    if model.frontend.tokenizer is None:
        raise ApiError(
            400, "this model has no tokenizer: send token ids to /v1/completions", param="messages"
        )


def _check_listed(model: ServedModel, params: GenerationParams, num_prompts: int) -> None:
    num_answers = num_prompts * params.sampling.n
    model.frontend.input_processor.check_listed(params.sampling, num_answers, model.options.max_listed_tokens)


def _check_prediction(model: ServedModel, processor: OutputProcessor) -> None:
    """Predictions are limited like prompts: they are tokenized, indexed and kept like these."""
    limit, num_tokens = (
        model.options.max_prompt_tokens,
        len(processor.answers[0].request.spec.prediction_ids or ()),
    )
    if limit is not None and num_tokens > limit:
        message = f"prediction has {num_tokens} tokens: at most {limit} are allowed on this server"
        raise ApiError(400, message, param="prediction")


def _check_prompt_tokens(model: ServedModel, num_tokens: int) -> None:
    limit = model.options.max_prompt_tokens
    if limit is not None and num_tokens > limit:
        raise context_length_error(f"it has {num_tokens} tokens: at most {limit} are allowed on this server")


def _check_context(model: ServedModel, params: GenerationParams, processor: OutputProcessor) -> None:
    """With --strict, refuse a request whose prompt and max_tokens do not fit into the context together."""
    num_prompt, max_tokens = len(processor.prompt_token_ids), params.max_tokens or 0
    if model.options.strict and num_prompt + max_tokens > model.frontend.max_model_len:
        raise ApiError(
            400,
            f"the prompt has {num_prompt} tokens and {params.max_tokens_name} is {max_tokens}: together they must be "
            f"at most {model.frontend.max_model_len} (max_model_len)",
            code="context_length_exceeded",
            param=params.max_tokens_name,
        )


def _check_logprobs(
    model: ServedModel, params: GenerationParams, processors: list[OutputProcessor], name: str = "logprobs"
) -> None:
    sizes = [(len(item.prompt_token_ids), item.answers[0].request.max_tokens) for item in processors]
    limit = model.options.max_answer_logprobs
    model.frontend.input_processor.check_logprobs(params.sampling, sizes, limit, name)
