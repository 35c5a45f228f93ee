"""The chat page in a real browser: reasoning, tool calls, and the tools that it runs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.frontend.text.templates import CHATML
from tests.server.calling import call
from tests.server.chat_page import ask, is_seen, look, open_chat, wait_for_figures
from tests.server.live import Live
from tests.server.scripted import ScriptedClient, scripted_server, write_folder
from tests.support.browser import Page

THOUGHTS = "<think>\nThe weather is what the tool says, and the sum too.\n</think>\n\n"
QUESTION = "How is the weather in Paris, and what is 2 * (3 + 4)?"
MAX_ROUNDS = 8


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Live, ScriptedClient]]:
    with scripted_server(write_folder(tmp_path_factory.mktemp("qwen3"))) as found:
        yield found


@pytest.fixture
def live(served: tuple[Live, ScriptedClient], page: Page) -> Live:
    """Open in the page."""
    open_chat(page, served[0])
    page.wait_for("!document.querySelector('#think-switch').hidden")
    return served[0]


@pytest.fixture
def model(served: tuple[Live, ScriptedClient]) -> ScriptedClient:
    served[1].requests.clear()
    served[1].num_allowed = math.inf
    return served[1]


def prompt(live: Live, model: ScriptedClient, number: int = -1) -> str:
    tokenizer = live.state.model.frontend.tokenizer
    assert tokenizer is not None
    return tokenizer.decode(model.requests[number].token_ids, skip_special_tokens=False)


def switch_on(page: Page, *tools: str) -> None:
    page.click("#tools summary")
    for name in tools:
        page.click(f"#tools input[value={name}]")


def texts(page: Page, selector: str) -> Any:
    return page.run(f"[...document.querySelectorAll({selector!r})].map((one) => one.innerText)")


def test_reasoning_is_shown_while_it_streams_and_then_folded(
    page: Page, live: Live, model: ScriptedClient
) -> None:
    model.script, model.num_allowed = f"{THOUGHTS}It is fine.", 30
    assert page.run("document.querySelector('#think').checked")  # this template thinks unless told not to
    ask(page, QUESTION)
    page.wait_for("document.querySelector('.thinking div')?.innerText.length > 5")
    assert page.run("document.querySelector('.thinking').open")
    assert page.text(".thinking summary") == "Thinking"
    look(page, "thinking")
    model.num_allowed = math.inf
    wait_for_figures(page)
    assert not page.run("document.querySelector('.thinking').open")
    assert page.text(".thinking summary").startswith("Thought for ")
    assert page.text(".content") == "It is fine."
    page.click(".thinking summary")
    assert page.text(".thinking div") == "The weather is what the tool says, and the sum too."
    assert "</think>" not in prompt(live, model)


def test_thinking_can_be_switched_off(page: Page, live: Live, model: ScriptedClient) -> None:
    model.script = "It is fine."
    page.click("#think")
    ask(page, QUESTION)
    wait_for_figures(page)
    assert prompt(live, model).endswith("<think>\n\n</think>\n\n")
    assert not page.text(".thinking")


def test_tools_are_called_until_the_model_answers(page: Page, live: Live, model: ScriptedClient) -> None:
    switch_on(page, "get_weather", "calculate")
    assert page.text("#tools summary") == "Tools · 2 on"
    look(page, "tools")
    page.click("#tools summary")
    model.scripts = [
        f"{THOUGHTS}Let me see.{call('get_weather', city='Paris')}{call('calculate', expression='2 * (3 + 4)')}",
        call("calculate", expression="14 / 0"),
        "It is 14, and the weather is fine.",
    ]
    ask(page, QUESTION)
    assert "tokens/s" in wait_for_figures(page, 3)
    assert texts(page, ".call .name") == ["get_weather", "calculate", "calculate"]
    assert texts(page, ".call .arguments")[:2] == ['{"city": "Paris"}', '{"expression": "2 * (3 + 4)"}']
    weather, total, failed = texts(page, ".call .result")
    assert weather.endswith("°C")
    assert (total, failed) == ("14", "Error: cannot compute 14 / 0")
    assert texts(page, ".content") == ["Let me see.", "It is 14, and the weather is fine."]
    look(page, "calls")
    last = prompt(live, model)
    assert f"<tool_response>\n{weather}\n</tool_response>\n<tool_response>\n14\n</tool_response>" in last
    assert '"name": "get_weather"' in last
    assert '"name": "lookup"' not in last
    model.scripts = ["And?"]
    ask(page, "Thanks.")  # the conversation goes on from there
    wait_for_figures(page, 4)
    assert "It is 14, and the weather is fine.<|im_end|>\n<|im_start|>user\nThanks." in prompt(live, model)


def test_arguments_are_shown_while_they_stream(page: Page, live: Live, model: ScriptedClient) -> None:  # noqa: ARG001
    switch_on(page, "lookup")
    model.script, model.num_allowed = call("lookup", query="a long question about octopus arms"), 75
    ask(page, QUESTION)
    page.wait_for("document.querySelector('.arguments')?.innerText.length > 20")
    assert not page.text(".result")
    page.press("Escape")
    assert wait_for_figures(page) == "stopped"
    assert page.run("document.querySelector('#text').value") == QUESTION


MARKDOWN = """## Plan

Some **bold** and *slanted* text with `code`, [a link](https://example.org/x) and [none](javascript:alert(1)).

1. one
2. two
   - nested

| a | b |
|---|---|
| 1 | <b>2</b> |

```python
print("<i>hello</i>")
```
"""


def test_markdown_is_shown_as_elements_and_markup_as_text(
    page: Page,
    live: Live,  # noqa: ARG001
    model: ScriptedClient,
) -> None:
    model.script = MARKDOWN
    page.click("#think")
    ask(page, QUESTION)
    wait_for_figures(page)
    assert page.text(".content h4") == "Plan"
    assert (page.text(".content strong"), page.text(".content em")) == ("bold", "slanted")
    assert texts(page, ".content a") == ["a link"]
    assert "[none](javascript:alert(1))" in page.text(".content p")
    assert texts(page, ".content ol > li > ul > li") == ["nested"]
    assert texts(page, ".content td") == ["1", "<b>2</b>"]
    assert page.text(".content pre") == 'print("<i>hello</i>")'
    assert page.text(".code-head button") == "Copy"
    look(page, "markdown")


def test_answer_can_be_regenerated_with_a_system_prompt(
    page: Page, live: Live, model: ScriptedClient
) -> None:
    model.script = "First."
    page.click("#think")
    ask(page, QUESTION)
    wait_for_figures(page)
    model.script = "Second."
    page.click("#more summary")
    page.run("document.querySelector('#system').value = 'Be brief.'")
    page.click(".regenerate")
    page.wait_for("document.querySelector('.content')?.innerText === 'Second.'")
    wait_for_figures(page)
    assert texts(page, ".user") == [QUESTION]
    assert "system\nBe brief.<|im_end|>" in prompt(live, model)
    assert "First." not in prompt(live, model)


def test_endless_tool_calls_are_stopped(page: Page, live: Live, model: ScriptedClient) -> None:  # noqa: ARG001
    switch_on(page, "calculate")
    model.script = call("calculate", expression="1 + 1")
    ask(page, QUESTION)
    assert f"stopped after {MAX_ROUNDS} rounds of tool calls" in wait_for_figures(page, MAX_ROUNDS + 1)
    assert len(model.requests) == MAX_ROUNDS + 1
    assert page.run("document.querySelector('#stop').hidden")


def test_model_without_tool_support_disables_the_switches(page: Page, tmp_path: Path) -> None:
    with scripted_server(write_folder(tmp_path, CHATML)) as (live, _):
        open_chat(page, live)
        page.click("#tools summary")
        page.wait_for("document.querySelector('#tools-note').innerText.includes('does not support tools')")
        assert page.run("document.querySelectorAll('#tools input:enabled').length") == 0
        assert page.run("document.querySelector('#think-switch').hidden")
        look(page, "no-tools")


def test_refused_tools_disable_the_switches(page: Page, tmp_path: Path) -> None:
    shows = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML
    with scripted_server(write_folder(tmp_path, shows)) as (live, _):
        open_chat(page, live)
        switch_on(page, "lookup")
        ask(page, QUESTION)
        assert "the format of this model's tool calls is unknown" in wait_for_figures(page)
        assert page.text("#tools-note").startswith("This model cannot call tools: the format of this model's")
        assert is_seen(page, ".figures.error")
        look(page, "refused")
        ask(page, "")  # without them
        assert "tokens/s" in wait_for_figures(page, 2)
        page.excuse("400")
