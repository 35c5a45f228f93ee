"""Claude Code runs a command, reads a file and looks at an image; the model's words are written here.

The installed version is the last one that is a Node package: later ones are programs of 250 MB. The requests of a
current one are replayed in tests/server/anthropic/test_claude_code_requests.py.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inflight.request import Request
from inflight.server.schemas import IMAGE_NOTE
from tests.server.calling import CallingBackend, call
from tests.server.clients.task import KEY
from tests.server.live import Live, live_server
from tests.support.missing import missing

PROGRAM = Path(__file__).parent / "claude_code/node_modules/@anthropic-ai/claude-code/cli.js"
SECONDS = 120.0
IMAGE = bytes.fromhex(  # one pixel, as PNG
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de"
    "0000000c4944415478da63f8cfc0000003010100f7034143000000004945"
    "4e44ae426082"
)


class Agent(CallingBackend):
    """A model that writes a file, reads it, looks at an image and then answers."""

    max_model_len = 200_000  # the prompt begins with 20,000 tokens about tools

    def __init__(self, folder: Path, project: Path) -> None:
        super().__init__(folder)
        self.prompts: list[str] = []
        self.client.reply = self._reply
        self._steps = [
            "I will write the file."
            + call("Bash", command="echo 42 > out.txt && cat out.txt", description="Write"),
            call("Read", file_path=str(project / "out.txt")),
            call("Read", file_path=str(project / "pixel.png")),
            "The file has 42.",
        ]

    def _reply(self, _: Request) -> str:
        self.prompts.append(self.prompt)
        if '"name": "Bash"' not in self.prompt:  # a question on the side, such as for a title
            return "A title."
        return self._steps[self.prompt.count("<|im_start|>tool")]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "pixel.png").write_bytes(IMAGE)
    return folder


@pytest.fixture
def agent(tmp_path: Path, project: Path) -> Iterator[Agent]:
    (tmp_path / "tokenizer").mkdir()
    backend = Agent(tmp_path / "tokenizer", project)
    yield backend
    backend.close()


@pytest.fixture
def server(agent: Agent) -> Iterator[Live]:
    with live_server(agent, served_model_name=("m",), api_key=(KEY,), replace_images=True) as live:
        yield live


def run(server: Live, project: Path, question: str) -> Any:
    """Return what the program prints, with the variables of docs/clients.md."""
    node = shutil.which("node")
    if node is None or not PROGRAM.is_file():
        missing("Node or Claude Code is not installed: install nodejs and npm, then run make test-clients")
    variables = {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_API_KEY": KEY,
        "ANTHROPIC_MODEL": "m",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "m",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "HOME": str(project.parent),
    }
    command = [
        node,
        str(PROGRAM),
        "--print",
        question,
        "--allowedTools",
        "Bash,Read",
        "--output-format",
        "json",
    ]
    finished = subprocess.run(
        command,
        cwd=project,
        env={"PATH": os.environ["PATH"], **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return json.loads(finished.stdout)


def test_claude_code_uses_its_tools_and_answers(server: Live, agent: Agent, project: Path) -> None:
    result = run(server, project, "Write 42 into out.txt, then look at pixel.png.")
    assert (result["subtype"], result["is_error"], result["result"]) == ("success", False, "The file has 42.")
    assert (project / "out.txt").read_text() == "42\n"
    prompt = agent.prompts[-1]
    assert "Write 42 into out.txt, then look at pixel.png." in prompt
    assert IMAGE_NOTE in prompt
    refused = {
        status for (route, status) in server.state.metrics.responses if route.startswith("/v1/messages")
    }
    assert refused == {"200"}
