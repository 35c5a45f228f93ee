"""The page of a comparison, in a real browser and in words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from inflight.compare.html import to_html
from inflight.compare.layout import lay_out
from inflight.compare.report import Comparison
from inflight.compare.words import requests_in_words, slots_in_words
from tests.browser import LOOKS, NARROW, Page
from tests.compare import hand_made

PICTURE = "document.querySelector('[role=region]')"


@pytest.fixture
def shown(page: Page, comparison: Comparison, tmp_path: Path) -> Page:
    """The page is open."""
    (tmp_path / "compare.html").write_text(to_html(comparison), encoding="utf-8")
    page.open(f"file://{tmp_path}/compare.html")
    return page


def test_all_is_seen_on_a_desk_and_on_a_phone(shown: Page) -> None:
    for scheme, width in LOOKS:
        shown.show_as(scheme, width, 1000)
        assert shown.run("document.documentElement.scrollWidth") <= width
        assert not shown.cut()
        right = shown.run("document.querySelector('thead th:last-child').getBoundingClientRect().right")
        assert shown.text("thead th:last-child") == "continuous"
        assert right <= width  # and not only after scrolling
        assert shown.text(".legend").splitlines()[-1] == "empty slot"
        scrolls = shown.run(f"{PICTURE}.scrollWidth > {PICTURE}.clientWidth")
        hinted = shown.run("document.querySelector('.hint').offsetHeight > 0")
        assert scrolls == hinted == (width == NARROW)
        paper = shown.run("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        assert max(paper) < 64 if scheme == "dark" else min(paper) > 192
        shown.picture(f"compare-{scheme}-{width}")


def test_a_keyboard_reaches_the_picture_and_its_words(shown: Page) -> None:
    shown.show_as("light", NARROW, 1000)
    shown.press("Tab")
    if shown.run(f"document.activeElement !== {PICTURE}"):  # a table that scrolls would come before it
        shown.press("Tab")
    assert shown.run(f"document.activeElement === {PICTURE}")
    shown.press("ArrowRight")
    shown.wait_for(f"{PICTURE}.scrollLeft > 0")
    shown.press("Tab")
    shown.press("Enter")
    shown.wait_for("document.querySelector('details').open")
    assert "slot 1: A in step" in shown.text("details")


def test_a_screen_reader_is_told_what_the_picture_shows(shown: Page, comparison: Comparison) -> None:
    spoken = {node["role"]["value"]: node for node in reversed(tree(shown)) if not node["ignored"]}
    told = spoken["image"]["name"]["value"]
    for strategy in comparison.results:
        assert f"{strategy}: {comparison.told(strategy)}" in told
    assert spoken["region"]["name"]["value"] == "Who held which slot"
    headers = {node["name"]["value"] for node in tree(shown) if node["role"]["value"] == "rowheader"}
    assert headers == {name for name, _ in comparison.rows()}


def tree(page: Page) -> list[dict[str, dict[str, str]]]:
    page.call("Accessibility.enable")
    found: list[dict[str, dict[str, str]]] = page.call("Accessibility.getFullAXTree")["nodes"]
    return found


def test_slots_in_words(comparison: Comparison) -> None:
    timeline = lay_out(hand_made.run())
    assert slots_in_words(comparison, timeline) == [
        "slot 1: A in steps 0 to 2; C in steps 3 to 4",
        "slot 2: B in steps 0 to 3, finished before step 2; D in steps 4 to 5",
    ]
    first = timeline.spans[0]
    alone = replace(timeline, num_slots=3, spans=[replace(first, last=first.first + 1)])
    assert slots_in_words(comparison, alone) == ["slot 1: A in step 0", "never used: 2 of 3 slots"]
    assert len(requests_in_words(comparison)) == comparison.num_requests
    title = comparison.requests[0].title
    assert requests_in_words(comparison)[0].startswith(
        f"A: {title}; {comparison.requests[0].num_prompt_tokens} prompt"
    )
