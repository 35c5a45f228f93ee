"""The pages for browsers: the web application, and the answer to a path that does not exist."""

from __future__ import annotations

from html import escape

from starlette.responses import HTMLResponse, Response

from inflight.web import application, not_found

# All are the same document, whose script shows the page that the address names.
PAGES = ("/", "/timeline", "/requests", "/memory", "/replicas", "/docs")


def application_page(status: int = 200) -> Response:
    """Return the application. It queries the server's state itself, so it is the same while a model loads."""
    return _page(*application(), status)


def not_found_page(message: str, home: str) -> Response:
    return _page(*not_found(escape(message), escape(home)), 404)


def _page(text: str, policy: str, status: int) -> Response:
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }
    return HTMLResponse(text, status, headers)
