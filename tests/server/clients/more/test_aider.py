"""aider in a git folder: answers, streamed and whole, and a wrong key."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.server.clients.more.installed import run_client
from tests.server.live import Live

# Its command, several times in one process: each start would take seconds.
COMMANDS = """
import json, sys
from aider.main import main
for words in json.loads(sys.argv[1]):
    main(words)
    print("\\f")
"""
QUIET = "--yes-always --no-pretty --no-check-update --no-show-release-notes --no-show-model-warnings --no-gitignore"
CALLS = ("--stream --openai-api-key secret", "--no-stream --openai-api-key secret", "--openai-api-key wrong")


def ask(url: str, home: Path) -> list[str]:
    """Return what it prints for each of the calls."""
    subprocess.run(["git", "init", "--quiet", home], check=True)
    prices = home / ".aider" / "caches" / "model_prices_and_context_window.json"
    prices.parent.mkdir(parents=True)
    prices.write_text('{"some-model": {}}', encoding="utf-8")  # or it asks the network for them
    common = [*QUIET.split(), "--analytics-disable", "--model", "openai/inflight-builtin"]
    words = json.dumps([[*common, *call.split(), "--message", "Why does it rain?"] for call in CALLS])
    printed = run_client("aider", "-c", COMMANDS, words, home=home, OPENAI_API_BASE=f"{url}/v1")
    return printed.split("\f")[: len(CALLS)]


def answer(printed: str) -> list[str]:
    """Return the words of an answer: streamed ones break lines elsewhere."""
    return printed.partition("auto refresh")[2].partition("Tokens:")[0].split()


def test_aider_answers_and_reports_a_wrong_key(server: Live, tmp_path: Path) -> None:
    streamed, whole, refused = ask(server.url, tmp_path)
    assert answer(streamed) == answer(whole)
    assert len(answer(whole)) > 10
    for said in (streamed, whole):
        assert "Tokens: " in said
        assert "Error" not in said
    message = " ".join(refused.split())
    assert "the API key is not valid for this server" in message
    assert "Check your API key." in message
