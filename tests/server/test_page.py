"""The chat page in a real browser."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from inflight import LLM, SamplingParams
from tests.server.browser import Page, browser
from tests.server.live import Backend, Live, live_server

QUESTION = "Why does it rain?"


@pytest.fixture(scope="module")
def _tab() -> Iterator[Page]:
    with browser() as found:
        yield found


@pytest.fixture
def page(_tab: Page) -> Iterator[Page]:
    _tab.problems.clear()
    _tab.show_as("light")
    yield _tab
    _tab.open("about:blank")
    assert not _tab.problems


def greedy(page: Page, live: Live) -> None:
    page.open(live.url)
    page.wait_for("document.querySelector('#model').innerText")
    page.run("document.querySelector('#temperature').value = '0'")


def ask(page: Page, text: str) -> None:
    page.run("document.querySelector('#text').focus()")
    page.write(text)
    page.press_enter()


def wait_for_figures(page: Page, number: int = 1) -> str:
    page.wait_for(f"document.querySelectorAll('.figures').length === {number}")
    return page.text(f".assistant:nth-of-type({2 * number}) .figures")


def answer_of(page: Page, number: int = 1) -> str:
    whole = page.text(f".assistant:nth-of-type({2 * number})")
    return whole.removesuffix(page.text(f".assistant:nth-of-type({2 * number}) .figures")).rstrip("\n")


def test_a_question_is_answered(page: Page, live: Live, llm: LLM) -> None:
    greedy(page, live)
    assert page.text("#model") == "inflight-builtin · context 2,048"
    page.picture("empty")
    ask(page, QUESTION)
    figures = wait_for_figures(page)
    text = llm.chat([{"role": "user", "content": QUESTION}], SamplingParams(temperature=0, max_tokens=500))
    assert answer_of(page) == text[0].outputs[0].text
    assert page.text(".user") == QUESTION
    assert re.search(r"first token \d+ ms · \d+ tokens · [\d,]+ tokens/s", figures)
    ask(page, "What is continuous batching?")
    assert "prompt tokens cached" in wait_for_figures(page, 2)  # of the turn before
    page.picture("light")
    page.show_as("dark")
    back, ink = (
        page.run(f"getComputedStyle(document.body).{name}.match(/\\d+/g).map(Number)")
        for name in ("backgroundColor", "color")
    )
    assert max(back) < 64 < 192 < min(ink)
    page.picture("dark")
    page.show_as("light", width=390, height=780)
    assert page.run("document.documentElement.scrollWidth") <= 390
    page.picture("narrow")


def test_an_example_and_a_new_chat(page: Page, live: Live) -> None:
    greedy(page, live)
    page.click("#empty button")
    wait_for_figures(page)
    assert page.text(".user")
    page.click("#fresh")
    assert page.run("document.querySelectorAll('.message').length") == 0
    assert page.text("#empty")


def test_text_streams_and_can_be_stopped(page: Page, live: Live, backend: Backend) -> None:
    def slow(_: object) -> None:
        time.sleep(0.03)

    greedy(page, live)
    backend.core.observers.append(slow)
    try:
        ask(page, "Tell me a story about a fox.")
        page.wait_for("document.querySelector('.assistant')?.innerText.length > 10")
        assert page.text("#send") == "Stop"
        assert not page.text(".figures")  # it is not over: this is a part of it
        page.picture("streaming")
        page.click("#send")
        assert "stopped" in wait_for_figures(page)
    finally:
        backend.core.observers.remove(slow)
    live.wait_until_idle()
    assert page.text("#send") == "Send"
    ask(page, QUESTION)  # and it goes on
    assert "tokens/s" in wait_for_figures(page, 2)


def test_markup_is_only_text(page: Page, live: Live) -> None:
    greedy(page, live)
    ask(page, "<img src=x onerror=document.title='bad'><b>bold</b>")
    wait_for_figures(page)
    assert page.text(".user").startswith("<img")
    assert page.run("document.querySelectorAll('.message img, .message b').length") == 0
    assert page.run("document.title") == "inflight"


def test_a_key_is_asked_for(page: Page, backend: Backend) -> None:
    with live_server(backend, api_key=("secret",)) as live:
        page.open(live.url)
        page.wait_for("document.querySelector('#model').innerText === 'needs an API key'")
        assert page.run("document.activeElement.id") == "key"
        page.picture("key")
        ask(page, QUESTION)
        assert "asks for an API key" in wait_for_figures(page)
        assert page.run("document.activeElement.id") == "key"
        assert page.run("document.querySelector('#text').value") == QUESTION  # to be sent again
        page.picture("refused")
        page.write("secret")
        page.press_enter()
        page.wait_for("document.querySelector('#model').innerText.startsWith('inflight-builtin')")
        ask(page, "")
        assert "tokens/s" in wait_for_figures(page, 2)
        live.wait_until_idle()
    page.problems[:] = [text for text in page.problems if "401" not in text]


def test_errors_are_shown(page: Page, live: Live) -> None:
    greedy(page, live)
    ask(page, "word " * 3000)
    assert "longer than the model's context length" in wait_for_figures(page)
    page.run("document.querySelector('#scroll').scrollTop = 1e9")
    page.picture("error")
    page.problems[:] = [text for text in page.problems if "400" not in text]
