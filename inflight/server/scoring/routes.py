"""/v1/embeddings, /classify, /score and /rerank."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from inflight.errors import EngineError, RequestError
from inflight.events import RequestRecord
from inflight.request import RequestOrigin
from inflight.scoring import Task
from inflight.server.engine_response import EngineCall, EngineResponse
from inflight.server.errors import ApiError, invalid
from inflight.server.observability.request_log import MAX_TEXT_RECORDS
from inflight.server.openapi import documented
from inflight.server.scoring.formatters import (
    AnswerHead,
    Pooled,
    write_classes,
    write_embeddings,
    write_ranking,
    write_scores,
)
from inflight.server.scoring.schemas import (
    ClassifyAnswer,
    ClassifyBody,
    EmbeddingsAnswer,
    EmbeddingsBody,
    RerankAnswer,
    RerankBody,
    ScoreAnswer,
    ScoreBody,
    ScoringBody,
    TextsBody,
)

router = APIRouter()

ERRORS = (409, 429, 500, 504)
LONG_ANSWER = 1 << 14  # numbers above which they are encoded in a thread


@router.post("/v1/embeddings", **documented(EmbeddingsBody, EmbeddingsAnswer, *ERRORS))
async def embeddings(request: Request) -> Response:
    """Compute the embeddings of texts, given as text or token ids."""
    call = await EngineCall.read(request, EmbeddingsBody, "embed", "embed-")
    body, engine, limit = call.body, call.model.engine, call.model.options.max_documents
    texts = read_inputs(body.input, limit)
    compute = partial(
        engine.embed,
        texts,
        prompt_name=body.prompt_name,
        dimensions=body.dimensions,
        **_truncation(body),
    )
    write = partial(write_embeddings, base64=body.encoding_format == "base64")
    pooling = PoolingCall("embed", len(texts), compute, write, {"texts": "input"})
    return EngineResponse(call, pooling.answer, body.user, awaited="result")


@router.post("/classify", **documented(ClassifyBody, ClassifyAnswer, *ERRORS))
@router.post("/v1/classify", **documented(ClassifyBody, ClassifyAnswer, *ERRORS))
async def classify(request: Request) -> Response:
    """Compute a number for each of the model's labels, for each text."""
    call = await EngineCall.read(request, ClassifyBody, "classify", "classify-")
    body, engine, limit = call.body, call.model.engine, call.model.options.max_documents
    texts = read_inputs(body.input, limit)
    compute = partial(engine.classify, texts, scale=body.scale, **_truncation(body))
    pooling = PoolingCall("classify", len(texts), compute, write_classes, {"texts": "input"})
    return EngineResponse(call, pooling.answer, body.user, awaited="result")


@router.post("/score", **documented(ScoreBody, ScoreAnswer, *ERRORS))
@router.post("/v1/score", **documented(ScoreBody, ScoreAnswer, *ERRORS))
async def score(request: Request) -> Response:
    """Score how well each document answers a query: the same query for all, or one for each."""
    call = await EngineCall.read(request, ScoreBody, "score", "score-")
    body, engine, limit = call.body, call.model.engine, call.model.options.max_documents
    first, second = ("queries", "documents") if body.text_1 is None else ("text_1", "text_2")
    queries = read_texts(first, getattr(body, first), limit)
    documents = read_texts(second, getattr(body, second), limit)
    query = queries[0] if len(queries) == 1 else queries
    compute = partial(engine.score, query, documents, **_scoring(body))
    params = {"query": first, "documents": second}
    pooling = PoolingCall("score", len(documents), compute, write_scores, params)
    return EngineResponse(call, pooling.answer, body.user, awaited="result")


@router.post("/rerank", **documented(RerankBody, RerankAnswer, *ERRORS))
@router.post("/v1/rerank", **documented(RerankBody, RerankAnswer, *ERRORS))
@router.post("/v2/rerank", **documented(RerankBody, RerankAnswer, *ERRORS))
async def rerank(request: Request) -> Response:
    """Sort documents by how well they answer a query, best first."""
    call = await EngineCall.read(request, RerankBody, "rerank", "rerank-")
    body, engine, limit = call.body, call.model.engine, call.model.options.max_documents
    documents = read_documents(body.documents, limit)
    compute = partial(engine.rerank, body.query, documents, body.top_n, **_scoring(body))
    write = partial(write_ranking, documents=body.documents if body.return_documents else None)
    pooling = PoolingCall("rerank", len(documents), compute, write, {})
    return EngineResponse(call, pooling.answer, body.user, awaited="result")


def _truncation(body: TextsBody) -> dict[str, Any]:
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


@dataclass(frozen=True, slots=True)
class PoolingCall:
    """One call of the engine for several texts. All results are sent at once when the last one is computed."""

    task: Task
    num_texts: int
    call: Callable[..., Awaitable[Pooled]]  # a method of the engine, with the arguments of this task
    write: Callable[[AnswerHead, Any], bytes]
    params: dict[str, str]  # the body's names of the call's parameters, where they differ

    async def answer(self, response: EngineResponse) -> None:
        state, model, logged = response.state, response.model, response.logged
        engine_id = model.next_id("p")
        logged.task, logged.num_answers = self.task, self.num_texts
        engine_ids = [f"{engine_id}/{index}" for index in range(min(self.num_texts, MAX_TEXT_RECORDS))]
        state.request_log.set_engine_ids(logged, engine_ids)
        logged.abort = partial(self._abort, response, engine_id)
        try:
            pooled = await self.call(
                request_id=engine_id,
                **asdict(response.context),
                origin=RequestOrigin(logged.request_id, key=response.caller.name, route=logged.route),
                on_record=partial(self._count, response),
            )
        except RequestError as error:
            param = None if error.param is None else self.params.get(error.param, error.param)
            raise ApiError(400, str(error), code=error.code, param=param) from None
        except EngineError:
            if logged.outcome != "cancelled":
                raise
            disconnected = response.cancel_scope.reason == "disconnect"
            raise response.interruption("disconnect" if disconnected else "cancelled") from None
        head = AnswerHead(logged.request_id, logged.created, response.model_name)
        is_long = self.num_texts * model.pooling_size > LONG_ANSWER
        content = await state.in_thread_if(is_long, response.caller, lambda: self.write(head, pooled))
        await response.respond(Response(content, media_type="application/json"))

    async def _abort(self, response: EngineResponse, engine_id: str) -> int:
        """Abort the texts in the engine, and interrupt the request also if none is there yet."""
        num_freed = await response.model.engine.abort(engine_id)
        if response.cancel_scope.reason != "disconnect":
            response.cancel_scope.end("cancelled")
        return num_freed

    def _count(self, response: EngineResponse, record: RequestRecord) -> None:
        """Count a text that is finished."""
        state, logged, usage = response.state, response.logged, response.caller.usage
        if not logged.queued:
            logged.queued, logged.first_token_at = True, time.perf_counter()
            response.cancel_scope.first_token()
            usage.add_request(0)
            state.metrics.requests[self.task] += 1
        usage.num_prompt_tokens += record.num_prompt_tokens
        usage.add_queue_time(record, 0.0)
        logged.num_prompt_tokens += record.num_prompt_tokens
        state.request_log.answer_ended(logged, record)
        state.metrics.record_text(self.task, record)


# ---- reading texts ----
# Bodies leave them unvalidated: their number and kind are checked here before anything else is done with them.

_NAMES = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}


def read_inputs(value: Any, limit: int) -> list[str | list[int]]:
    """Return the texts of an `input`: one or several, each as text or as token ids."""
    allowed = "a text, a list of token ids, or a list of either"
    if not isinstance(value, str | list):
        raise _wrong("input", value, allowed)
    if (
        value
        and isinstance(value, list)
        and isinstance(value[0], int | float)
        and list not in map(type, value)
    ):
        return [value]  # token ids, each of which is checked later
    items = [value] if isinstance(value, str) else value
    _check_items("input", items, limit, (str, list), allowed)
    return items


def read_texts(name: str, value: Any, limit: int) -> list[str]:
    """Return one or several texts."""
    if isinstance(value, str):
        return [value]
    allowed = "a text, or a list of texts"
    if not isinstance(value, list):
        raise _wrong(name, value, allowed)
    _check_items(name, value, limit, (str,), allowed)
    return value


def read_documents(value: Any, limit: int) -> list[str]:
    """Return the texts of documents, which are texts or objects with a text."""
    allowed = "a list of texts, or of objects with a text"
    if not isinstance(value, list):
        raise _wrong("documents", value, allowed)
    _check_items("documents", value, limit, (str, dict), allowed)
    return [_text_of(number, document) for number, document in enumerate(value)]


def _text_of(number: int, document: str | Mapping[str, Any]) -> str:
    if isinstance(document, str):
        return document
    text = document.get("text")
    if not isinstance(text, str):
        raise invalid("documents", f"documents[{number}] has no text: an object must have it under 'text'")
    return text


def _check_items(name: str, items: list[Any], limit: int, kinds: tuple[type, ...], allowed: str) -> None:
    if not items:
        raise invalid(name, f"{name} is an empty list: it must be {allowed}")
    if len(items) > limit:
        message = f"{name} has {len(items)} items: at most {limit} are allowed in one request"
        raise ApiError(400, message, code="too_many_documents", param=name)
    if not {*map(type, items)} <= {*kinds}:
        number = next(number for number, item in enumerate(items) if type(item) not in kinds)
        raise _wrong(name, items[number], allowed, number)


def _wrong(name: str, value: Any, allowed: str, number: int | None = None) -> ApiError:
    path = name if number is None else f"{name}[{number}]"
    actual = _NAMES.get(type(value), "a number")
    return invalid(name, f"{path} is {actual}: {name} must be {allowed}")
