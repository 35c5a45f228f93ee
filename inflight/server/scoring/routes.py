"""/v1/embeddings, /classify, /score and /rerank."""

from __future__ import annotations

import secrets
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from inflight.scoring import Task
from inflight.server.engine_response import RequestHead
from inflight.server.http.body import read_json
from inflight.server.openapi import documented
from inflight.server.scoring.formatters import write_classes, write_embeddings, write_ranking, write_scores
from inflight.server.scoring.response import PoolingResponse, PoolingSpec
from inflight.server.scoring.schemas import (
    ClassifyAnswer,
    ClassifyBody,
    EmbeddingsAnswer,
    EmbeddingsBody,
    PoolingBody,
    RerankAnswer,
    RerankBody,
    ScoreAnswer,
    ScoreBody,
    ScoringBody,
)
from inflight.server.state import caller_of, state_of
from inflight.server.texts import read_documents, read_inputs, read_texts

router = APIRouter()

T = TypeVar("T", bound=PoolingBody)
ERRORS = (409, 429, 500, 504)


@router.post("/v1/embeddings", **documented(EmbeddingsBody, EmbeddingsAnswer, *ERRORS))
async def embeddings(request: Request) -> Response:
    """The embeddings of texts, or of token ids."""
    state = state_of(request)
    body = await _read(request, EmbeddingsBody, "embed")
    texts = read_inputs(body.input, state.options.max_documents)
    call = partial(
        state.engine.embed,
        texts,
        prompt_name=body.prompt_name,
        dimensions=body.dimensions,
        **_truncation(body),
    )
    write = partial(write_embeddings, base64=body.encoding_format == "base64")
    return _response(request, body, "embed", len(texts), call, write, texts="input")


@router.post("/classify", **documented(ClassifyBody, ClassifyAnswer, *ERRORS))
@router.post("/v1/classify", **documented(ClassifyBody, ClassifyAnswer, *ERRORS))
async def classify(request: Request) -> Response:
    """One number for each of the model's labels, for each text."""
    state = state_of(request)
    body = await _read(request, ClassifyBody, "classify")
    texts = read_inputs(body.input, state.options.max_documents)
    call = partial(state.engine.classify, texts, scale=body.scale, **_truncation(body))
    return _response(request, body, "classify", len(texts), call, write_classes, texts="input")


@router.post("/score", **documented(ScoreBody, ScoreAnswer, *ERRORS))
@router.post("/v1/score", **documented(ScoreBody, ScoreAnswer, *ERRORS))
async def score(request: Request) -> Response:
    """How well each text answers another: one for all, or one for each."""
    state = state_of(request)
    body = await _read(request, ScoreBody, "score")
    first, second = ("queries", "documents") if body.text_1 is None else ("text_1", "text_2")
    limit = state.options.max_documents
    queries = read_texts(first, getattr(body, first), limit)
    documents = read_texts(second, getattr(body, second), limit)
    query = queries[0] if len(queries) == 1 else queries
    call = partial(state.engine.score, query, documents, **_scoring(body))
    names = {"query": first, "documents": second}
    return _response(request, body, "score", len(documents), call, write_scores, **names)


@router.post("/rerank", **documented(RerankBody, RerankAnswer, *ERRORS))
@router.post("/v1/rerank", **documented(RerankBody, RerankAnswer, *ERRORS))
@router.post("/v2/rerank", **documented(RerankBody, RerankAnswer, *ERRORS))
async def rerank(request: Request) -> Response:
    """Documents by how well they answer a query, the best first."""
    state = state_of(request)
    body = await _read(request, RerankBody, "rerank")
    documents = read_documents(body.documents, state.options.max_documents)
    call = partial(state.engine.rerank, body.query, documents, body.top_n, **_scoring(body))
    write = partial(write_ranking, documents=body.documents if body.return_documents else None)
    return _response(request, body, "rerank", len(documents), call, write)


async def _read(request: Request, schema: type[T], task: Task) -> T:
    """A body for a task that the model can do."""
    state, options = state_of(request), state_of(request).options
    body = await read_json(request, schema, options)
    state.check_model(body.model)
    state.check_task(task)
    return body


def _truncation(body: EmbeddingsBody | ClassifyBody) -> dict[str, Any]:
    limit = body.truncate_prompt_tokens
    if limit == -1:
        return {"truncate": True}
    return {"truncate": bool(body.truncate), "truncate_prompt_tokens": limit}


def _scoring(body: ScoringBody) -> dict[str, Any]:
    return {
        "scale": body.scale,
        "instruction": body.instruction,
        "truncate": bool(body.truncate),
        "max_tokens_per_doc": body.max_tokens_per_doc,
    }


def _response(
    request: Request, body: PoolingBody, task: Task, num_texts: int, call: Any, write: Any, **names: str
) -> Response:
    state, caller = state_of(request), caller_of(request)
    request_id = body.request_id or f"{task}-{secrets.token_hex(16)}"
    head = RequestHead(
        request.scope["route"].path,
        request_id,
        state.check_model(body.model),
        stream=False,
        priority=body.priority or 0,
        user=body.user,
    )
    spec = PoolingSpec(head, task, num_texts, body.cache_salt or "", call, write, names)
    return PoolingResponse(state, caller, spec)
