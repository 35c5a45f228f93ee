"""The models that do the task: each client's loop runs with both of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.clients.task import (
    THOUGHT,
    GreedyBackend,
    KnowingBackend,
    Served,
    Toolbox,
    serve_task,
)


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
    found: Served = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def toolbox() -> Toolbox:
    return Toolbox()
