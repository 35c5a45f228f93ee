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

from inflight.bench.compare.drawing import DARK, LIGHT, SCALE, Rect, Text, to_svg, write_png
from inflight.bench.compare.picture import MIN_PREFILL, decode_colour, draw, prefill_colour
from inflight.bench.compare.report import Comparison
from inflight.bench.compare.terminal import FOLD, picture, print_comparison
from inflight.bench.compare.timeline import Timeline
from inflight.timeline.chunks import SlotKind
from tests.bench.compare.conftest import NUM_SLOTS

SVG = "{http://www.w3.org/2000/svg}"
LIMIT = 500_000  # bytes
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


def test_every_request_has_its_own_colours() -> None:
    colours = [paint(index) for index in range(64) for paint in (decode_colour, prefill_colour)]
    assert all(re.fullmatch("#[0-9a-f]{6}", colour) for colour in colours)
    assert len(set(colours)) == len(colours)


def test_every_shape_lies_within_the_drawing(comparison: Comparison) -> None:
    drawing = draw(comparison)
    for item in drawing.items:
        assert 0 <= item.x <= drawing.width
        assert 0 <= item.y <= drawing.height
        if isinstance(item, Rect):
            assert item.width > 0
            assert item.height > 0
            assert item.x + item.width <= drawing.width
            assert item.y + item.height <= drawing.height


def test_every_paint_is_a_colour_or_a_theme_name(comparison: Comparison) -> None:
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


def test_prompts_are_visible_however_short_their_steps_are(comparison: Comparison) -> None:
    paints = {prefill_colour(index) for index in range(len(comparison.requests))}
    widths = [
        item.width for item in draw(comparison).items if isinstance(item, Rect) and item.paint in paints
    ]
    # Once per request in every panel over time, again in the close-up if its steps reach that far, once in the legend.
    assert len(widths) > len(comparison.requests) * len(comparison.results)
    assert min(widths) >= MIN_PREFILL


def test_hostile_prompt_cannot_break_the_picture(comparison: Comparison) -> None:
    hostile = "</title><script>alert(1)</script> & ]]>"
    requests = [replace(request, title=hostile) for request in comparison.requests]
    root = ElementTree.fromstring(to_svg(draw(replace(comparison, requests=requests))))
    assert not list(root.iter(f"{SVG}script"))
    assert any(hostile in (title.text or "") for title in root.iter(f"{SVG}title"))


def test_svg_draws_first_spans_at_the_left_edge(comparison: Comparison) -> None:
    text = to_svg(draw(comparison))
    root = ElementTree.fromstring(text)
    for result in comparison.results.values():
        first = result.timeline.spans[0]
        assert first.kind is SlotKind.PREFILL
        paint = prefill_colour(first.request)
        rects = [rect for rect in root.iter(f"{SVG}rect") if rect.get("fill") == paint]
        assert rects
        assert min(float(rect.get("x", "nan")) for rect in rects) == pytest.approx(64)


def test_png_opens_with_the_right_size(comparison: Comparison, tmp_path: Path) -> None:
    drawing = draw(comparison)
    write_png(drawing, tmp_path / "x.png")
    with Image.open(tmp_path / "x.png") as image:
        assert image.format == "PNG"
        assert image.size == (drawing.width * SCALE, round(drawing.height * SCALE))
        pixels = {colour for _, colour in image.convert("RGB").getcolors(1 << 24) or ()}
    expected = decode_colour(0)
    assert tuple(int(expected[at : at + 2], 16) for at in (1, 3, 5)) in pixels


def test_first_request_is_labelled_in_every_panel(comparison: Comparison) -> None:
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
