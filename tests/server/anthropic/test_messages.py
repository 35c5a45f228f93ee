"""/v1/messages over HTTP, by the anthropic package."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.server.calling import CALLS, CallingBackend
from tests.server.live import Backend, Live, live_server

if TYPE_CHECKING:  # it takes seconds to import: only who runs these tests does
    import anthropic
    from anthropic.types import Message

TOOL: Any = {
    "name": "add",
    "description": "Adds numbers.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}
MODEL = "inflight-builtin"
QUESTION: Any = {"role": "user", "content": "1 + 2, 3 + 4?"}
ASKED: Any = {"model": "m", "max_tokens": 256, "messages": [QUESTION], "tools": [TOOL]}


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CallingBackend]:
    found = CallingBackend(tmp_path_factory.mktemp("tokenizer"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def server(scripted: CallingBackend) -> Iterator[Live]:
    with live_server(scripted, served_model_name=("m",), api_key=("secret",)) as live:
        yield live
        live.wait_until_idle()


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0) as found:
        yield found


def validated(found: Any) -> Message:
    """Against the package's own types, which its client does not check."""
    from anthropic.types import Message

    return Message.model_validate(found.model_dump())


def test_a_text(client: anthropic.Anthropic, scripted: CallingBackend) -> None:
    scripted.say("Because of clouds.")
    asked: Any = {"model": "m", "max_tokens": 64, "messages": [{"role": "user", "content": "Why?"}]}
    found = validated(client.messages.create(**asked, system="Be short."))
    assert [block.to_dict() for block in found.content] == [
        {"type": "text", "text": "Because of clouds.", "citations": None}
    ]
    assert (found.stop_reason, found.stop_sequence, found.role) == ("end_turn", None, "assistant")
    num_tokens = client.messages.count_tokens(
        model="m", messages=asked["messages"], system="Be short."
    ).input_tokens
    assert found.usage.input_tokens + (found.usage.cache_read_input_tokens or 0) == num_tokens


def test_ends(client: anthropic.Anthropic, scripted: CallingBackend) -> None:
    scripted.say("Once upon a time there was a fox.")
    short = validated(client.messages.create(**{**ASKED, "max_tokens": 3}))
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 3)
    stopped = validated(client.messages.create(**ASKED, stop_sequences=["time"]))
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "time")
    assert stopped.content[0].text == "Once upon a "


def test_stop_sequence_inside_a_call(client: anthropic.Anthropic, scripted: CallingBackend) -> None:
    scripted.say(CALLS)
    expected = "stop_sequence", '"b": 4'
    whole = validated(client.messages.create(**ASKED, stop_sequences=['"b": 4']))
    assert (whole.stop_reason, whole.stop_sequence) == expected
    with client.messages.stream(**ASKED, stop_sequences=['"b": 4']) as events:
        last = [event for event in events if event.type == "message_delta"][-1]
    assert (last.delta.stop_reason, last.delta.stop_sequence) == expected


def test_thoughts_and_calls(client: anthropic.Anthropic, scripted: CallingBackend) -> None:
    scripted.say(CALLS)
    found = validated(client.messages.create(**ASKED))
    assert found.stop_reason == "tool_use"
    thought, text, *calls = [block.to_dict() for block in found.content]
    assert thought["thinking"] == "I should add."
    assert text["text"] == "Let me add."
    assert [one["input"] for one in calls] == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
    scripted.say("3 and 7.")
    results = [{"type": "tool_result", "tool_use_id": one["id"], "content": "3"} for one in calls]
    turns: Any = [QUESTION, found.to_param(), {"role": "user", "content": results}]
    client.messages.create(**{**ASKED, "messages": turns})
    assert CALLS in scripted.prompt


def test_an_answer_that_has_been_begun(client: anthropic.Anthropic, scripted: CallingBackend) -> None:
    scripted.say(" of clouds.")
    begun: Any = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because"}]
    found = client.messages.create(model="m", max_tokens=64, messages=begun)
    assert found.content[0].text == " of clouds."
    assert scripted.prompt.endswith("<|im_start|>assistant\nBecause")


def test_a_stream_adds_up_to_the_message(client: anthropic.Anthropic, scripted: CallingBackend) -> None:
    scripted.say(CALLS)
    whole = validated(client.messages.create(**ASKED))
    with client.messages.stream(**ASKED) as stream:
        kinds = [event.type for event in stream]
        streamed = validated(stream.get_final_message())
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4

    def told(message: Message) -> Any:
        return message.model_dump(exclude={"id", "usage"}) | {
            "content": [block.model_dump(exclude={"id"}) for block in message.content]
        }

    assert told(streamed) == told(whole)
    assert streamed.usage.output_tokens == whole.usage.output_tokens


def test_thinking_that_is_not_shown(client: anthropic.Anthropic, scripted: CallingBackend) -> None:
    scripted.say("<think>\nHm.\n</think>\n\nYes.")
    found = client.messages.create(**ASKED, thinking={"type": "adaptive", "display": "omitted"})
    thought, text = [block.to_dict() for block in found.content]
    assert (thought["thinking"], text["text"]) == ("", "Yes.")
    details = validated(found).usage.output_tokens_details
    assert details is not None
    assert details.thinking_tokens > 0


def test_an_error_is_the_end_of_a_stream(
    client: anthropic.Anthropic, scripted: CallingBackend, server: Live
) -> None:
    import anthropic

    scripted.say("Once upon a time there was a fox.")
    scripted.client.error = "broken", "told to fail"
    try:
        with (
            pytest.raises(anthropic.APIStatusError, match="the engine failed") as broken,
            client.messages.stream(**ASKED) as stream,
        ):
            list(stream)
    finally:
        scripted.client.error = None
    assert broken.value.type == "api_error"
    server.wait_until_idle()


def test_errors(client: anthropic.Anthropic, server: Live) -> None:
    import anthropic
    from anthropic.types.shared import ErrorResponse

    with pytest.raises(anthropic.AuthenticationError, match="not valid for this server"):
        client.with_options(api_key="wrong").messages.create(**ASKED)
    with pytest.raises(anthropic.NotFoundError, match="is not served here"):
        client.messages.create(**{**ASKED, "model": "claude"})
    image: Any = {"type": "image", "source": {"type": "url", "url": "http://x"}}
    with pytest.raises(anthropic.BadRequestError, match="no images") as refused:
        client.messages.create(**{**ASKED, "messages": [{"role": "user", "content": [image]}]})
    assert refused.value.type == "invalid_request_error"
    for path, body in (("/v1/messages", {"max_tokens": 1}), ("/v1/messages/nothing", {})):
        response = server.post(path, body, headers={"x-api-key": "secret"})
        found = ErrorResponse.model_validate_json(response.content)
        assert found.request_id == response.headers["x-request-id"] == response.headers["request-id"]


def test_counting_is_bounded(scripted: CallingBackend) -> None:
    with live_server(scripted, max_tokenize_size=60) as live:
        for text, status in (("a" * 10, 200), ("a" * 61, 400)):
            body = {"messages": [{"role": "user", "content": text}]}
            assert live.post("/v1/messages/count_tokens", body).status_code == status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": "secret"}, 200),
        ({"authorization": "Bearer secret"}, 200),
        ({"x-api-key": "wrong"}, 401),
        ({"x-api-key": "secret", "authorization": "Bearer wrong"}, 401),
        ({}, 401),
    ],
)
def test_keys(headers: dict[str, str], status: int, server: Live) -> None:
    body = {"messages": [QUESTION]}
    response = server.post("/v1/messages/count_tokens", body, headers=headers)
    assert response.status_code == status
    if status == 401:
        from anthropic.types.shared import ErrorResponse

        assert ErrorResponse.model_validate_json(response.content).error.type == "authentication_error"


# ---- with weights ----


@pytest.fixture(scope="module")
def builtin(backend: Backend) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with live_server(backend) as live:
        with anthropic.Anthropic(base_url=live.url, api_key="any", max_retries=0) as found:
            yield found
        live.wait_until_idle()


def test_text_of_a_wanted_form(builtin: anthropic.Anthropic) -> None:
    properties = {"age": {"enum": [3]}}
    schema = {"type": "object", "properties": properties, "required": ["age"], "additionalProperties": False}
    wanted: Any = {"format": {"type": "json_schema", "schema": schema}}
    found = builtin.messages.create(model=MODEL, max_tokens=64, messages=[QUESTION], output_config=wanted)
    assert json.loads(found.content[0].text) == {"age": 3}


def test_a_line_for_billing_leaves_the_prefix_in_the_cache(builtin: anthropic.Anthropic) -> None:
    cached = []
    for number in range(2):
        line = f"x-anthropic-billing-header: cc_version=2.1.{number}; cch={number:05};"
        system: Any = [
            {"type": "text", "text": line},
            {"type": "text", "text": "Be short. " * 30, "cache_control": {"type": "ephemeral"}},
        ]
        headers = {"anthropic-beta": f"some-{number}", "x-anthropic-billing-header": line}
        with builtin.messages.stream(
            model=MODEL, max_tokens=2, messages=[QUESTION], system=system, extra_headers=headers
        ) as stream:
            usage = stream.get_final_message().usage
        cached.append(usage.cache_read_input_tokens or 0)
    assert cached[1] > cached[0]
    assert usage.input_tokens < 32  # of what is left, one block at most
