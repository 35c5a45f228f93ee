"""The HTML page of a comparison in a real browser, and its text version."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from inflight.bench.compare.page import slots_as_text, to_html
from inflight.bench.compare.report import Comparison
from inflight.bench.compare.timeline import lay_out
from tests.bench.compare import hand_made
from tests.support.browser import LOOKS, NARROW, Page


@pytest.fixture
def open_page(page: Page, comparison: Comparison, tmp_path: Path) -> Page:
    """A browser in which the page is open."""
    (tmp_path / "compare.html").write_text(to_html(comparison), encoding="utf-8")
    page.open(f"file://{tmp_path}/compare.html")
    page.wait_for("document.querySelector('#lanes')?.height > 300")
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
        paper = open_page.run("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        assert max(paper) < 64 if scheme == "dark" else min(paper) > 192
        open_page.picture(f"compare-{scheme}-{width}")


def test_timelines_are_the_recordings_of_the_strategies(open_page: Page, comparison: Comparison) -> None:
    replicas = "[...inflight.pages[''].store.replicas.values()]"
    assert open_page.run(f"{replicas}.map((replica) => replica.id)") == list(comparison.results)
    steps = open_page.run(f"{replicas}.map((replica) => replica.end - replica.begin)")
    assert steps == [result.figures.num_steps for result in comparison.results.values()]
    assert open_page.run(f"{replicas}.map((replica) => replica.get('step', replica.begin))") == [0, 0, 0]
    letters = open_page.run(
        f"{replicas}.map((replica) => [...replica.requests.values()].map((each) => each.id).sort())"
    )
    assert letters == 3 * [sorted(request.label for request in comparison.requests)]


def test_outputs_of_a_recording_are_those_of_the_run(comparison: Comparison) -> None:
    for result in comparison.results.values():
        assert (
            sum(sum(chunk["steps"]["output"]) for chunk in result.chunks) == result.figures.num_output_tokens
        )
        assert min(chunk["steps"]["at"][0] for chunk in result.chunks if chunk["steps"]["at"]) < 0.1


def test_keyboard_reaches_cells_and_the_text_version(open_page: Page, comparison: Comparison) -> None:
    open_page.show_as("light", NARROW, 1000)
    open_page.run("document.querySelector('#lanes').focus()")
    open_page.press("ArrowRight")
    open_page.wait_for("document.querySelector('#detail').textContent.includes('Step ')")
    detail = open_page.text("#detail")
    titles = {request.label: request.title for request in comparison.requests}
    assert titles[detail.split(":")[0]] in detail
    open_page.run("document.querySelector('summary').focus()")
    open_page.press("Enter")
    open_page.wait_for("document.querySelector('details').open")
    assert "slot 1: A in step" in open_page.text("details")


def test_show_all_reaches_the_end_of_the_slowest_strategy(open_page: Page, comparison: Comparison) -> None:
    open_page.click("#show-all")
    longest = max(timeline.duration for timeline in comparison.timelines)
    open_page.wait_for(f"inflight.pages[''].view.seconds >= {0.9 * longest}")


def test_html_is_self_contained_and_escaped(comparison: Comparison) -> None:
    hostile = "</script><script>alert(1)</script>"
    requests = [replace(request, title=hostile) for request in comparison.requests]
    text = to_html(replace(comparison, requests=requests))
    assert not re.search(r"<(link|img|iframe)\b|@import|url\(", text)
    assert "&lt;the &amp; model&gt;" in text
    assert "<the & model>" not in text
    assert hostile not in text
    for result in comparison.results.values():
        assert f"{result.figures.num_steps:,}" in text


def test_text_version_lists_requests_and_slots(comparison: Comparison) -> None:
    timeline = lay_out(hand_made.run())
    assert slots_as_text(comparison, timeline) == [
        "slot 1: A in steps 0 to 2; C in steps 3 to 4",
        "slot 2: B in steps 0 to 3, finished before step 2; D in steps 4 to 5",
    ]
    first = timeline.spans[0]
    alone = replace(timeline, num_slots=3, spans=[replace(first, last=first.first + 1)])
    assert slots_as_text(comparison, alone) == ["slot 1: A in step 0", "never used: 2 of 3 slots"]
    first_request = comparison.requests[0]
    assert comparison.describe_request(0).startswith(
        f"A: {first_request.title}; {first_request.num_prompt_tokens} prompt"
    )
