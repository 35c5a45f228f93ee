"""The pages for browsers, each a single self-contained document built from the files in `page`."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Mapping
from functools import cache
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import Any

from starlette.responses import HTMLResponse, Response

# By path: the document, styles and scripts that it is built from.
PAGES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "/": (
        "index.html",
        ("style.css", "chat.css"),
        (
            "toy_tools.js",
            "api.js",
            "transcript.js",
            "answer.js",
            "tools_panel.js",
            "connection.js",
            "chat.js",
        ),
    ),
    "/replicas": ("replicas.html", ("style.css", "replicas.css"), ("api.js", "replicas.js")),
}


def page_at(path: str, status: int = 200) -> Response:
    """Return a page. It queries the server's state itself, so it is the same while a model loads."""
    text, policy = _document(path)
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }
    return HTMLResponse(text, status, headers)


@cache
def _document(path: str) -> tuple[str, str]:
    """Return the text, and a content security policy that allows only its own scripts and styles."""
    name, styles, scripts = PAGES[path]
    style, script = _joined(styles), _joined(scripts)
    text = _read(name).replace("/* styles */", style).replace("/* scripts */", script)
    policy = (
        f"default-src 'none'; script-src {source_hash(script)}; style-src {source_hash(style)}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text, policy


def _joined(names: tuple[str, ...]) -> str:
    return "\n".join(map(_read, names))


def _read(name: str) -> str:
    return (files("inflight.server") / "page" / name).read_text(encoding="utf-8")


def source_hash(content: str) -> str:
    """Return the hash by which a policy names a script or style."""
    return f"'sha256-{b64encode(sha256(content.encode()).digest()).decode()}'"


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
        f"<h1>{title}</h1><p>{escape(info['description'])} For programs: "
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
    description = escape(operation.get("description", ""))
    head = f"<b>{method.upper()}</b> <code>{escape(path)}</code>"
    return f"<details><summary>{head} {description}</summary>{table}</details>"


def _fields(document: Mapping[str, Any], operation: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the name, kind and description of each field of the body."""
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if content is None:
        return
    schema = document["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        kind = _kind(field)
        yield name, f"{kind}, required" if name in required else kind, field.get("description", "")


def _kind(field: Mapping[str, Any]) -> str:
    """Return the type of a field in a few words."""
    if "$ref" in field:
        return str(field["$ref"].rpartition("/")[2])
    if "anyOf" in field:
        kinds = dict.fromkeys(map(_kind, field["anyOf"]))
        return " or ".join(kind for kind in kinds if kind != "null")
    if "enum" in field or "const" in field:
        return ", ".join(str(value) for value in field.get("enum", [field.get("const")]))
    return str(field.get("type", "any"))
