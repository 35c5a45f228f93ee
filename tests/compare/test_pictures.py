from __future__ import annotations

import re
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

import pytest
from PIL import Image
from rich.console import Console

from inflight.compare.drawing import DARK, LIGHT, MIN_PREFILL, Rect, Text, draw
from inflight.compare.html import to_html
from inflight.compare.layout import SpanKind, Timeline
from inflight.compare.palette import decode_colour, label, prefill_colour
from inflight.compare.png import SCALE, write_png
from inflight.compare.report import Comparison
from inflight.compare.svg import to_svg
from inflight.compare.terminal import FOLD, picture, print_comparison
from tests.compare.conftest import NUM_SLOTS

SVG = "{http://www.w3.org/2000/svg}"
LIMIT = 500_000  # bytes
STEP = 0.01  # seconds


@pytest.fixture(scope="module")
def comparison(comparison: Comparison) -> Comparison:
    """The real run, drawn as if every step had taken the same time: a slow moment of the machine would change the
    picture."""
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


def test_labels_count_on_past_z() -> None:
    assert [label(index) for index in (0, 25, 26, 27, 51, 52, 701, 702)] == [
        "A", "Z", "AA", "AB", "AZ", "BA", "ZZ", "AAA",
    ]  # fmt: skip


def test_neighbours_have_different_colours() -> None:
    colours = [paint(index) for index in range(64) for paint in (decode_colour, prefill_colour)]
    assert all(re.fullmatch("#[0-9a-f]{6}", colour) for colour in colours)
    assert len(set(colours)) == len(colours)


def test_every_shape_lies_in_the_drawing(comparison: Comparison) -> None:
    drawing = draw(comparison)
    for item in drawing.items:
        assert 0 <= item.x <= drawing.width
        assert 0 <= item.y <= drawing.height
        if isinstance(item, Rect):
            assert item.width > 0
            assert item.height > 0
            assert item.x + item.width <= drawing.width
            assert item.y + item.height <= drawing.height


def test_every_paint_is_known(comparison: Comparison) -> None:
    assert set(LIGHT) == set(DARK)
    for item in draw(comparison).items:
        assert item.paint in LIGHT or re.fullmatch("#[0-9a-f]{6}", item.paint)


def test_svg_is_well_formed_and_small(comparison: Comparison) -> None:
    text = to_svg(draw(comparison))
    assert len(text.encode()) < LIMIT
    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg"
    titles = [title.text or "" for title in root.iter(f"{SVG}title")]
    for request in comparison.requests:
        assert any(title.startswith(f"{request.label}: {request.title}\n") for title in titles)
    texts = {element.text for element in root.iter(f"{SVG}text")}
    assert {"sequential", "static", "continuous"} <= texts


def test_a_prompt_is_seen_however_short_its_step_is(comparison: Comparison) -> None:
    paints = {prefill_colour(index) for index in range(len(comparison.requests))}
    found = [item.width for item in draw(comparison).items if isinstance(item, Rect) and item.paint in paints]
    # Once for every request in every panel over time; in the closer look those within its steps; once in the legend.
    assert len(found) > len(comparison.requests) * len(comparison.results)
    assert min(found) >= MIN_PREFILL


def test_what_a_prompt_says_cannot_break_the_picture(comparison: Comparison) -> None:
    hostile = "</title><script>alert(1)</script> & ]]>"
    requests = [replace(request, title=hostile) for request in comparison.requests]
    root = ElementTree.fromstring(to_svg(draw(replace(comparison, requests=requests))))
    assert not list(root.iter(f"{SVG}script"))
    assert any(hostile in (title.text or "") for title in root.iter(f"{SVG}title"))


def test_svg_draws_the_spans_at_their_places(comparison: Comparison) -> None:
    """In the closer look a step is as wide as any other: spans are where their steps are."""
    text = to_svg(draw(comparison, heading=False))
    root = ElementTree.fromstring(text)
    for result in comparison.results.values():
        first = result.timeline.spans[0]
        assert first.kind is SpanKind.PREFILL
        paint = prefill_colour(first.request)
        found = [rect for rect in root.iter(f"{SVG}rect") if rect.get("fill") == paint]
        assert found
        assert min(float(rect.get("x", "nan")) for rect in found) == pytest.approx(64)


def test_html_needs_nothing_else(comparison: Comparison) -> None:
    text = to_html(comparison)
    assert len(text.encode()) < LIMIT
    assert set(re.findall(r"https?://[^\s\"'<)]*", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(script|link|img|iframe)\b|@import|url\(", text)
    assert "prefers-color-scheme: dark" in text
    assert "&lt;the &amp; model&gt;" in text
    assert "<the & model>" not in text
    for result in comparison.results.values():
        assert f"{result.figures.num_steps:,}" in text


def test_png_opens_with_the_right_size(comparison: Comparison, tmp_path: Path) -> None:
    drawing = draw(comparison)
    write_png(drawing, tmp_path / "x.png")
    with Image.open(tmp_path / "x.png") as image:
        assert image.format == "PNG"
        assert image.size == (drawing.width * SCALE, round(drawing.height * SCALE))
        pixels = {colour for _, colour in image.convert("RGB").getcolors(1 << 24) or ()}
    expected = decode_colour(0)
    assert tuple(int(expected[at : at + 2], 16) for at in (1, 3, 5)) in pixels


def test_a_label_is_drawn_for_the_first_request_in_every_panel(comparison: Comparison) -> None:
    letters = [
        item.text for item in draw(comparison).items if isinstance(item, Text) and item.paint == "label"
    ]
    assert letters.count("A") == 2 * len(comparison.results)


def console(width: int, coloured: bool = False) -> Console:
    system: Literal["truecolor"] | None = "truecolor" if coloured else None
    return Console(
        file=StringIO(), width=width, force_terminal=coloured, color_system=system, legacy_windows=False
    )


@pytest.mark.parametrize("coloured", [False, True])
@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_terminal_picture_has_a_line_a_slot(comparison: Comparison, width: int, coloured: bool) -> None:
    lines = list(picture(comparison, console(width, coloured)))
    # A legend, an axis; for each strategy an empty line, a title and its slots, never used ones in one line.
    slots = {"sequential": 2, "static": NUM_SLOTS, "continuous": NUM_SLOTS}
    assert NUM_SLOTS - 1 > FOLD
    assert len(lines) == 2 + sum(2 + count for count in slots.values())
    at = 1
    for count in slots.values():
        drawn = lines[at + 2 : at + 2 + min(count, NUM_SLOTS) - (count == 2)]
        assert [line.plain[:4] for line in drawn] == [f"{slot + 1:>3} " for slot in range(len(drawn))]
        assert all(line.cell_len == width for line in drawn)
        at += 2 + count


def test_letters_and_marks_tell_the_story_without_colour(comparison: Comparison) -> None:
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
def test_everything_prints_within_the_width(comparison: Comparison, width: int) -> None:
    output = console(width)
    print_comparison(comparison, output)
    text = output.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines()) <= width
    assert "only the scheduling" in text


def test_an_ascii_terminal_gets_ascii(comparison: Comparison) -> None:
    class Ascii(StringIO):
        encoding = "ascii"

    output = Console(file=Ascii(), width=80, color_system=None)
    print_comparison(comparison, output)
    text = output.file.getvalue()  # type: ignore[attr-defined]
    assert text.isascii()
    assert "A-" in text
