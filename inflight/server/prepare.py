"""Turn the prompts and conversations of bodies into engine requests. Long work runs in a thread."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from inflight.frontend import (
    ChatRequest,
    OutputProcessor,
    checked_tools,
    context_length_error,
    tool_choice_of,
)
from inflight.frontend.chat import num_characters
from inflight.server.access.keys import Caller
from inflight.server.errors import ApiError
from inflight.server.openai.schemas import ChatBody, CompletionBody
from inflight.server.params import GenerationParams
from inflight.server.routes.schemas import TokenizeBody
from inflight.server.state import ServedModel

NO_BUDGET = -1  # vLLM's value for no limit on thinking


def split_prompts(model: ServedModel, body: CompletionBody, n: int) -> list[str | list[int]]:
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
    message = f"{problem}: it must be a text, a list of token ids, or a list of either"
    return ApiError(400, message, code="invalid_value", param="prompt")


def prepare_completion(
    model: ServedModel,
    caller: Caller,
    body: CompletionBody,
    params: GenerationParams,
    prompts: list[str | list[int]],
) -> list[OutputProcessor]:
    """Return what runs and reads each prompt's answers. Tokenizes: this takes long for long texts."""
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
                model.next_id("g"),
                prompt,
                params.sampling,
                priority=body.priority or 0,
                tenant=caller.tenant(body.user),
                cache_salt=caller.salt(body.cache_salt or ""),
                text=text,
                kind=params.kind,
            )
        _check_context(model, params, processor)
        processors.append(processor)
    _check_logprobs(model, params, processors)
    return processors


def _check_logprobs(
    model: ServedModel, params: GenerationParams, processors: list[OutputProcessor], name: str = "logprobs"
) -> None:
    sizes = [(len(item.prompt_token_ids), item.answers[0].request.max_tokens) for item in processors]
    limit = model.options.max_answer_logprobs
    model.frontend.input_processor.check_logprobs(params.sampling, sizes, limit, name)


def _check_listed(model: ServedModel, params: GenerationParams, num_prompts: int) -> None:
    num_answers = num_prompts * params.sampling.n
    model.frontend.input_processor.check_listed(params.sampling, num_answers, model.options.max_listed_tokens)


def chat_request(body: ChatBody) -> ChatRequest:
    """Return the conversation of a chat. Raise RequestError if it is not valid."""
    budget = body.max_reasoning_tokens
    if body.thinking_token_budget not in (None, NO_BUDGET):
        if budget is not None:
            message = "max_reasoning_tokens and thinking_token_budget are both given: they mean the same"
            raise ApiError(400, message, param="thinking_token_budget")
        budget = body.thinking_token_budget
    return replace(
        tokenized_chat(body),
        tool_choice=tool_choice_of(body.tool_choice),
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


def prepare_chat(
    model: ServedModel,
    caller: Caller,
    chat: ChatRequest,
    params: GenerationParams,
    *,
    priority: int = 0,
    user: str | None = None,
    cache_salt: str = "",
) -> list[OutputProcessor]:
    """Return what runs and reads a conversation's answers, for every API that has conversations.

    Renders the chat template in another process, so it must not be called on the event loop.
    """
    check_tokenizer(model)
    contents = (message.get("content") or "" for message in chat.messages)
    # Checked before the template is rendered, which takes time too.
    min_characters = sum(map(_num_content_characters, contents)) + num_characters([*chat.offered_tools])
    model.frontend.input_processor.check_characters(min_characters)
    _check_listed(model, params, 1)
    with params.translated_errors():
        processor = model.frontend.prepare_chat(
            model.next_id("g"),
            chat,
            params.sampling,
            priority=priority,
            tenant=caller.tenant(user),
            cache_salt=caller.salt(cache_salt),
        )
    _check_prompt_tokens(model, len(processor.prompt_token_ids))
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


def _check_prompt_tokens(model: ServedModel, num_tokens: int) -> None:
    limit = model.options.max_prompt_tokens
    if limit is not None and num_tokens > limit:
        raise context_length_error(f"it has {num_tokens} tokens: at most {limit} are allowed on this server")
