"""The OpenAPI document. Routes read their bodies themselves, so their schemas are declared explicitly."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from inflight.server.schemas import ErrorBody

_REF = "#/components/schemas/{model}"
_seen: dict[str, tuple[type[BaseModel], str]] = {}  # models that routes use, and their mode

_ERRORS = {
    400: "A parameter is invalid; `param` names it.",
    401: "The API key is missing or unknown.",
    403: "The Host header is not allowed.",
    404: "Not found.",
    408: "The body did not arrive in time.",
    409: "The request was cancelled by another request.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "Too many requests of this key, or in the queue. `Retry-After` says when to retry.",
    500: "The engine failed while computing this request.",
    503: "The engine is not available, or the server is shutting down.",
    504: "The request took too long.",
    529: "The engine is not available, or the server is shutting down.",
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
    extra: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the arguments of a route that document its body, its answer and its errors.

    `extra` is added to the document of the route.
    """
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
    arguments: dict[str, Any] = {"responses": responses, "response_model": None, "openapi_extra": extra}
    if body is not None:
        schema = {"application/json": {"schema": _ref(body, "validation")}}
        arguments["openapi_extra"] = {"requestBody": {"required": True, "content": schema}}
    return arguments


def query_parameters(*parameters: tuple[str, str, str]) -> dict[str, Any]:
    """Return the `extra` of a route with optional query parameters: their names, types and descriptions."""
    return {
        "parameters": [
            {"name": name, "in": "query", "schema": {"type": kind}, "description": text}
            for name, kind, text in parameters
        ]
    }


def document(app: FastAPI, with_keys: bool) -> dict[str, Any]:
    """Return the whole document, with the schemas of all routes."""
    if app.openapi_schema is None:
        openapi = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        _, schemas = models_json_schema(
            [(model, mode) for model, mode in _seen.values()],  # type: ignore[misc]
            ref_template=_REF,
        )
        components = openapi.setdefault("components", {})
        components["schemas"] = {**components.get("schemas", {}), **schemas["$defs"]}
        if with_keys:
            components["securitySchemes"] = {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            }
            openapi["security"] = [{"key": []}, {"x-api-key": []}]
        for path, methods in openapi["paths"].items():
            for operation in methods.values():
                _parameters(path, operation)
        app.openapi_schema = openapi
    return app.openapi_schema


def _parameters(path: str, operation: dict[str, Any]) -> None:
    """Declare the path parameters, which routes read from the request and so have no signature."""
    names = [part[1:-1].partition(":")[0] for part in path.split("/") if part.startswith("{")]
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in names
        ]
