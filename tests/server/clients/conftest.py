"""The models that do the task: each client's loop runs with all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.clients.task import Served, Toolbox, serve_knowing_model

MODELS = ("calls in turn", "calls at once")


@pytest.fixture(scope="module", params=MODELS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("tokenizer")
    with serve_knowing_model(folder, at_once=request.param == "calls at once") as live:
        yield Served(live.url, "m")


@pytest.fixture
def toolbox() -> Toolbox:
    return Toolbox()
