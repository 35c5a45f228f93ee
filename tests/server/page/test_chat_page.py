"""The chat page in a real browser: questions, answers and errors."""

from __future__ import annotations

import re
from collections.abc import Callable

from inflight import LLM, SamplingParams
from tests.server.chat_page import ask, is_seen, look, open_chat, wait_for_figures
from tests.server.live import Backend, Live, live_server
from tests.support.browser import NARROW, Page

QUESTION = "Why does it rain?"
STORY = "Tell me a story about a fox."


SOME = 20  # steps: an answer has begun, and is not over


def wait_for_text(page: Page) -> None:
    page.wait_for("[...document.querySelectorAll('.assistant')].at(-1)?.innerText.length > 10")


def test_question_is_answered(page: Page, live: Live, llm: LLM) -> None:
    open_chat(page, live)
    assert page.text("#model") == "inflight-builtin · context length 4,096"
    look(page, "empty")
    ask(page, QUESTION)
    figures = wait_for_figures(page)
    text = llm.chat([{"role": "user", "content": QUESTION}], SamplingParams(temperature=0, max_tokens=500))
    assert page.text(".content") == text[0].outputs[0].text
    assert page.text(".user") == QUESTION
    assert re.search(r"first token \d+ ms · \d+ tokens · [\d,]+ tokens/s", figures)
    ask(page, "What is continuous batching?")
    assert "prompt tokens cached" in wait_for_figures(page, 2)  # of the turn before
    look(page, "answers")


def test_replicas_page_shows_a_single_engine(page: Page, live: Live) -> None:
    open_chat(page, live)
    page.click("nav a[href=replicas]")
    page.wait_for("document.querySelectorAll('#replicas li').length === 1")
    assert page.text("#summary") == "This server has one engine and no router; it is running."
    assert page.text("h2").split() == ["Engine", "running"]
    page.click("nav a")
    page.wait_for("document.querySelector('#chat')")


def test_example_question_and_new_chat(page: Page, live: Live, backend: Backend) -> None:
    open_chat(page, live)
    page.click("#empty button")
    wait_for_figures(page)
    assert page.text(".user")
    with backend.held_steps(SOME):
        ask(page, STORY)
        wait_for_text(page)
        page.click("#fresh")  # also while an answer comes
    assert page.run("document.querySelectorAll('.message').length") == 0
    assert page.text("#empty")
    ask(page, QUESTION)
    assert "tokens/s" in wait_for_figures(page)
    assert page.run("document.querySelector('#text').value") == ""


def test_answer_streams_and_can_be_stopped(page: Page, live: Live, backend: Backend) -> None:
    open_chat(page, live)
    stops: list[Callable[[], None]] = [lambda: page.click("#stop"), lambda: page.press("Escape")]
    for number, stop in enumerate(stops, 1):
        with backend.held_steps(SOME):
            ask(page, STORY)
            wait_for_text(page)
            assert page.run("document.querySelectorAll('.figures').length") == number - 1  # it is not over
            stop()
            assert wait_for_figures(page, number) == "stopped"
    live.wait_until_idle()
    assert not is_seen(page, "#stop")
    ask(page, QUESTION)  # and it goes on
    assert "tokens/s" in wait_for_figures(page, 3)


def test_message_sent_during_an_answer_is_queued(page: Page, live: Live, backend: Backend) -> None:
    open_chat(page, live)
    with backend.held_steps(SOME):
        ask(page, STORY)
        wait_for_text(page)
        ask(page, QUESTION)
        ask(page, "And now something else that is so long that a line on a phone does not hold it")
        assert page.run("document.querySelectorAll('.user').length") == 1
        page.show_as("light", NARROW, 780)
        assert not page.cut()
        page.picture("chat-queue-light-390")
        page.click("#queue li:last-child button")  # take it back
        assert page.run("document.querySelector('#text').value").startswith("And now")
        assert is_seen(page, "#send")  # beside the button that stops
        assert is_seen(page, "#stop")
        page.run("document.querySelector('#text').value = ''")
    wait_for_figures(page, 2)
    assert page.run("[...document.querySelectorAll('.user')].map((one) => one.innerText)") == [
        STORY,
        QUESTION,
    ]
    with backend.held_steps(SOME):
        ask(page, STORY)
        wait_for_text(page)
        ask(page, QUESTION)
        page.press("Escape")
        wait_for_figures(page, 3)
    assert page.run("document.querySelector('#text').value") == QUESTION  # nothing is sent behind one's back
    assert not page.text("#queue")


def test_markup_is_shown_as_text(page: Page, live: Live) -> None:
    open_chat(page, live)
    ask(page, "<img src=x onerror=document.title='bad'><b>bold</b>")
    wait_for_figures(page)
    assert page.text(".user").startswith("<img")
    assert page.run("document.querySelectorAll('.message img, .message b').length") == 0
    assert page.run("document.title") == "inflight"


def test_page_asks_for_the_api_key(page: Page, backend: Backend) -> None:
    with live_server(backend, api_key=("secret",)) as live:
        page.open(live.url)
        page.wait_for("document.querySelector('#model').innerText === 'API key required'")
        assert page.run("document.activeElement.id") == "key"
        ask(page, QUESTION)
        assert "requires an API key" in wait_for_figures(page)
        assert page.run("document.activeElement.id") == "key"
        assert page.run("document.querySelector('#text').value") == QUESTION  # to be sent again
        look(page, "key")
        for wrong in ("guess", "schlüssel"):
            page.run("document.querySelector('#key').select()")
            page.write(wrong)
            page.press("Enter")
            page.wait_for("document.querySelector('#model').innerText === 'invalid API key'")
            assert "API key is not valid" in page.text("#notice")
            page.run("document.querySelector('#model').innerText = ''")
        page.run("document.querySelector('#key').select()")
        page.write("secret")
        page.press("Enter")
        page.wait_for("document.querySelector('#model').innerText.startsWith('inflight-builtin')")
        assert not page.text("#notice")
        ask(page, "")
        assert "tokens/s" in wait_for_figures(page, 2)
        live.wait_until_idle()
        page.leave()
    page.excuse("401")


def test_error_is_visible_after_a_long_message(page: Page, live: Live) -> None:
    open_chat(page, live)
    page.show_as("light", NARROW, 780)
    ask(page, "word " * 5000)
    assert "longer than the model's context length" in wait_for_figures(page)
    assert is_seen(page, ".figures.error")
    assert page.run("document.querySelector('#text').value").startswith("word word")
    look(page, "error")
    assert is_seen(page, ".figures.error")
    page.excuse("400")


def test_page_waits_for_a_loading_server(page: Page, backend: Backend) -> None:
    with live_server(backend, is_open=False) as live:
        live.server.loading_app.progress(25, 100)
        page.open(live.url)
        page.wait_for("document.querySelector('#notice').innerText.includes('loading (25 %)')")
        ask(page, QUESTION)  # is kept until then
        look(page, "loading")
        assert page.text("#queue").startswith("Next:")
        backend.loop.call_soon_threadsafe(live.server.open, live.state)
        assert "tokens/s" in wait_for_figures(page)
        assert page.text("#model").startswith("inflight-builtin")
        assert not page.text("#notice")
        assert not page.text("#queue")
        live.wait_until_idle()
        page.leave()
    page.excuse("503")


def test_page_waits_for_an_unreachable_server(page: Page, backend: Backend) -> None:
    with live_server(backend) as live:
        open_chat(page, live)
        port = int(live.url.rpartition(":")[2])
        with backend.held_steps(SOME):
            ask(page, STORY)
            wait_for_text(page)
            live.stop()
            assert wait_for_figures(page) == "the server shut down before the request was finished"
    page.wait_for("document.querySelector('#notice').innerText.includes('continues when it is back')")
    assert page.text("#model") == "not reachable"
    ask(page, QUESTION)
    assert "The server does not respond" in wait_for_figures(page, 2)
    assert page.run("document.querySelector('#text').value") == QUESTION
    look(page, "gone")
    with live_server(backend, port=port) as live:
        page.wait_for("document.querySelector('#model').innerText.includes('context')")
        assert not page.text("#notice")
        ask(page, "")
        assert "tokens/s" in wait_for_figures(page, 3)
        live.wait_until_idle()
        page.leave()
    for words in ("ERR_", "503"):  # of one that is gone, or is about to be
        page.excuse(words)
