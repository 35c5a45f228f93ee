"""The models that do the task: each client's loop runs with both of them."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator

import pytest

from inflight import LLM, SamplingParams
from tests.server.clients.task import (
    KEY,
    MESSAGES,
    THOUGHT,
    GreedyBackend,
    KnowingBackend,
    Served,
    Toolbox,
    serve_task,
)
from tests.server.live import Backend, Live, live_server


@pytest.fixture(scope="module")
def server(backend: Backend) -> Iterator[Live]:
    """A server of the built-in model."""
    with live_server(backend, api_key=(KEY,)) as live:
        yield live
        live.wait_until_idle()


@pytest.fixture(scope="module")
def builtin(server: Live) -> Served:
    """The server and name of the built-in model."""
    return Served(server.url, "inflight-builtin")


@pytest.fixture(scope="module")
def text(llm: LLM) -> str:
    """The built-in model's answer to the messages."""
    return llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=24))[0].outputs[0].text


@pytest.fixture(scope="module")
def leave_nothing_open() -> Iterator[None]:
    """Collect the connections and event loops that some packages leave open, whose warnings would fail a later test."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        for _ in range(3):
            gc.collect()


@pytest.fixture(scope="session")
def _builtin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve_task(GreedyBackend(tmp_path_factory.mktemp("builtin"))) as live:
        yield Served(live.url, "m")


@pytest.fixture(scope="session")
def _knowing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve_task(KnowingBackend(tmp_path_factory.mktemp("tokenizer"))) as live:
        yield Served(live.url, "m", THOUGHT)


@pytest.fixture(scope="module", params=["_builtin", "_knowing"])
def served(request: pytest.FixtureRequest) -> Served:
    served: Served = request.getfixturevalue(request.param)
    return served


@pytest.fixture
def toolbox() -> Toolbox:
    return Toolbox()
