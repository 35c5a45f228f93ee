"""Models, version, tokenization, and reports of requests."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from inflight import __version__
from inflight.errors import PromptError
from inflight.server.access.admission import counted
from inflight.server.errors import ApiError
from inflight.server.http.body import read_json
from inflight.server.observability.request_report import report_of
from inflight.server.openapi import documented, respond
from inflight.server.prepare import check_tokenizer, tokenized_chat
from inflight.server.schemas.service import Cancelled, Model, Models, PoolingHead, RequestReport, Version
from inflight.server.schemas.tokens import DetokenizeBody, DetokenizedText, TokenizeBody, Tokens
from inflight.server.state import ServerState, caller_of, state_of
from inflight.text import Tokenizer

router = APIRouter()


@router.get("/v1/models", **documented(None, Models))
async def models(request: Request) -> Response:
    """List the names of the served model."""
    state = state_of(request)
    return respond(Models(data=[_model(state, name) for name in state.names]))


@router.get("/v1/models/{model:path}", **documented(None, Model, 404))
async def model(request: Request) -> Response:
    """Return one served model."""
    state = state_of(request)
    return respond(_model(state, state.check_model(request.path_params["model"])))


def _model(state: ServerState, name: str) -> Model:
    facts = state.client.facts.pooling
    pooling = None
    if facts is not None:
        pooling = PoolingHead(
            size=facts.size,
            scale="cosine" if facts.task == "embed" else facts.scale,
            labels=list(facts.labels),
            dimensions=None if facts.dimensions is None else list(facts.dimensions),
            prompts=list(facts.prompts),
        )
    length = state.frontend.max_model_len
    return Model(
        id=name, created=state.started, max_model_len=length, tasks=list(state.tasks), pooling=pooling
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
    state.check_model(body.model)
    tokenizer = _tokenizer(state)

    def answer() -> Response:
        check_size(state, *_characters(body))
        if body.prompt is not None:
            token_ids = tokenizer.encode(body.prompt, body.add_special_tokens is not False)
        else:
            check_tokenizer(state)
            _, token_ids = state.frontend.encode_chat(tokenized_chat(body))
        token_strs = [tokenizer.token(token_id) for token_id in token_ids] if body.return_token_strs else None
        length = state.frontend.max_model_len
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
    state.check_model(body.model)
    tokenizer, size = _tokenizer(state), state.frontend.input_processor.vocab_size
    check_size(state, "tokens", len(body.tokens), "ids")

    def answer() -> Response:
        invalid = next((token_id for token_id in body.tokens if not 0 <= token_id < size), None)
        if invalid is not None:
            raise PromptError(
                f"tokens has the token id {invalid!r:.100}: ids must be from 0 to {size - 1}", param="tokens"
            )
        return respond(DetokenizedText(prompt=tokenizer.decode(body.tokens, skip_special_tokens=False)))

    async with counted(state.admission, caller_of(request)):
        return await state.in_service_thread(answer)


def _characters(body: TokenizeBody) -> tuple[str, int, str]:
    if body.prompt is not None:
        return "prompt", len(body.prompt), "characters"
    messages = [message.given() for message in body.messages or ()]
    return "messages", num_characters([messages, body.tools, body.chat_template_kwargs]), "characters"


def num_characters(value: Any) -> int:
    """Count the characters of everything that a template may put into the prompt, not only message contents."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(num_characters, (*value, *value.values())))
    return sum(map(num_characters, value)) if isinstance(value, list) else 0


def check_size(state: ServerState, name: str, size: int, unit: str) -> None:
    limit = state.options.max_tokenize_size
    if size > limit:
        message = f"{name} has {size} {unit}: at most {limit} are allowed"
        raise ApiError(400, message, code="text_too_long", param=name)


def _tokenizer(state: ServerState) -> Tokenizer:
    if state.frontend.tokenizer is None:
        raise ApiError(400, "the model is served without a tokenizer", code="no_tokenizer")
    return state.frontend.tokenizer


# ---- requests ----


@router.get("/v1/requests/{request_id}", **documented(None, RequestReport, 404))
async def request_report(request: Request) -> Response:
    """Report what happened to a request of yours and why it took so long."""
    state = state_of(request)
    logged = state.request_log.find(caller_of(request), request.path_params["request_id"])
    return respond(await report_of(state, logged))


@router.delete("/v1/requests/{request_id}", **documented(None, Cancelled, 404, 503))
async def cancel_request(request: Request) -> Response:
    """Cancel a request of yours; its answers end with the finish reason "abort"."""
    state = state_of(request)
    logged = state.request_log.find(caller_of(request), request.path_params["request_id"])
    freed = await state.request_log.cancel(logged)
    return respond(Cancelled(id=logged.request_id, cancelled=freed is not None, freed_blocks=freed or 0))
