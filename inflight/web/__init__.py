"""The web application: its built files, and the documents made of them.

The sources are in `web/` at the top of the repository (TypeScript); `npm run build` there writes `app.js` and `app.css`
here. A document is self-contained: the script and the styles are part of it, and its content security policy allows
nothing else.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Any

_DOCUMENT = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{data}<script>{script}</script>
</body>
</html>
"""


_NOT_FOUND = """<header><h1>inflight</h1></header>
<section class="text-page"><h2>Page not found</h2><p>{message}</p><p><a href="{home}">Go to the chat</a></p></section>
"""


@cache
def application() -> tuple[str, str]:
    """Return the application's document, which is the same for all its pages, and its content security policy."""
    script = _read("app.js")
    return _document("", script), _policy(script)


def not_found(message: str, home: str) -> tuple[str, str]:
    """Return a document that says that there is no such page, and its policy. Both texts are HTML already."""
    return _document(_NOT_FOUND.format(message=message, home=home), ""), _policy("")


def recording_document(chunks: Sequence[Any]) -> str:
    """Return a self-contained document that shows a recording: chunks in the format of `GET /v1/steps`."""
    return _document(_data({"chunks": chunks}), _read("app.js"))


def comparison_document(
    title: str, chunks: Sequence[Any], comparison: Mapping[str, Any], before: str, after: str
) -> str:
    """Return a self-contained document that shows recordings of the same requests below each other.

    The replica of each chunk is its strategy; `comparison` says how to show them (`web/src/timeline/recording.ts`). The
    other texts are HTML already.
    """
    texts = f'<section id="before">{before}</section>\n<section id="after">{after}</section>\n'
    data = _data({"chunks": chunks, "comparison": comparison})
    return _document(texts + data, _read("app.js"), title)


def _data(recording: Mapping[str, Any]) -> str:
    content = json.dumps(recording, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="recording">{content}</script>\n'


def _document(data: str, script: str, title: str = "inflight") -> str:
    return _DOCUMENT.format(title=title, style=_read("app.css"), script=script, data=data)


def _policy(script: str) -> str:
    """Return a content security policy that allows only the document's own script and styles."""
    return (
        f"default-src 'none'; script-src {source_hash(script)}; style-src {source_hash(_read('app.css'))}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def source_hash(content: str) -> str:
    """Return the hash by which a policy names a script or style."""
    return f"'sha256-{b64encode(sha256(content.encode()).digest()).decode()}'"


@cache
def _read(name: str) -> str:
    return (files(__name__) / name).read_text(encoding="utf-8")
