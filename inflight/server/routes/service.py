"""Models, version and tokenization."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from inflight import __version__
from inflight.errors import PromptError, shown
from inflight.frontend.chat import num_characters
from inflight.frontend.text.tokenizer import Tokenizer
from inflight.server.access.keys import counted
from inflight.server.anthropic.schemas import ModelInfo, ModelInfos
from inflight.server.errors import ApiError, is_anthropic
from inflight.server.http.bodies import read_json
from inflight.server.openapi import documented, respond
from inflight.server.prepare import check_tokenizer, tokenized_chat
from inflight.server.routes.schemas import (
    DetokenizeBody,
    DetokenizedText,
    Model,
    Models,
    PoolingHead,
    TokenizeBody,
    Tokens,
    Version,
)
from inflight.server.state import ServedModel, ServerState, caller_of, state_of

router = APIRouter()


@router.get("/v1/models", **documented(None, Models))
async def models(request: Request) -> Response:
    """List the names of the served model, in Anthropic's format if the request has the header anthropic-version."""
    state = state_of(request)
    if is_anthropic(request.scope):
        names = state.model.names
        infos = [_model_info(state.model, name, state.started) for name in names]
        return respond(ModelInfos(data=infos, first_id=names[0], last_id=names[-1]))
    return respond(Models(data=[_model(state.model, name, state.started) for name in state.model.names]))


@router.get("/v1/models/{model:path}", **documented(None, Model, 404))
async def model(request: Request) -> Response:
    """Return one served model, in Anthropic's format if the request has the header anthropic-version."""
    state = state_of(request)
    describe = _model_info if is_anthropic(request.scope) else _model
    return respond(describe(*state.find_model(request.path_params["model"]), state.started))


def _model(model: ServedModel, name: str, created: int) -> Model:
    facts = model.client.facts.pooling
    pooling = None
    if facts is not None:
        pooling = PoolingHead(
            size=facts.size,
            scale="cosine" if facts.task == "embed" else facts.scale,
            labels=list(facts.labels),
            dimensions=None if facts.dimensions is None else list(facts.dimensions),
            prompts=list(facts.prompts),
        )
    length = model.frontend.max_model_len
    return Model(id=name, created=created, max_model_len=length, tasks=list(model.tasks), pooling=pooling)


def _model_info(model: ServedModel, name: str, created: int) -> ModelInfo:
    length, limit = model.frontend.max_model_len, model.options.max_output_tokens
    return ModelInfo(
        id=name,
        display_name=name,
        created_at=datetime.fromtimestamp(created, UTC),
        max_input_tokens=length,
        max_tokens=length if limit is None else min(length, limit),
    )


@router.get("/version", **documented(None, Version))
async def version() -> Response:
    """Return the server's version."""
    return respond(Version(version=__version__))


# ---- tokens ----


@router.post("/tokenize", **documented(TokenizeBody, Tokens))
async def tokenize(request: Request) -> Response:
    """Return the token ids of a prompt or of messages."""
    state, options = state_of(request), state_of(request).options
    body = await read_json(request, TokenizeBody, options)
    model, _ = state.find_model(body.model)
    tokenizer = _tokenizer(model)

    def answer() -> Response:
        check_size(state, *_characters(body))
        if body.prompt is not None:
            token_ids = tokenizer.encode(body.prompt, body.add_special_tokens is not False)
        else:
            check_tokenizer(model)
            _, token_ids = model.frontend.encode_chat(tokenized_chat(body), text_limit(state))
        token_strs = [tokenizer.token(token_id) for token_id in token_ids] if body.return_token_strs else None
        length = model.frontend.max_model_len
        return respond(
            Tokens(count=len(token_ids), max_model_len=length, tokens=token_ids, token_strs=token_strs)
        )

    async with counted(state.admission, caller_of(request)):
        return await state.in_service_thread(answer)


@router.post("/detokenize", **documented(DetokenizeBody, DetokenizedText))
async def detokenize(request: Request) -> Response:
    """Return the text of token ids."""
    state, options = state_of(request), state_of(request).options
    body = await read_json(request, DetokenizeBody, options)
    model, _ = state.find_model(body.model)
    tokenizer, size = _tokenizer(model), model.frontend.input_processor.vocab_size
    check_size(state, "tokens", len(body.tokens), "ids")

    def answer() -> Response:
        invalid = next((token_id for token_id in body.tokens if not 0 <= token_id < size), None)
        if invalid is not None:
            raise PromptError(
                f"tokens has the token id {shown(invalid)}: ids must be from 0 to {size - 1}", param="tokens"
            )
        return respond(DetokenizedText(prompt=tokenizer.decode(body.tokens, skip_special_tokens=False)))

    async with counted(state.admission, caller_of(request)):
        return await state.in_service_thread(answer)


def _characters(body: TokenizeBody) -> tuple[str, int, str]:
    if body.prompt is not None:
        return "prompt", len(body.prompt), "characters"
    messages = [message.set_fields() for message in body.messages or ()]
    return "messages", num_characters([messages, body.tools, body.chat_template_kwargs]), "characters"


def text_limit(state: ServerState) -> Callable[[int], None]:
    """Return a check of the characters of a rendered conversation, where numbers may have many digits."""
    return lambda num_characters: check_size(state, "messages", num_characters, "characters")


def check_size(state: ServerState, name: str, size: int, unit: str) -> None:
    limit = state.options.max_tokenize_size
    if size > limit:
        message = f"{name} has {size} {unit}: at most {limit} are allowed"
        raise ApiError(400, message, code="text_too_long", param=name)


def _tokenizer(model: ServedModel) -> Tokenizer:
    if model.frontend.tokenizer is None:
        raise ApiError(400, "the model is served without a tokenizer", code="no_tokenizer")
    return model.frontend.tokenizer
