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

# Descriptions of fields by name, for those whose schema has none: several bodies share most of them.
FIELDS = {
    "add_generation_prompt": "Whether the rendered prompt ends where the assistant's answer begins.",
    "allowed_token_ids": "Only these tokens can be sampled.",
    "bad_words": "Texts that never appear in the answer.",
    "cache_control": "Accepted and ignored: prefixes are always cached.",
    "chat_template_kwargs": "Arguments for the chat template, such as enable_thinking.",
    "context_management": "Accepted if it asks for nothing: the conversation is never edited by the server.",
    "continue_final_message": "Continue a final assistant message instead of starting a new one.",
    "diagnostics": "Accepted and ignored.",
    "echo": "Return the prompt, too.",
    "frequency_penalty": "Subtracted from a token's logit for each time it occurs in the answer: -2 to 2.",
    "guided_choice": "The answer is one of these texts.",
    "guided_grammar": "The answer follows this grammar (Lark or EBNF).",
    "guided_json": "The answer is JSON that this schema allows.",
    "guided_regex": "The answer matches this regular expression.",
    "ignore_eos": "Continue past the end-of-sequence token.",
    "include": "Extra parts of the response, such as message.output_text.logprobs.",
    "include_stop_str_in_output": "Keep the stop string at the end of the answer.",
    "inference_geo": "Accepted and ignored.",
    "input": "The input: a text, or a list of items.",
    "instructions": "A system message for this response only.",
    "logit_bias": "Added to the logits of these tokens, by token id: -100 to 100.",
    "logprobs": "Return log-probabilities: for chats whether, for completions of how many tokens at each position.",
    "max_completion_tokens": "The most tokens of the answer, reasoning included.",
    "max_output_tokens": "The most tokens of the response, reasoning included.",
    "max_reasoning_tokens": "The most tokens of reasoning.",
    "max_tokens": "The most tokens of the answer.",
    "messages": "The conversation, oldest message first.",
    "metadata": "Up to 16 values that are stored with the response, or the user's id.",
    "min_p": "Ignore tokens less likely than this share of the most likely one: 0 to 1.",
    "min_tokens": "The answer does not end before this many tokens.",
    "model": "The name of the model; see /v1/models.",
    "n": "How many answers to return.",
    "output_config": "The format of the answer: a JSON schema.",
    "parallel_tool_calls": "Whether one answer may call several tools.",
    "presence_penalty": "Subtracted from the logit of a token that occurs in the answer: -2 to 2.",
    "previous_response_id": "Continue the conversation of this stored response.",
    "prompt": "The text to read.",
    "prompt_cache_key": "Accepted and ignored: the prefix cache finds prefixes by their tokens.",
    "prompt_cache_retention": "Accepted and ignored: prefixes stay cached while there is memory.",
    "prompt_logprobs": "Return log-probabilities of this many tokens at each position of the prompt.",
    "query": "The text that documents are compared with.",
    "reasoning": "How much to reason (effort), and whether to return a summary.",
    "repetition_penalty": "Divides the logits of tokens that occur in the prompt or the answer: above 0, 1 is none.",
    "replica": "The replica's id; see /v1/replicas.",
    "request_id": "The id of the request: the client's own, or the one in x-request-id.",
    "response_format": "The format of the answer: text, json_object, or json_schema with a schema.",
    "response_id": "The id of a stored response.",
    "return_token_strs": "Return the text of each token, too.",
    "scale": "The scale of the result: logit, sigmoid, softmax or cosine.",
    "seed": "Makes sampling repeatable: the same request with the same seed gets the same answer.",
    "skip_special_tokens": "Leave special tokens out of the text.",
    "stop": "Texts that end the answer. They are not part of it.",
    "stop_sequences": "Texts that end the answer. They are not part of it.",
    "stop_token_ids": "Tokens that end the answer.",
    "stream": "Send the answer as server-sent events while it is computed.",
    "stream_options": "include_usage: send the token counts with the last event.",
    "system": "The system prompt.",
    "temperature": "0 takes the most likely token; higher values sample more evenly.",
    "text": "The format of the text: a JSON schema, and verbosity.",
    "thinking": "Whether the model may reason, and how many tokens it may use for it.",
    "tokens": "Token ids.",
    "tool_choice": "Whether the model may, must or must not call tools, or the tool that it must call.",
    "tools": "The tools that the model may call.",
    "top_k": "Sample only among this many most likely tokens.",
    "top_logprobs": "How many of the most likely tokens to return at each position.",
    "top_p": "Sample only among the most likely tokens that together have this probability.",
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
            {"name": name, "in": "query", "schema": {"type": type_name}, "description": text}
            for name, type_name, text in parameters
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
        for schema in components["schemas"].values():
            for name, field in schema.get("properties", {}).items():
                if name in FIELDS:
                    field.setdefault("description", FIELDS[name])
        for path, methods in openapi["paths"].items():
            for operation in methods.values():
                _parameters(path, operation)
                for parameter in operation.get("parameters", ()):
                    if parameter["name"] in FIELDS:
                        parameter.setdefault("description", FIELDS[parameter["name"]])
        app.openapi_schema = openapi
    return app.openapi_schema


def _parameters(path: str, operation: dict[str, Any]) -> None:
    """Declare the path parameters, which routes read from the request and so have no signature."""
    names = [part[1:-1].partition(":")[0] for part in path.split("/") if part.startswith("{")]
    if names:
        in_path = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in names
        ]
        in_query = [item for item in operation.get("parameters", ()) if item["in"] == "query"]
        operation["parameters"] = [*in_path, *in_query]
