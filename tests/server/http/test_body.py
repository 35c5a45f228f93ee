"""Bodies so complex, or with so many errors, that parsing them would delay other requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.server.http import bodies as module
from inflight.server.http.bodies import MAX_MISTAKES, MAX_PARTS, MAX_VALUES
from tests.server.live import Live

TEXTS = st.text(st.sampled_from('\\":{}[], \n€a'), max_size=12)
VALUES = st.recursive(
    TEXTS | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
)


def parts(value: Any) -> int:
    """Keys, objects and lists."""
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(parts, value.values()))
    return 1 + sum(map(parts, value)) if isinstance(value, list) else 0


def commas(value: Any) -> int:
    """Between values."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return max(len(inner) - 1, 0) + sum(map(commas, inner))


@given(VALUES.filter(parts), st.booleans(), st.sampled_from([(",", ":"), (" ,\n", "\t : ")]))
def test_keys_and_brackets_inside_strings_do_not_count(
    value: Any, ascii_only: bool, separators: tuple[str, str]
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, separators=separators).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_PARTS", parts(value))
        assert not module._has_too_many_parts(text)
        patch.setattr(module, "MAX_PARTS", parts(value) - 1)
        assert module._has_too_many_parts(text)


@given(VALUES, st.booleans())
def test_commas_inside_strings_do_not_count(value: Any, ascii_only: bool) -> None:
    text = json.dumps([value, "a, b"], ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_VALUES", commas([value, ""]) + 1)
        assert not module._has_too_many_values(text)
        patch.setattr(module, "MAX_VALUES", commas([value, ""]))
        assert module._has_too_many_values(text)


def refusals() -> Iterator[tuple[str, str, str, str]]:
    """Path, content, code, part of the message."""
    many = json.dumps({f"k{number}": 1 for number in range(MAX_PARTS)})
    completions, chat, limit = "/v1/completions", "/v1/chat/completions", f"more than {MAX_PARTS} keys"
    complex_ = "body_too_complex"
    yield completions, f'{{"prompt": "x", {many[1:]}', complex_, limit
    yield completions, f'{{"prompt": "x", "logit_bias": {many}}}', complex_, limit
    yield completions, f'{{"prompt": [{",".join(["{}"] * MAX_PARTS)}]}}', complex_, limit
    yield completions, "[" * (MAX_PARTS + 1), complex_, limit
    yield chat, f'{{"messages": [{{"role": "user", "content": "x", {many[1:]}]}}', complex_, limit
    some = json.dumps({f"k{number}": 1 for number in range(MAX_MISTAKES + 1)})
    wrong = f"the body has {MAX_MISTAKES + 1} unknown parameters"
    yield completions, f'{{"prompt": "x", {some[1:]}', "invalid_value", wrong
    yield completions, json.dumps({"prompt": "x"} | {f"k{i}": 1 for i in range(9)}), "unknown_parameter", "k0"
    text = json.dumps({"prompt": '{"a": ["b"]}\n' * MAX_PARTS})  # is only text
    yield completions, text, "context_length_exceeded", ""
    ids = json.dumps({"prompt": [1] * MAX_VALUES})
    yield completions, ids, "context_length_exceeded", ""
    yield completions, ids[:-2] + ", 1, 1]}", complex_, f"more than {MAX_VALUES} values"
    yield completions, json.dumps({"prompt": "," * MAX_VALUES}), "context_length_exceeded", ""
    tool = {"name": "t", "input_schema": {}, "type": "custom"}
    for name in ("input_examples", "allowed_callers"):  # the first mistake is enough
        asked = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        given = json.dumps({**asked, "tools": [{**tool, name: [1] * (MAX_MISTAKES + 1)}]})
        yield "/v1/messages", given, "invalid_request_error", f"tools[0].{name}[0] is 1"
    given = json.dumps(
        {"input": "x", "tools": [{"type": "function", "name": "t", "allowed_callers": [1] * 1001}]}
    )
    yield "/v1/responses", given, "invalid_value", "tools[0].allowed_callers[0] is 1"
    given = json.dumps({**asked, "chat_template_kwargs": {f"k{i}": [1] for i in range(MAX_MISTAKES)}})
    yield chat, given, "invalid_value", "it has 1000 arguments"
    yield completions, '{"prompt": }', "invalid_json", "not valid JSON: expected value at line 1 column 12"


@pytest.mark.parametrize(("path", "content", "code", "message"), list(refusals()), ids=range(16))
def test_complex_or_invalid_bodies_are_refused(
    path: str, content: str, code: str, message: str, live: Live
) -> None:
    response = live.http.post(path, content=content, headers={"content-type": "application/json"})
    error = response.json()["error"]
    assert (response.status_code, error.get("code", error["type"])) == (400, code)
    assert message in error["message"]


def test_longest_conversation_is_not_too_complex() -> None:
    part = {"type": "text", "text": "x"}
    body = {"messages": [{"role": "user", "content": [part]}] * 8192}
    assert not module._has_too_many_parts(json.dumps(body).encode())
