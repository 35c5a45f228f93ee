"""`inflight replicas`: list the replicas of a running server or, with the admin key, change them."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from inflight.cli.command import Command
from inflight.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from http.client import HTTPResponse
    from urllib.error import HTTPError

app = typer.Typer(help="List and change the replicas of a running server.", no_args_is_help=True)

_URL = Annotated[str, typer.Option(help="Base URL of the server.")]
_KEY = Annotated[
    str | None,
    typer.Option(
        help="The server's admin key (an API key is enough for list); better set INFLIGHT_ADMIN_KEY."
    ),
]
_NAME = Annotated[str, typer.Argument(help="The replica's id, as shown by `list`.")]
_ADDRESS = "http://127.0.0.1:8000"
_COLUMNS = (
    ("replica", "id", "{}"),
    ("state", "state", "{}"),
    ("running", "num_running", "{}"),
    ("waiting", "num_waiting", "{}"),
    ("queued tokens", "num_queued_tokens", "{:,}"),
    ("KV used", "kv_usage", "{:.0%}"),
    ("prefix hits", "prefix_hit_rate", "{:.0%}"),
    ("restarts", "num_restarts", "{}"),
)


@app.command("list", cls=Command)
def list_replicas(url: _URL = _ADDRESS, key: _KEY = None) -> None:
    """Show the state of each replica."""
    _show(_call("GET", url, "", key))


@app.command(cls=Command)
def add(url: _URL = _ADDRESS, key: _KEY = None) -> None:
    """Start one more replica and wait until it is ready."""
    _show(_call("POST", url, "", key))


@app.command(cls=Command)
def drain(replica: _NAME, url: _URL = _ADDRESS, key: _KEY = None) -> None:
    """Send a replica no new requests."""
    _show(_call("POST", url, f"/{quote(replica, safe='')}/drain", key))


@app.command(cls=Command)
def remove(replica: _NAME, url: _URL = _ADDRESS, key: _KEY = None) -> None:
    """Drain a replica and stop it. Requests still running after --shutdown-timeout continue on other replicas."""
    _show(_call("DELETE", url, f"/{quote(replica, safe='')}", key))


@app.command(cls=Command)
def restart(replica: _NAME, url: _URL = _ADDRESS, key: _KEY = None) -> None:
    """Replace the engine of a replica. The old one runs until the new one is ready, if there is room for both."""
    _show(_call("POST", url, f"/{quote(replica, safe='')}/restart", key))


@app.command(cls=Command)
def roll(url: _URL = _ADDRESS, key: _KEY = None) -> None:
    """Restart all replicas one after the other, without failing requests."""
    _show(_call("POST", url, "/roll", key))


def _call(method: str, url: str, path: str, key: str | None) -> dict[str, Any]:
    key = key or os.environ.get("INFLIGHT_ADMIN_KEY")
    with open_server(method, url, f"/v1/replicas{path}", key) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def open_server(method: str, url: str, path: str, key: str | None) -> HTTPResponse:
    """Call a server and return its response. There is no timeout: a replica may take minutes to load."""
    # Imported here to keep other commands fast.
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"url is {url!r}: it must start with http:// or https://")
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    request = Request(f"{url.rstrip('/')}{path}", method=method, headers=headers)
    try:
        response: HTTPResponse = urlopen(request)
    except HTTPError as error:
        raise EngineError(_message(error)) from None
    except (OSError, ValueError) as error:
        raise EngineError(f"the server at {url} does not answer: {error}") from None
    return response


def _message(error: HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered with {error.code} {error.reason}"


def _show(answer: dict[str, Any]) -> None:
    rows = [[shape.format(item[name]) for _, name, shape in _COLUMNS] for item in answer["data"]]
    table = [[title for title, _, _ in _COLUMNS], *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(line.rstrip(), file=sys.stdout)
