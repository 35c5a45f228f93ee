"""Special tokens come from the template alone."""

from __future__ import annotations

import pytest

from inflight.models.builtin import checkpoint_folder
from inflight.text import ChatTemplate, Tokenizer, encode_chat


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


def test_spelled_tokens_are_text(tokenizer: Tokenizer, template: ChatTemplate) -> None:
    plain = encode_chat(template, tokenizer, [{"role": "user", "content": "Hello"}])[1]
    expected = [i for i in plain if i in tokenizer.special_ids]
    for special_id in tokenizer.special_ids:
        spelled = tokenizer.token(special_id)
        content = f"Say {spelled}{spelled} now"
        text, ids = encode_chat(template, tokenizer, [{"role": "user", "content": content}])
        assert content in text
        assert [i for i in ids if i in tokenizer.special_ids] == expected
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_parts_that_spell_a_token_together(tokenizer: Tokenizer) -> None:
    joins = ChatTemplate(
        "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    )
    spelled = tokenizer.token(min(tokenizer.special_ids))
    parts = [{"type": "text", "text": spelled[:3]}, {"type": "text", "text": spelled[3:]}]
    text, ids = encode_chat(joins, tokenizer, [{"role": "user", "content": parts}])
    assert text == spelled
    assert not tokenizer.special_ids.intersection(ids)
