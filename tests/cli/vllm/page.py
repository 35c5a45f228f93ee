"""The tables of docs/from-vllm.md as data."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "from-vllm.md"
HEAD = "| vLLM | outcome | here |"
SAME, OTHER_NAME, ACCEPTED, ABSENT = OUTCOMES = ("same", "other name", "accepted", "absent")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a table."""

    names: tuple[str, ...]  # vLLM's names, which are treated alike
    outcome: str
    here: str

    @property
    def code(self) -> list[str]:
        """The code spans of the last cell."""
        return re.findall(r"`([^`]+)`", self.here)


def section(title: str) -> list[Line]:
    """Return the lines of a section's table."""
    text = PAGE.read_text(encoding="utf-8")
    _, heading, rest = text.partition(f"\n## {title}\n")
    assert heading, f"{PAGE.name} has no section {title!r}"
    body = rest.partition("\n## ")[0]
    _, head, table = body.partition(f"{HEAD}\n| --- | --- | --- |\n")
    assert head, f"the section {title!r} has no table with the head {HEAD}"
    lines = [_line(text) for text in table.splitlines() if text.startswith("|")]
    names = [name for line in lines for name in line.names]
    assert len(set(names)) == len(names), f"the section {title!r} has a name twice"
    return lines


def _line(text: str) -> Line:
    cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", text.strip().strip("|"))]
    assert len(cells) == 3, f"{text!r} must have three cells"
    names, outcome, here = cells
    assert outcome in OUTCOMES, f"{text!r}: the outcome must be one of {', '.join(OUTCOMES)}"
    code_spans = re.findall(r"`([^`]+)`", names)
    assert ", ".join(f"`{name}`" for name in code_spans) == names, f"{names!r} must be names, each in code"
    return Line(tuple(code_spans), outcome, here)
