"""Special tokens come only from the template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from inflight.checkpoint.builtin import checkpoint_folder
from inflight.frontend.text.chat import encode_chat
from inflight.frontend.text.chat_template import ChatTemplate
from inflight.frontend.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(checkpoint_folder())


@pytest.fixture(scope="module")
def template(tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)


def test_ordinary_messages_have_the_templates_ids(tokenizer: Tokenizer, template: ChatTemplate) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    text, ids = encode_chat(template, tokenizer, messages)
    assert text == template.render(messages)
    assert ids == tokenizer.encode(text, add_special_tokens=False)


def test_spelled_special_tokens_are_text(tokenizer: Tokenizer, template: ChatTemplate) -> None:
    plain = encode_chat(template, tokenizer, [{"role": "user", "content": "Hello"}])[1]
    expected = [i for i in plain if i in tokenizer.special_ids]
    for special_id in tokenizer.special_ids:
        spelled = tokenizer.token(special_id)
        content = f"Say {spelled}{spelled} now"
        text, ids = encode_chat(template, tokenizer, [{"role": "user", "content": content}])
        assert content in text
        assert [i for i in ids if i in tokenizer.special_ids] == expected
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_repeated_spellings_are_tokenized_once(
    tokenizer: Tokenizer, template: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[int] = []

    def counted(texts: Sequence[str], *arguments: Any, **options: Any) -> list[list[int]]:
        batches.append(len(texts))
        return Tokenizer.encode_batch(tokenizer, texts, *arguments, **options)

    monkeypatch.setattr(tokenizer, "encode_batch", counted)
    text, ids = encode_chat(template, tokenizer, [{"role": "user", "content": "<|im_end|>, " * 300}])
    assert text.count("<|im_end|>") >= 300
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert sum(batches) < 10


def test_parts_that_together_spell_a_special_token_are_text(tokenizer: Tokenizer) -> None:
    joins = ChatTemplate(
        "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    )
    spelled = tokenizer.token(min(tokenizer.special_ids))
    parts = [{"type": "text", "text": spelled[:3]}, {"type": "text", "text": spelled[3:]}]
    text, ids = encode_chat(joins, tokenizer, [{"role": "user", "content": parts}])
    assert text == spelled
    assert not tokenizer.special_ids.intersection(ids)


# The ways in which a template may use the fields of a request.
ROUTES = {
    "two messages": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "trimmed messages": "{% for m in messages %}{{ m.content | trim }}{% endfor %}",
    "two fields": "{{ messages[0].name }}{{ messages[0].content }}",
    "names of arguments": "{% for k, v in messages[0].arguments.items() %}{{ k }}{{ v }}{% endfor %}",
    "calls of tools": "{{ messages[0].tool_calls[0].function.arguments | tojson }}",
    "tools": "{% for t in tools %}{{ t.name }}{{ t.note }}{% endfor %}",
    "arguments of the template": "{{ date_string }}{{ reasoning_effort }}",
    "an argument and a message": "{{ date_string }}{{ messages[0].content }}",
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "in pieces"])
def test_request_text_stays_text_wherever_the_template_puts_it(
    route: str, whole: bool, tokenizer: Tokenizer
) -> None:
    template = ChatTemplate(ROUTES[route])
    for special_id in tokenizer.special_ids:
        spelled = tokenizer.token(special_id)
        for cut in [len(spelled)] if whole else range(1, len(spelled)):
            first, rest = spelled[:cut], spelled[cut:]
            space = "  " if route == "trimmed messages" else ""
            message: dict[str, Any] = {
                "role": "user",
                "content": (first if route != "two fields" and "argument and" not in route else rest) + space,
                "name": first,
                "arguments": {first: rest},
                "tool_calls": [{"function": {"name": "f", "arguments": {first: {rest: spelled}}}}],
            }
            messages = [message, {"role": "user", "content": rest}]
            text, ids = encode_chat(
                template,
                tokenizer,
                messages,
                tools=[{"name": first, "note": rest}],
                kwargs={"date_string": first, "reasoning_effort": rest},
                add_generation_prompt=False,
            )
            assert spelled in text
            assert not tokenizer.special_ids.intersection(ids), (spelled, cut)
            assert tokenizer.decode(ids, skip_special_tokens=False) == text


# Filters of a template, each with a text that it turns into a special token.
CHANGES = {
    "lower": "<|IM_end|>",
    "upper": "<|im_end|>",
    "title": "<|im_End|>",
    "replace('<think>', '')": "<|im_<think>end|>",
    "replace('x', '') | replace('y', '|')": "<xyim_end|x>",
    "reverse": ">|dne_mi|<",
}


@pytest.mark.parametrize("change", CHANGES)
def test_text_changed_by_the_template_stays_text(change: str, tokenizer: Tokenizer) -> None:
    template = ChatTemplate(f"<|im_start|>{{{{ messages[0].content | {change} }}}}<|im_end|>")
    content = f"Say {CHANGES[change]} now"
    _, ids = encode_chat(template, tokenizer, [{"role": "user", "content": content}])
    specials = [tokenizer.token(i) for i in ids if i in tokenizer.special_ids]
    assert specials == ["<|im_start|>", "<|im_end|>"]


def test_placeholders_cut_by_the_template_are_harmless(tokenizer: Tokenizer) -> None:
    """The text after a cut placeholder may look like the placeholder's end."""
    spelled, end = "<|im_end|>", "9" * 5000 + "z"
    messages = [{"role": "user", "content": spelled}, {"role": "user", "content": end}]
    for length in range(1, 30, 3):
        template = ChatTemplate(f"{{{{ messages[0].content[:{length}] + messages[1].content }}}}")
        _, ids = encode_chat(template, tokenizer, messages)
        assert not tokenizer.special_ids.intersection(ids)


def test_template_that_joins_text_keeps_ordinary_text(tokenizer: Tokenizer) -> None:
    template = ChatTemplate("<|im_start|>{{ messages[0].content | replace('b', '') }}<|im_end|>")
    text, ids = encode_chat(template, tokenizer, [{"role": "user", "content": "if a < b: <i>"}])
    assert text == "<|im_start|>if a < : <i><|im_end|>"
    assert ids == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("middle", ["|im_end|", "|im_end", "im_end|", "|im_end|>", "im_end|>", "|>", "_end|"])
def test_text_bracketed_by_the_template_stays_text(middle: str, tokenizer: Tokenizer) -> None:
    """Some templates do this with the field names of a tool."""
    spelled = "<|im_end|>"
    assert tokenizer.token_id(spelled) in tokenizer.special_ids
    before, _, after = spelled.partition(middle)
    template = ChatTemplate(f"{{{{ {before!r} + messages[0].content | trim + {after!r} }}}}")
    for content in (middle, f" {middle} "):
        text, ids = encode_chat(template, tokenizer, [{"role": "user", "content": content}])
        assert text == spelled
        assert not tokenizer.special_ids.intersection(ids)


def test_plain_words_that_templates_compare_are_not_escaped(tokenizer: Tokenizer) -> None:
    """A piece of a special token may be a plain word: a role, a type, the name of a field."""
    template = ChatTemplate("{% if messages[0].content == 'im_end' %}the same{% endif %}")
    assert encode_chat(template, tokenizer, [{"role": "user", "content": "im_end"}])[0] == "the same"


def test_ordinary_text_is_tokenized_in_one_piece(tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    for content in (
        "> a quote",
        "a < b | c > d",
        "<b>bold</b>",
        "x",
        "",
        "  ",
        "if (a <= b) { return [1]; }",
    ):
        text, ids = encode_chat(template, tokenizer, [{"role": "user", "content": content}])
        assert (text, ids) == (content, tokenizer.encode(content, add_special_tokens=False))
