"""The command `llm` (PyPI) with a model of ours among its own: prompts, streams and conversations."""

from __future__ import annotations

import gc
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inflight import LLM, SamplingParams
from tests.server.live import Backend, Live, live_server

QUESTION = "Why does it rain?"
NEXT = "And why does it snow?"
GREEDY = ("-o", "temperature", "0", "-o", "max_tokens", "24")


@pytest.fixture(scope="module")
def server(backend: Backend) -> Iterator[Live]:
    with live_server(backend, api_key=("secret",)) as live:
        yield live
        live.wait_until_idle()


@pytest.fixture
def settings(server: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of a user's settings."""
    model = {"model_id": "mine", "model_name": "inflight-builtin", "api_base": f"{server.url}/v1"}
    model["api_key_name"] = "inflight"
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([model]), encoding="utf-8")
    (tmp_path / "keys.json").write_text(json.dumps({"inflight": "secret"}), encoding="utf-8")
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    yield tmp_path
    with warnings.catch_warnings():  # it leaves connections to the garbage collector
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def run(*arguments: str) -> Any:
    from click.testing import CliRunner

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from llm.cli import cli

        return CliRunner().invoke(cli, ["prompt", "-m", "mine", *arguments])


def answer(llm: LLM, *texts: str) -> str:
    """Return the offline answer to a conversation in which the user says every other text."""
    roles = ("user", "assistant")
    messages: Any = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return llm.chat(messages, SamplingParams(temperature=0, max_tokens=24))[0].outputs[0].text


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize("how", [(), ("--no-stream",)])
def test_prompt_and_its_continuation_are_answered(llm: LLM, how: tuple[str, ...]) -> None:
    first = run(QUESTION, *GREEDY, *how)
    expected = answer(llm, QUESTION)
    assert (first.exit_code, first.stdout) == (0, expected + "\n")
    second = run(NEXT, "-c", *GREEDY, *how)
    assert (second.exit_code, second.stdout) == (0, answer(llm, QUESTION, expected, NEXT) + "\n")


def test_errors_are_reported(settings: Path) -> None:
    refused = run(QUESTION, "-o", "top_p", "0")
    assert refused.exit_code != 0
    assert "top_p is 0" in refused.output
    (settings / "keys.json").write_text(json.dumps({"inflight": "wrong"}), encoding="utf-8")
    wrong = run(QUESTION)
    assert wrong.exit_code != 0
    assert "key" in wrong.output
