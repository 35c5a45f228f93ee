"""/v1/messages over HTTP, by the anthropic package."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.server.calling import CALLS, CallingBackend
from tests.server.live import Backend, Live, live_server

if TYPE_CHECKING:  # it takes seconds to import
    import anthropic
    from anthropic.types import Message

TOOL: Any = {
    "name": "add",
    "description": "Adds numbers.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}
MODEL = "inflight-builtin"
QUESTION: Any = {"role": "user", "content": "1 + 2, 3 + 4?"}
REQUEST: Any = {"model": "m", "max_tokens": 256, "messages": [QUESTION], "tools": [TOOL]}


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CallingBackend]:
    backend = CallingBackend(tmp_path_factory.mktemp("tokenizer"))
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def server(scripted: CallingBackend) -> Iterator[Live]:
    with live_server(scripted, served_model_name=("m",), api_key=("secret",)) as live:
        yield live
        live.wait_until_idle()


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0) as client:
        yield client


def validated(message: Any) -> Message:
    """Return the message, validated by the package's own types, which its client does not do."""
    from anthropic.types import Message

    return Message.model_validate(message.model_dump())


def test_plain_answer_is_a_text_block(client: anthropic.Anthropic, scripted: CallingBackend) -> None:
    scripted.say("Because of clouds.")
    question: Any = {"model": "m", "max_tokens": 64, "messages": [{"role": "user", "content": "Why?"}]}
    message = validated(client.messages.create(**question, system="Be short."))
    assert [block.to_dict() for block in message.content] == [
        {"type": "text", "text": "Because of clouds.", "citations": None}
    ]
    assert (message.stop_reason, message.stop_sequence, message.role) == ("end_turn", None, "assistant")
    num_tokens = client.messages.count_tokens(
        model="m", messages=question["messages"], system="Be short."
    ).input_tokens
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == num_tokens


def test_stop_reason_names_the_limit_or_the_stop_sequence(
    client: anthropic.Anthropic, scripted: CallingBackend
) -> None:
    scripted.say("Once upon a time there was a fox.")
    short = validated(client.messages.create(**{**REQUEST, "max_tokens": 3}))
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 3)
    stopped = validated(client.messages.create(**REQUEST, stop_sequences=["time"]))
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "time")
    assert stopped.content[0].text == "Once upon a "


def test_stop_sequence_inside_a_call_is_reported(
    client: anthropic.Anthropic, scripted: CallingBackend
) -> None:
    scripted.say(CALLS)
    expected = "stop_sequence", '"b": 4'
    whole = validated(client.messages.create(**REQUEST, stop_sequences=['"b": 4']))
    assert (whole.stop_reason, whole.stop_sequence) == expected
    with client.messages.stream(**REQUEST, stop_sequences=['"b": 4']) as events:
        last = [event for event in events if event.type == "message_delta"][-1]
    assert (last.delta.stop_reason, last.delta.stop_sequence) == expected


def test_thinking_and_calls_round_trip(client: anthropic.Anthropic, scripted: CallingBackend) -> None:
    scripted.say(CALLS)
    message = validated(client.messages.create(**REQUEST))
    assert message.stop_reason == "tool_use"
    thought, text, *calls = [block.to_dict() for block in message.content]
    assert thought["thinking"] == "I should add."
    assert text["text"] == "Let me add."
    assert [call["input"] for call in calls] == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
    scripted.say("3 and 7.")
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "3"} for call in calls]
    turns: Any = [QUESTION, message.to_param(), {"role": "user", "content": results}]
    client.messages.create(**{**REQUEST, "messages": turns})
    assert CALLS in scripted.prompt


def test_final_assistant_message_is_continued(client: anthropic.Anthropic, scripted: CallingBackend) -> None:
    scripted.say(" of clouds.")
    turns: Any = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because"}]
    message = client.messages.create(model="m", max_tokens=64, messages=turns)
    assert message.content[0].text == " of clouds."
    assert scripted.prompt.endswith("<|im_start|>assistant\nBecause")


def test_stream_adds_up_to_the_whole_message(client: anthropic.Anthropic, scripted: CallingBackend) -> None:
    scripted.say(CALLS)
    whole = validated(client.messages.create(**REQUEST))
    with client.messages.stream(**REQUEST) as stream:
        kinds = [event.type for event in stream]
        streamed = validated(stream.get_final_message())
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4

    def without_ids(message: Message) -> Any:
        return message.model_dump(exclude={"id", "usage"}) | {
            "content": [block.model_dump(exclude={"id"}) for block in message.content]
        }

    assert without_ids(streamed) == without_ids(whole)
    assert streamed.usage.output_tokens == whole.usage.output_tokens


def test_omitted_thinking_is_counted_but_not_sent(
    client: anthropic.Anthropic, scripted: CallingBackend
) -> None:
    scripted.say("<think>\nHm.\n</think>\n\nYes.")
    message = client.messages.create(**REQUEST, thinking={"type": "adaptive", "display": "omitted"})
    thought, text = [block.to_dict() for block in message.content]
    assert (thought["thinking"], text["text"]) == ("", "Yes.")
    details = validated(message).usage.output_tokens_details
    assert details is not None
    assert details.thinking_tokens > 0


def test_error_event_ends_a_stream(
    client: anthropic.Anthropic, scripted: CallingBackend, server: Live
) -> None:
    import anthropic

    scripted.say("Once upon a time there was a fox.")
    scripted.client.error = "broken", "told to fail"
    try:
        with (
            pytest.raises(anthropic.APIStatusError, match="the engine failed") as broken,
            client.messages.stream(**REQUEST) as stream,
        ):
            list(stream)
    finally:
        scripted.client.error = None
    assert broken.value.type == "api_error"
    server.wait_until_idle()


def test_errors_are_those_of_the_anthropic_package(client: anthropic.Anthropic, server: Live) -> None:
    import anthropic
    from anthropic.types.shared import ErrorResponse

    with pytest.raises(anthropic.AuthenticationError, match="not valid for this server"):
        client.with_options(api_key="wrong").messages.create(**REQUEST)
    with pytest.raises(anthropic.NotFoundError, match="is not served here"):
        client.messages.create(**{**REQUEST, "model": "claude"})
    image: Any = {"type": "image", "source": {"type": "url", "url": "http://x"}}
    with pytest.raises(anthropic.BadRequestError, match="--replace-images") as refused:
        client.messages.create(**{**REQUEST, "messages": [{"role": "user", "content": [image]}]})
    assert refused.value.type == "invalid_request_error"
    for path, body in (("/v1/messages", {"max_tokens": 1}), ("/v1/messages/nothing", {})):
        response = server.post(path, body, headers={"x-api-key": "secret"})
        error = ErrorResponse.model_validate_json(response.content)
        assert error.request_id == response.headers["x-request-id"] == response.headers["request-id"]


def test_models_have_anthropic_fields(client: anthropic.Anthropic, server: Live) -> None:
    import anthropic
    from anthropic.types import ModelInfo

    page = client.models.list(limit=5)
    (model,) = list(page)
    assert (page.has_more, page.first_id, page.last_id) == (False, "m", "m")
    assert client.models.retrieve("m") == model
    ModelInfo.model_validate(model.model_dump())
    assert (model.id, model.type, model.display_name, model.lifecycle) == ("m", "model", "m", "active")
    assert model.max_input_tokens == server.state.model.frontend.max_model_len
    with pytest.raises(anthropic.NotFoundError, match="is not served here") as missing:
        client.models.retrieve("claude")
    assert missing.value.type == "not_found_error"
    listed = server.http.get("/v1/models", headers={"authorization": "Bearer secret"}).json()
    assert (listed["object"], listed["data"][0]["object"]) == ("list", "model")


def test_count_tokens_is_bounded(scripted: CallingBackend) -> None:
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
def test_api_key_is_accepted_in_either_header(headers: dict[str, str], status: int, server: Live) -> None:
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
        with anthropic.Anthropic(base_url=live.url, api_key="any", max_retries=0) as client:
            yield client
        live.wait_until_idle()


def test_output_format_constrains_the_text(builtin: anthropic.Anthropic) -> None:
    properties = {"age": {"enum": [3]}}
    schema = {"type": "object", "properties": properties, "required": ["age"], "additionalProperties": False}
    output_config: Any = {"format": {"type": "json_schema", "schema": schema}}
    message = builtin.messages.create(
        model=MODEL, max_tokens=64, messages=[QUESTION], output_config=output_config
    )
    assert json.loads(message.content[0].text) == {"age": 3}


def test_billing_line_does_not_defeat_the_prefix_cache(builtin: anthropic.Anthropic) -> None:
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
