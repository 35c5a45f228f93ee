"""The page of the API for browsers, made from its document on the server: it needs no script and no network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from starlette.responses import HTMLResponse, Response

from inflight.server.pages import source_hash

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
:root { color-scheme: light dark; }
code { font-family: ui-monospace, monospace; overflow-wrap: anywhere; }
summary { cursor: pointer; padding: 0.25rem 0; }
table { border-collapse: collapse; margin: 0.5rem 0 1rem; display: block; overflow-x: auto; }
td { border-top: 1px solid #8884; padding: 0.25rem 0.75rem 0.25rem 0; vertical-align: top; }
"""
_POLICY = (
    f"default-src 'none'; style-src {source_hash(_STYLE)}; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)


def docs_page(document: Mapping[str, Any]) -> Response:
    info = document["info"]
    parts = "".join(
        _operation(document, method, path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    )
    title = escape(f"{info['title']} {info['version']}")
    text = (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{title}</title>"
        f"<meta name='viewport' content='width=device-width'><style>{_STYLE}</style></head><body>"
        f"<h1>{title}</h1><p>{escape(info['description'])} The same for programs: "
        f"<a href='openapi.json'>openapi.json</a>.</p>{parts}</body></html>"
    )
    headers = {"content-security-policy": _POLICY, "x-content-type-options": "nosniff"}
    return HTMLResponse(text, headers=headers)


def _operation(document: Mapping[str, Any], method: str, path: str, operation: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(kind)}</td><td>{escape(text)}</td></tr>"
        for name, kind, text in _fields(document, operation)
    )
    table = f"<table>{rows}</table>" if rows else ""
    told = escape(operation.get("description", ""))
    head = f"<b>{method.upper()}</b> <code>{escape(path)}</code>"
    return f"<details><summary>{head} {told}</summary>{table}</details>"


def _fields(document: Mapping[str, Any], operation: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Of the body: names, kinds and what they mean."""
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if content is None:
        return
    schema = document["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        kind = _kind(field)
        yield name, f"{kind}, required" if name in required else kind, field.get("description", "")


def _kind(field: Mapping[str, Any]) -> str:
    """In one or a few words."""
    if "$ref" in field:
        return str(field["$ref"].rpartition("/")[2])
    if "anyOf" in field:
        kinds = dict.fromkeys(map(_kind, field["anyOf"]))
        return " or ".join(kind for kind in kinds if kind != "null")
    if "enum" in field or "const" in field:
        return ", ".join(str(value) for value in field.get("enum", [field.get("const")]))
    return str(field.get("type", "any"))
