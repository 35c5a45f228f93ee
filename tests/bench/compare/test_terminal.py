from __future__ import annotations

from dataclasses import replace
from io import StringIO
from typing import Literal

import pytest
from rich.console import Console

from inflight.bench.compare.report import Comparison
from inflight.bench.compare.terminal import FOLD, picture, print_comparison
from inflight.bench.compare.timeline import Timeline
from tests.bench.compare.conftest import NUM_SLOTS

STEP = 0.01  # seconds


@pytest.fixture(scope="module")
def comparison(comparison: Comparison) -> Comparison:
    """The real run as if every step had taken equally long, so that a slow moment does not change the picture."""
    return replace(
        comparison,
        results={
            name: replace(result, timeline=with_even_steps(result.timeline))
            for name, result in comparison.results.items()
        },
    )


def with_even_steps(timeline: Timeline) -> Timeline:
    steps = range(timeline.num_steps)
    return replace(
        timeline, begins=[step * STEP for step in steps], ends=[(step + 1) * STEP for step in steps]
    )


def console(width: int, coloured: bool = False) -> Console:
    system: Literal["truecolor"] | None = "truecolor" if coloured else None
    return Console(
        file=StringIO(), width=width, force_terminal=coloured, color_system=system, legacy_windows=False
    )


@pytest.mark.parametrize("coloured", [False, True])
@pytest.mark.parametrize("width", [40, 80, 200])
def test_terminal_picture_has_one_line_per_slot(comparison: Comparison, width: int, coloured: bool) -> None:
    lines = list(picture(comparison, console(width, coloured)))
    # A legend and an axis; for each strategy an empty line, a title and its slots, unused ones in one line.
    slots = {"sequential": 2, "static": NUM_SLOTS, "continuous": NUM_SLOTS}
    assert NUM_SLOTS - 1 > FOLD
    assert len(lines) == 2 + sum(2 + count for count in slots.values())
    at = 1
    for count in slots.values():
        drawn = lines[at + 2 : at + 2 + min(count, NUM_SLOTS) - (count == 2)]
        assert [line.plain[:4] for line in drawn] == [f"{slot + 1:>3} " for slot in range(len(drawn))]
        assert all(line.cell_len == width for line in drawn)
        at += 2 + count


def test_letters_and_marks_replace_colour(comparison: Comparison) -> None:
    lines = [line.plain for line in picture(comparison, console(80))]
    first = {
        name: index
        for index, line in enumerate(lines)
        for name in comparison.results
        if line.startswith(name)
    }
    assert lines[first["sequential"] + 1].startswith("  1 A")
    assert "never used" in lines[first["sequential"] + 2]
    for offset, letter in enumerate("ABCD"):
        assert lines[first["static"] + 1 + offset].startswith(f"{offset + 1:>3} {letter}")
    static = "".join(lines[first["static"] + 1 : first["static"] + 1 + NUM_SLOTS])
    continuous = "".join(lines[first["continuous"] + 1 : first["continuous"] + 1 + NUM_SLOTS])
    assert "·" in static
    assert "·" not in continuous
    assert "━" in static
    assert "━" in continuous


@pytest.mark.parametrize("width", [40, 80, 200])
def test_output_fits_the_console_width(comparison: Comparison, width: int) -> None:
    output = console(width)
    print_comparison(comparison, output)
    text = output.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines()) <= width
    assert "only the scheduling" in text


def test_ascii_terminal_gets_ascii(comparison: Comparison) -> None:
    class Ascii(StringIO):
        encoding = "ascii"

    output = Console(file=Ascii(), width=80, color_system=None)
    print_comparison(comparison, output)
    text = output.file.getvalue()  # type: ignore[attr-defined]
    assert text.isascii()
    assert "A-" in text
