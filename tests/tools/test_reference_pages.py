"""The references of the site name all that there is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer

import inflight
from inflight.cli.main import app
from inflight.server.config import SERVE_OPTIONS
from tools.reference_pages import api_page, cli_page


def commands(name: str, command: Any) -> Iterator[str]:
    children = getattr(command, "commands", {})
    if not children:
        yield name
    for child, found in children.items():
        yield from commands(f"{name} {child}", found)


def test_reference_has_every_command_and_flag() -> None:
    page = cli_page()
    names = list(commands("inflight", typer.main.get_command(app)))
    assert re.findall(r"^## `(.+)`$", page, re.M) == names
    serve = page.split("## `inflight serve`")[1].split("\n## ")[0]
    flags = {option.flag for option in SERVE_OPTIONS.values() if option.name != "model"}
    assert [flag for flag in sorted(flags) if f"`{flag}`" not in serve] == []
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 4 for row in rows)  # no cell breaks its table


def test_reference_has_every_public_class_and_method() -> None:
    page = api_page()
    classes = [name for name in inflight.__all__ if isinstance(getattr(inflight, name), type)]
    assert re.findall(r"^## `(\w+)`$", page, re.M) == classes
    for entry in ("LLM.generate()", "AsyncEngine.start()", "Policy.victim()", "AsyncEngine.max_model_len"):
        assert f"### `{entry}`" in page
    assert "├── ConfigError" in page
    llm = page.split("## `LLM`")[1].split("\n## ")[0]
    assert "self" not in re.findall(r"[(,]\s*(\w+)", llm)
    assert "```pycon\n>>> llm = LLM(" in llm
