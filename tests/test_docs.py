"""Documents name files that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("page", ["request-walk.md", "architecture.md"])
def test_every_file_that_a_page_names_exists(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    named = set(re.findall(r"`((?:\w+/)*\w+(?:/|\.py|\.cpp))`", text))
    assert len(named) > 20
    names = {path.name for path in (ROOT / "inflight").rglob("*")}  # pages shorten paths within a room

    def exists(name: str) -> bool:
        return (ROOT / "inflight" / name).exists() or (ROOT / name).exists() or name.rstrip("/") in names

    assert sorted(name for name in named if not exists(name)) == []


def test_every_test_that_the_promises_name_exists() -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    named = set(re.findall(r"tests/[\w/]+\.py", text))
    assert len(named) > 20
    assert sorted(name for name in named if not (ROOT / name).is_file()) == []
    modules = set(re.findall(r"python -m benchmarks\.(\w+)", text))
    assert all((ROOT / "benchmarks" / f"{module}.py").is_file() for module in modules)
    promises = re.findall(r"^\| (?!promise|---)(.+?) \| (.+) \|$", text, re.M)
    assert len(promises) > 10
    assert all("`tests/" in tests for _, tests in promises)


def test_the_walk_is_complete() -> None:
    """A request runs through no file that the page does not name. (How the list is found: tools/request_files.py.)"""
    from tools.request_files import files_of

    text = (ROOT / "docs" / "request-walk.md").read_text()
    for way in ("offline", "process"):
        files = [name.removeprefix("inflight/") for name in files_of(way, "cpu")]
        assert len(files) > 30
        assert [name for name in files if f"`{name}`" not in text] == [], way
