"""The AI SDK of Vercel, in Node."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.clients.more.node import run_script
from tests.server.clients.task import KEY, QUESTION, REPORT, Report, Served, Toolbox


@pytest.fixture(scope="module")
def results(served: Served) -> Any:
    environment = {"BASE_URL": served.base_url, "API_KEY": KEY, "MODEL": served.model, "QUESTION": QUESTION}
    return run_script("agent.mjs", **environment)


@pytest.mark.parametrize("way", ["whole", "streamed"])
def test_agent_completes_the_task(results: Any, served: Served, toolbox: Toolbox, way: str) -> None:
    result = results[way]
    toolbox.calls += [(name, arguments) for name, arguments in result["calls"]]
    toolbox.check(result["text"])
    assert result.get("reasoning") == served.thought
    assert result["usage"]["outputTokens"] > 0


def test_object_is_parsed(results: Any, served: Served) -> None:
    assert Report(**results["object"]) == REPORT or served.thought is None  # the built-in model says anything
