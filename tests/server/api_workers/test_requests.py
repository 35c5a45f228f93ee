"""Lists of requests in the main process of API workers, and what they count against in the worker that sends them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from starlette.types import Message

from inflight.errors import EngineDeadError
from inflight.server.access.keys import load_keys
from inflight.server.api_workers.messages import MAIN, RelayedRequest, RelayedResponse, SummarizeRequests
from inflight.server.api_workers.pool import ApiWorkerPool
from inflight.server.api_workers.relay import RelayMiddleware
from inflight.server.config import ServerConfig
from inflight.server.http.bodies import PIECE
from tests.server.live import Backend, live_server


class Worker:
    """A worker with some requests that are running, and the answers to its calls."""

    def __init__(self, pool: ApiWorkerPool, number: int) -> None:
        self.running: set[tuple[str, str]] = set()
        self.is_gone = False
        self.rpc = self
        pool._workers[number] = self  # type: ignore[assignment]

    @property
    def num_running(self) -> int:
        return len(self.running)

    def has_running(self, *key: str) -> bool:
        return key in self.running

    async def call(self, request: SummarizeRequests, _: Any) -> list[bytes | None]:
        if self.is_gone:
            raise EngineDeadError("the process is gone")
        return [None if key[1] == "forgotten" else key[1].encode() for key in request.keys]


def pool_of(history: int) -> tuple[ApiWorkerPool, Any, Any]:
    listeners: Any = [None, None]
    pool = ApiWorkerPool(ServerConfig.create(request_history=history), load_keys((), None), listeners)
    return pool, Worker(pool, 0), Worker(pool, 1)


def test_old_request_that_still_runs_keeps_its_place_in_the_list() -> None:
    pool, first, second = pool_of(history=2)
    first.running.add(("", "long"))
    for name in ("long", "a", "b", "c", "d"):
        pool._remember("", name, second if name in "bd" else first)
    assert list(pool.keys()) == [("", "long"), ("", "c"), ("", "d")]
    first.running.clear()
    for name in ("e", "f"):
        pool._remember("", name, first)
    assert list(pool.keys()) == [("", "e"), ("", "f")]


async def test_requests_of_a_worker_that_is_gone_are_left_out() -> None:
    pool, first, second = pool_of(history=8)
    for name, worker in {"a": first, "b": second, "forgotten": first, "c": first}.items():
        pool._remember("", name, worker)
    keys = list(pool.keys())
    assert await pool.summaries([*keys, ("", "unknown")], None) == [b"a", b"b", None, b"c", None]
    second.is_gone = True
    assert await pool.summaries(keys, None) == [b"a", None, None, b"c"]


def test_relayed_list_counts_against_its_key_until_it_is_read(backend: Backend, tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text("keys: [{name: one, key: one-key}]")
    unsent_by: list[dict[str, int]] = []

    async def relay(request: RelayedRequest) -> RelayedResponse:
        assert request.target == MAIN
        size = 2 * PIECE
        return RelayedResponse(200, [(b"content-length", str(size).encode())], bytes(size))

    with live_server(backend, keys=str(tmp_path / "keys.yaml")) as live:

        async def send(message: Message) -> None:
            if message["type"] == "http.response.body":
                unsent_by.append(dict(live.state.unsent._by_caller))

        app: Any = SimpleNamespace()
        middleware = RelayMiddleware(app, live.state, 0, app, relay)
        scope = {
            "type": "http",
            "method": "GET",
            "path": "/v1/requests",
            "query_string": b"",
            "scheme": "http",
        }
        headers = {"headers": [(b"authorization", b"Bearer one-key")]}
        backend.run(middleware({**scope, **headers}, app, send))
        assert not live.state.unsent.num_bytes
    assert unsent_by[0] == {"one": 2 * PIECE}
