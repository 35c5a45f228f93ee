"""The actions and views of a reader of the chat page."""

from __future__ import annotations

from tests.server.live import Live
from tests.support.browser import LOOKS, Page


def open_chat(page: Page, live: Live) -> None:
    """Until the model's name is there. Answers are then greedy."""
    page.open(live.url)
    page.wait_for("document.querySelector('#model').innerText.includes('context')")
    page.run("document.querySelector('#temperature').value = '0'")


def ask(page: Page, text: str) -> None:
    page.run("document.querySelector('#text').focus()")
    page.write(text)
    page.press("Enter")


def wait_for_figures(page: Page, number: int = 1) -> str:
    """Return the line below the answer of this number, once it is over."""
    page.wait_for(f"document.querySelectorAll('.figures').length === {number}")
    return str(page.run("[...document.querySelectorAll('.figures')].at(-1).innerText"))


def is_seen(page: Page, selector: str) -> bool:
    """Whether the element is on the screen, and nothing lies above it."""
    return bool(
        page.run(
            f"(() => {{ const node = [...document.querySelectorAll('{selector}')].at(-1);"
            "const box = node.getBoundingClientRect();"
            "return document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2) === node; })()"
        )
    )


def look(page: Page, name: str) -> None:
    """On a desk and on a phone, light and dark: nothing is cut, and text stands out from what is behind it."""
    for scheme, width in LOOKS:
        page.show_as(scheme, width, 780)
        page.run("globalThis.scrollDown?.()")
        assert page.run("document.documentElement.scrollWidth") <= width
        assert not page.cut()
        back, ink = (
            page.run(f"getComputedStyle(document.body).{name}.match(/\\d+/g).map(Number)")
            for name in ("backgroundColor", "color")
        )
        assert max(back) < 64 < 192 < min(ink) if scheme == "dark" else max(ink) < 64 < 192 < min(back)
        page.picture(f"chat-{name}-{scheme}-{width}")
    page.show_as("light")
