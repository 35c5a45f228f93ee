"""The examples of README.md, and the policy in docs/server.md, print what they show. `...` stands for any text."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.test_command import serving

ROOT = Path(__file__).parent.parent
SERVER_PAGE = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
TEXT = (ROOT / "README.md").read_text(encoding="utf-8") + SERVER_PAGE.partition("## Scheduling policies\n")[
    2
].partition("\n## ")[0]
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
# Each Python example with its output, which is the next block if that has no language.
PYTHON = [
    (text, after if language == "" and not after.startswith("$") else "")
    for (kind, text), (language, after) in zip(BLOCKS, [*BLOCKS[1:], ("", "")], strict=True)
    if kind == "python"
]
SHELL = [text for kind, text in BLOCKS if kind == "" and text.startswith("$ ")]


def matches(expected: str, output: str) -> bool:
    """Compare outputs; times may differ, and a busy machine may let a request wait for a reason that it then names."""
    expected = re.sub(r"\d+\.\d{3} s", "<time> s", expected.strip())
    output = re.sub(r"\d+\.\d{3} s", "<time> s", output.strip())
    output = re.sub(r"(<time> s in the queue) \([^)]*\)", r"\1", output)
    pattern = ".*".join(map(re.escape, expected.split("...")))
    return re.fullmatch(pattern, output, re.DOTALL) is not None


@pytest.mark.parametrize("index", range(len(PYTHON)))
def test_python_example_prints_what_the_readme_shows(index: int) -> None:
    code, expected = PYTHON[index]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, f"example {index}", "exec"), {"__name__": "__main__"})
    assert matches(expected, printed.getvalue()), printed.getvalue()


def commands(block: str) -> Iterator[tuple[str, str]]:
    """Yield the commands of a block, which start with `$`, and their output. Lines that end in a backslash go on."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        match = re.match(r"(?:.*\\\n)*.*", part)
        assert match is not None
        yield match[0], part[match.end() :]


def run(command: str) -> str:
    python = str(Path(sys.executable).parent)
    environment = os.environ | {"PATH": f"{python}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "200"}
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=120, check=True, env=environment
    )
    return done.stdout


def test_shell_examples_print_what_the_readme_shows() -> None:
    examples = [pair for block in SHELL for pair in commands(block)]
    serve = ("inflight serve", "\n")
    assert serve in examples
    offline, online = examples[: examples.index(serve)], examples[examples.index(serve) + 1 :]
    assert offline
    assert len(online) > 1
    for command, expected in offline:
        output = run(command)
        assert matches(expected, output), output
    with serving() as (_, http, _):
        for command, expected in online:
            assert "localhost:8000" in command
            address = f"{http.base_url.host}:{http.base_url.port}"
            output = run(command.replace("localhost:8000", address))
            assert matches(expected, output), output


def test_examples_are_found() -> None:
    assert len(PYTHON) == 3
    assert sum(bool(expected) for _, expected in PYTHON) == 2
    assert len(SHELL) == 2
