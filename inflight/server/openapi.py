"""The document of the API. Bodies are read by hand, within limits, so the document is told of them by hand."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from inflight.server.schemas import ErrorBody

_REF = "#/components/schemas/{model}"
_seen: dict[str, tuple[type[BaseModel], str]] = {}  # models that routes mention, and how they are used

_ERRORS = {
    400: "A parameter is wrong; `param` names it.",
    401: "The API key is missing or unknown.",
    403: "The Host header names none that is answered here.",
    404: "There is no such thing.",
    408: "The body did not come in time.",
    409: "The request was cancelled by another.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "Too many requests: of this key, or in the queue. `Retry-After` says when to try again.",
    500: "The engine failed while it computed this.",
    503: "The engine is not there, or the server shuts down.",
    504: "The request took too long.",
    529: "The engine is not there, or the server shuts down.",
}


def respond(content: BaseModel, status: int = 200) -> Response:
    return Response(content.model_dump_json(), status, media_type="application/json")


def _ref(model: type[BaseModel], mode: str) -> dict[str, str]:
    _seen[model.__name__] = (model, mode)
    return {"$ref": _REF.format(model=model.__name__)}


def documented(
    body: type[BaseModel] | None,
    answer: type[BaseModel],
    *more_errors: int,
    events: type[BaseModel] | None = None,
    error: type[BaseModel] = ErrorBody,
) -> dict[str, Any]:
    """Arguments of a route: what it takes, what it gives, and with which errors it refuses, of which shape."""
    content: dict[str, Any] = {"application/json": {"schema": _ref(answer, "serialization")}}
    errors = {401, 403, *more_errors}
    if body is not None:
        errors |= {400, 404, 408, 413, 415, 503}
    if events is not None:
        content["text/event-stream"] = {"schema": _ref(events, "serialization")}
        errors |= {429, 500, 504}
    shape = {"application/json": {"schema": _ref(error, "serialization")}}
    responses: dict[int, Any] = {200: {"description": answer.__doc__ or answer.__name__, "content": content}}
    for status in sorted(errors):
        same = answer.__name__ == "HealthStatus" and status == 503
        responses[status] = {"description": _ERRORS[status], "content": content if same else shape}
    found: dict[str, Any] = {"responses": responses, "response_model": None}
    if body is not None:
        schema = {"application/json": {"schema": _ref(body, "validation")}}
        found["openapi_extra"] = {"requestBody": {"required": True, "content": schema}}
    return found


def document(app: FastAPI, with_keys: bool) -> dict[str, Any]:
    """The whole document, with every schema that a route mentions."""
    if app.openapi_schema is None:
        found = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        _, schemas = models_json_schema(
            [(model, mode) for model, mode in _seen.values()],  # type: ignore[misc]
            ref_template=_REF,
        )
        components = found.setdefault("components", {})
        components["schemas"] = {**components.get("schemas", {}), **schemas["$defs"]}
        if with_keys:
            components["securitySchemes"] = {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            }
            found["security"] = [{"key": []}, {"x-api-key": []}]
        for path, methods in found["paths"].items():
            for operation in methods.values():
                _parameters(path, operation)
        app.openapi_schema = found
    return app.openapi_schema


def _parameters(path: str, operation: dict[str, Any]) -> None:
    """Path parameters are read from the request itself, so no signature tells of them."""
    names = [part[1:-1].partition(":")[0] for part in path.split("/") if part.startswith("{")]
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in names
        ]
