from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from inflight.frontend.agents.detect import (
    CallStyle,
    detect_calls,
    detect_reasoning_format,
    detect_tool_format,
    opens_reasoning,
)
from inflight.frontend.agents.formats.base import TOOL_FORMATS
from inflight.frontend.text.chat_template import ChatTemplate, Renderer
from inflight.frontend.text.tokenizer import Tokenizer
from tests.frontend.text.samples import byte_level_backend
from tests.frontend.text.templates import CHATML

from .templates import KNOWN

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    """A renderer whose one worker serves all templates."""
    renderer = Renderer()
    yield renderer
    renderer.close()


@pytest.fixture
def template(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> partial[ChatTemplate]:
    monkeypatch.setattr("inflight.frontend.text.chat_template.Renderer", lambda _: renderer)
    return partial(ChatTemplate, special_tokens=SPECIALS)


@pytest.mark.parametrize("name", list(KNOWN))
def test_formats_are_detected_from_the_template(name: str, template: partial[ChatTemplate]) -> None:
    source, tool_format, reasoning_format = KNOWN[name]
    assert detect_reasoning_format(template(source)) == reasoning_format
    assert detect_tool_format(template(source), reasoning_format) == tool_format


def test_every_format_is_detected_from_a_template() -> None:
    assert {tool_format for _, tool_format, _ in KNOWN.values()} == {*TOOL_FORMATS, None}


@pytest.mark.parametrize(
    ("name", "style"),
    [
        ("qwen3", CallStyle()),
        ("harmony", CallStyle(thinking=True)),
        ("mistral", CallStyle(short_ids=True)),
        ("deepseek_v3", CallStyle(arguments_as_text=True)),
        ("qwq", CallStyle(empty_content="")),  # it splits the content of earlier turns
        ("glm46", CallStyle(empty_content="")),  # it writes the word "None" otherwise
    ],
)
def test_detected_style_renders_whole_conversations(
    name: str, style: CallStyle, template: partial[ChatTemplate]
) -> None:
    source, tool_format, reasoning_format = KNOWN[name]
    calls = detect_calls(template(source), reasoning_format)
    assert calls is not None
    assert (calls.tool_format, calls.style) == (tool_format, style)


def test_nothing_is_detected_without_a_template(template: partial[ChatTemplate]) -> None:
    assert detect_tool_format(template(None)) is None
    assert detect_reasoning_format(template(None)) is None


def test_tool_use_template_is_used_for_detection(template: partial[ChatTemplate]) -> None:
    both = template({"default": CHATML, "tool_use": KNOWN["qwen3"][0]})
    assert detect_tool_format(both) == "hermes"


def test_reasoning_is_detected_from_the_vocabulary(
    template: partial[ChatTemplate],
) -> None:
    backend = byte_level_backend()
    backend.add_tokens(["<think>"])
    assert detect_reasoning_format(template(CHATML), Tokenizer(backend)) is None
    backend.add_tokens(["</think>"])
    assert detect_reasoning_format(template(CHATML), Tokenizer(backend)) == "think"


OPENING = CHATML + "{% if enable_thinking %}<think>\n{% endif %}{# </think> #}"


@pytest.mark.parametrize(
    ("source", "opens"),
    [
        (OPENING, True),
        (KNOWN["qwen3"][0], False),
        (CHATML, False),
        (OPENING + "{{ raise_exception('no') }}", False),
    ],
)
def test_prompts_that_open_reasoning_are_detected(
    source: str, opens: bool, template: partial[ChatTemplate]
) -> None:
    assert opens_reasoning(template(source), "think") == opens
    assert not opens_reasoning(template(source), None)
