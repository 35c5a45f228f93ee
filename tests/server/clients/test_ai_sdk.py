"""The AI SDK of Vercel, in Node."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.server.clients.task import KEY, QUESTION, REPORT, Report, Served, Toolbox

FOLDER = Path(__file__).parent / "ai_sdk"
SECONDS = 120.0


@pytest.fixture(scope="module")
def found(served: Served) -> Any:
    """What the script found. Without Node or the packages tests are skipped, but never where CI runs."""
    node = shutil.which("node")
    if node is None or not (FOLDER / "node_modules").is_dir():
        reason = f"no Node, or not its packages: install nodejs and npm, then `npm ci` in {FOLDER.name}"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    told = {"BASE_URL": served.base_url, "API_KEY": KEY, "MODEL": served.model, "QUESTION": QUESTION}
    command = [node, str(FOLDER / "agent.mjs")]
    ended = subprocess.run(command, env=os.environ | told, capture_output=True, text=True, timeout=SECONDS)
    assert (ended.returncode, ended.stderr) == (0, "")
    return json.loads(ended.stdout)


@pytest.mark.parametrize("way", ["whole", "streamed"])
def test_an_agent(found: Any, served: Served, toolbox: Toolbox, way: str) -> None:
    result = found[way]
    toolbox.calls += [(name, arguments) for name, arguments in result["calls"]]
    toolbox.check(result["text"])
    assert result.get("reasoning") == served.thought
    assert result["usage"]["outputTokens"] > 0


def test_an_object(found: Any, served: Served) -> None:
    assert Report(**found["object"]) == REPORT or served.thought is None  # the built-in model says anything
