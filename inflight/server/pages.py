"""The pages: one document each, made of the files in `page`, so that it needs nothing else."""

from __future__ import annotations

from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files

from starlette.responses import HTMLResponse, Response

# Where each is, and the files that it is made of: the document, styles, scripts.
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
    """The page itself asks how the server is, so it is the same while a model loads."""
    text, policy = _document(path)
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }
    return HTMLResponse(text, status, headers)


@cache
def _document(path: str) -> tuple[str, str]:
    """The text, and a policy by which no other script or style than its own runs in it."""
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
    """By which a policy names a script or a style."""
    return f"'sha256-{b64encode(sha256(content.encode()).digest()).decode()}'"
