"""docs/continuous-batching.md labels its figures as the commands do."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import kv_waste
from benchmarks.lessons import COLUMNS
from inflight.bench.compare.report import Comparison

PAGE = (Path(__file__).parent.parent.parent / "docs" / "continuous-batching.md").read_text()


def head_after(command: str) -> list[str]:
    """Return the header of the first table after the command."""
    _, command_line, rest = PAGE.partition(f"    python -m benchmarks.{command}")
    assert command_line
    line = next(line for line in rest.splitlines() if line.startswith("|"))
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("lesson", COLUMNS)
def test_lessons(lesson: str) -> None:
    assert head_after(f"lessons {lesson}") == [title for title, _ in COLUMNS[lesson].values()]


def test_kv_waste() -> None:
    assert head_after("kv_waste") == list(kv_waste.COLUMNS)


def test_compare() -> None:
    titles = [line.strip("| ").partition(" |")[0] for line in PAGE.splitlines() if line.startswith("| ")]
    missing = [title for title, _ in Comparison.table if title not in titles]
    assert missing == ["GPU utilisation"], "its figures are of a CPU"
