"""The HTML page of a comparison in a real browser, and its text version."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from inflight.compare.page import requests_as_text, slots_as_text, to_html
from inflight.compare.report import Comparison
from inflight.compare.timeline import lay_out
from tests.compare import hand_made
from tests.support.browser import LOOKS, NARROW, Page

PICTURE = "document.querySelector('[role=region]')"


@pytest.fixture
def open_page(page: Page, comparison: Comparison, tmp_path: Path) -> Page:
    """A browser in which the page is open."""
    (tmp_path / "compare.html").write_text(to_html(comparison), encoding="utf-8")
    page.open(f"file://{tmp_path}/compare.html")
    return page


def test_page_fits_desktop_and_phone_screens(open_page: Page) -> None:
    for scheme, width in LOOKS:
        open_page.show_as(scheme, width, 1000)
        assert open_page.run("document.documentElement.scrollWidth") <= width
        assert not open_page.cut()
        right = open_page.run("document.querySelector('thead th:last-child').getBoundingClientRect().right")
        assert open_page.text("thead th:last-child") == "continuous"
        assert right <= width  # and not only after scrolling
        assert open_page.text(".legend").splitlines()[-1] == "empty slot"
        scrolls = open_page.run(f"{PICTURE}.scrollWidth > {PICTURE}.clientWidth")
        hinted = open_page.run("document.querySelector('.hint').offsetHeight > 0")
        assert scrolls == hinted == (width == NARROW)
        paper = open_page.run("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        assert max(paper) < 64 if scheme == "dark" else min(paper) > 192
        open_page.picture(f"compare-{scheme}-{width}")


def test_keyboard_reaches_the_picture_and_its_text_version(open_page: Page) -> None:
    open_page.show_as("light", NARROW, 1000)
    open_page.press("Tab")
    if open_page.run(f"document.activeElement !== {PICTURE}"):  # a table that scrolls would come before it
        open_page.press("Tab")
    assert open_page.run(f"document.activeElement === {PICTURE}")
    open_page.press("ArrowRight")
    open_page.wait_for(f"{PICTURE}.scrollLeft > 0")
    open_page.press("Tab")
    open_page.press("Enter")
    open_page.wait_for("document.querySelector('details').open")
    assert "slot 1: A in step" in open_page.text("details")


def test_screen_reader_reads_the_summaries(open_page: Page, comparison: Comparison) -> None:
    nodes = {
        node["role"]["value"]: node
        for node in reversed(accessibility_nodes(open_page))
        if not node["ignored"]
    }
    label = nodes["image"]["name"]["value"]
    for strategy in comparison.results:
        assert f"{strategy}: {comparison.summary(strategy)}" in label
    assert nodes["region"]["name"]["value"] == "Which request held which slot"
    headers = {
        node["name"]["value"]
        for node in accessibility_nodes(open_page)
        if node["role"]["value"] == "rowheader"
    }
    assert headers == {name for name, _ in comparison.rows()}


def accessibility_nodes(page: Page) -> list[dict[str, dict[str, str]]]:
    page.call("Accessibility.enable")
    nodes: list[dict[str, dict[str, str]]] = page.call("Accessibility.getFullAXTree")["nodes"]
    return nodes


def test_text_version_lists_requests_and_slots(comparison: Comparison) -> None:
    timeline = lay_out(hand_made.run())
    assert slots_as_text(comparison, timeline) == [
        "slot 1: A in steps 0 to 2; C in steps 3 to 4",
        "slot 2: B in steps 0 to 3, finished before step 2; D in steps 4 to 5",
    ]
    first = timeline.spans[0]
    alone = replace(timeline, num_slots=3, spans=[replace(first, last=first.first + 1)])
    assert slots_as_text(comparison, alone) == ["slot 1: A in step 0", "never used: 2 of 3 slots"]
    assert len(requests_as_text(comparison)) == comparison.num_requests
    title = comparison.requests[0].title
    assert requests_as_text(comparison)[0].startswith(
        f"A: {title}; {comparison.requests[0].num_prompt_tokens} prompt"
    )
