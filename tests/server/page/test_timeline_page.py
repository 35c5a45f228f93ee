"""The timeline, requests, memory and API pages in a real browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from inflight.timeline.trace import recording_of, write_recording
from tests.server.chat_page import ask, look, open_chat, wait_for_figures
from tests.server.live import Backend, Live, live_server
from tests.server.routes.test_requests import log_finished
from tests.support.browser import Page
from tests.timeline.test_terminal import chunks

NUM_SLOTS = 4
LENGTHS = {"a": 12, "b": 60, "c": 60, "d": 60, "e": 20}  # tokens: e waits until a leaves
STORE = "inflight.pages.timeline.store.replicas.get('0')"
VIEW = "inflight.pages.timeline.view"


@pytest.fixture(scope="module")
def slots() -> Iterator[Backend]:
    backend = Backend(num_blocks=256, max_num_seqs=NUM_SLOTS)
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def live(slots: Backend) -> Iterator[Live]:
    with live_server(slots) as server:
        yield server


def send(live: Live, name: str, length: int) -> dict[str, Any]:
    """Complete a prompt of the given length under the given request id."""
    body = {"request_id": name, "max_tokens": length, "ignore_eos": True}
    return live.complete(f"This is the story of {name}.", **body)


def staggered(live: Live) -> None:
    """Run five requests on four slots, one after the other but so soon that they overlap."""
    with ThreadPoolExecutor() as pool, live.backend.held_steps() as held:
        running: list[Future[Any]] = []
        for name, length in LENGTHS.items():
            running.append(pool.submit(send, live, name, length))
            live.wait_until(f"request {name}", lambda name=name: _is_known(live, name))
            held.allow(2)
        held.release()
        for one in running:
            one.result()


async def _is_known(live: Live, name: str) -> bool:
    return any(logged.request_id == name and logged.queued for logged in live.state.request_log)


@pytest.fixture(scope="module")
def recorded(live: Live) -> Live:
    """A server that has run the five requests."""
    staggered(live)
    return live


def open_timeline(page: Page, live: Live, query: str = "") -> None:
    page.open(f"{live.url}/timeline{query}")
    page.wait_for(f"globalThis.inflight && {STORE}?.requests.size >= 5")


def runs(page: Page, name: str) -> Any:
    """Return the runs of a request that the page knows."""
    script = f"(() => {{ const store = {STORE}, one = [...store.requests.values()].find(({{ id }}) => id === '{name}');"
    return page.run(script + "return store.runsOf(one.number); })()")


def test_request_joins_in_the_step_after_another_leaves(page: Page, recorded: Live) -> None:
    open_timeline(page, recorded)
    left, joined = runs(page, "a"), runs(page, "e")
    assert joined[0]["slot"] == left[0]["slot"]
    assert joined[0]["first"] == left[-1]["end"]
    tokens = sum(run["end"] - run["first"] for run in runs(page, "b") if run["kind"] == 0)
    assert tokens == LENGTHS["b"] - 1  # the first token comes with the end of the prompt
    look(page, "timeline")


def test_page_can_be_paused_scrubbed_and_zoomed(page: Page, recorded: Live) -> None:
    open_timeline(page, recorded)
    page.click("#pause")
    page.wait_for("document.querySelector('#pause').innerText === 'Live'")
    before = page.run(f"({{...{VIEW}}})")
    send(recorded, "later", 8)
    page.wait_for(f"[...{STORE}.requests.values()].some(({{ id }}) => id === 'later')")
    assert page.run(f"({{...{VIEW}}})") == before
    page.click("#overview")
    assert page.run(f"{VIEW}.from") != before["from"]
    page.click("#zoom-in")
    assert page.run(f"{VIEW}.seconds") == pytest.approx(before["seconds"] / 2)
    page.click("#pause")
    page.wait_for(f"Math.abs({VIEW}.from + {VIEW}.seconds * 0.97 - {STORE}.endedAt({STORE}.end - 1)) < 0.5")


def test_cells_can_be_explored_by_keyboard(page: Page, recorded: Live) -> None:
    open_timeline(page, recorded)
    # It takes the focus once it is drawn.
    page.wait_for("(document.querySelector('#lanes').focus(), document.activeElement.id === 'lanes')")
    page.press("ArrowRight")
    page.wait_for("document.querySelector('#detail').innerText.includes('slot 0')")
    step = int(re.search(r"Step ([\d,]+)", page.text("#detail"))[1].replace(",", ""))  # type: ignore[index]
    page.press("ArrowRight")
    page.wait_for(f"document.querySelector('#detail').innerText.includes('Step {step + 1:,}')")


def test_slowest_request_is_followed_and_explained(page: Page, recorded: Live) -> None:
    open_timeline(page, recorded)
    page.click("#slowest-request")
    page.wait_for("!document.querySelector('#unfollow').hidden")
    page.wait_for("document.querySelector('#detail a')")
    look(page, "followed")
    page.click("#detail a")
    page.wait_for("document.querySelector('.why')")
    assert "in the queue" in page.text(".why")
    look(page, "story")
    shares = page.run("[...document.querySelectorAll('.causes')][0].querySelectorAll('.cause').length")
    assert shares >= 2
    page.click("#story .answer-story a")  # back to its life on the timeline
    page.wait_for("document.querySelector('#lanes') && !document.querySelector('#unfollow').hidden")


def test_waiting_request_is_listed_with_its_reason(page: Page, live: Live, slots: Backend) -> None:
    with ThreadPoolExecutor() as pool:
        with slots.held_steps() as held:
            running = [pool.submit(send, live, f"busy-{index}", 100) for index in range(NUM_SLOTS + 1)]
            live.wait_until("all", lambda: slots.core.scheduler.pool.num_waiting == NUM_SLOTS + 1)
            held.allow(5)
            page.open(f"{live.url}/requests")
            page.wait_for(
                "document.querySelector('#request-lists')?.innerText.includes('Waiting for a slot')"
            )
        for one in running:
            one.result()
    page.wait_for("document.querySelectorAll('#request-lists section:last-child tr').length > 4")
    look(page, "requests")


def test_earlier_requests_and_more_answers_are_shown_on_demand(page: Page, live: Live) -> None:
    log_finished(live, 250)
    live.complete("This is the story of many.", request_id="many", max_tokens=1, n=20)
    page.open(f"{live.url}/requests?id=many")
    rows = "document.querySelectorAll('#request-lists tbody tr').length"
    answers = "document.querySelectorAll('#story .answer-story').length"
    page.wait_for(f"{rows} === 200 && {answers} === 16")
    page.run("document.querySelector('#request-lists > button').click()")  # it is below the visible part
    page.wait_for(f"{rows} > 250")
    assert not page.run("document.querySelector('#request-lists > button')")
    page.run("document.querySelector('#story > button').click()")  # it is below the visible part
    page.wait_for(f"{answers} === 20")
    look(page, "pages")


def test_memory_page_counts_every_block(page: Page, recorded: Live) -> None:
    page.open(f"{recorded.url}/memory")
    page.wait_for("document.querySelector('.figures-grid dd')")
    figures = dict(
        page.run(
            "[...document.querySelectorAll('.figures-grid > div')].map((one) => one.innerText.split('\\n'))"
        )
    )
    counts = {
        name: int(text.split()[0].replace(",", "")) for name, text in figures.items() if text[0].isdigit()
    }
    assert counts["In use"] + counts["Cached"] + counts["Free"] == counts["Blocks"] == 256
    assert counts["Cached"] > 0
    look(page, "memory")


def test_answer_links_to_its_own_story(page: Page, live: Live) -> None:
    open_chat(page, live)
    ask(page, "Why does it rain?")
    wait_for_figures(page)
    page.click(".actions a")
    page.wait_for("document.querySelector('.why')?.innerText.includes('for the prompt')")
    page.click("nav a")
    page.wait_for("document.querySelector('.content')?.innerText.length > 10")  # the chat is still there


def test_api_page_has_an_example_and_fields_for_every_route(page: Page, live: Live) -> None:
    page.open(f"{live.url}/docs")
    page.wait_for("document.querySelectorAll('.route').length > 10")
    paths = live.http.get("/openapi.json").json()["paths"]
    shown = page.run(
        "[...document.querySelectorAll('.route')].map((one) => one.querySelector('summary code').innerText)"
    )
    assert set(shown) == set(paths)
    examples = page.run("[...document.querySelectorAll('.route pre')].map((one) => one.textContent)")
    assert len(examples) == len(shown)
    assert all(text.startswith("curl ") for text in examples)
    assert not page.run(
        "[...document.querySelectorAll('.fields > div')].filter((one) => !one.querySelector('dd').textContent)"
        ".map((one) => one.closest('.route').querySelector('summary code').textContent + ' ' + one.textContent)"
    )
    page.run("document.querySelector('.route').open = true")
    look(page, "api")


def test_saved_page_shows_the_recording_without_a_server(page: Page, recorded: Live, tmp_path: Path) -> None:
    recording = recorded.http.get("/v1/trace?seconds=600&format=recording").json()
    path = tmp_path / "run.html"
    write_recording(recording, path)
    page.open(path.as_uri())
    store = "inflight.pages[''].store.replicas.get('0')"
    page.wait_for(f"globalThis.inflight && {store}?.requests.size >= 5")
    page.wait_for("document.querySelector('#lanes').width > 300")
    assert page.text("#model") == "recording"
    page.click("#slowest-request")
    page.wait_for("!document.querySelector('#unfollow').hidden")
    look(page, "recording")


def test_slots_of_others_are_shown_without_their_requests(page: Page, tmp_path: Path) -> None:
    path = tmp_path / "own.html"
    write_recording(recording_of(chunks(3, own={1})), path)
    page.open(path.as_uri())
    page.wait_for("globalThis.inflight && inflight.pages[''].store.replicas.get('0')?.mostShared === 3")
    page.run("document.querySelector('#lanes').focus()")
    page.press("ArrowRight")
    page.wait_for(
        "document.querySelector('#detail').innerText.includes('In use by a request of another key.')"
    )
    assert page.run("inflight.pages[''].store.replicas.get('0').requests.size") == 1
    look(page, "others")
