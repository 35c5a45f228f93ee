"""/v1/responses over HTTP, by the openai package."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from inflight.server.access.keys import Caller
from inflight.server.openai.responses.store import ResponseStore, StoredResponse
from tests.server.calling import CALLS, CallingBackend, call
from tests.server.live import Backend, Live, live_server

MODEL = "inflight-builtin"
KEYS = "keys:\n  - {name: alice, key: alice-secret}\n  - {name: bob, key: bob-secret}\n"
TOOL: Any = {
    "type": "function",
    "name": "add",
    "description": "Adds numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    "strict": False,
}


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CallingBackend]:
    backend = CallingBackend(tmp_path_factory.mktemp("tokenizer"))
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def server(scripted: CallingBackend, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys.write_text(KEYS)
    options: Any = {"keys": str(keys), "served_model_name": ("m",), "max_stored_responses": 8}
    with live_server(scripted, **options) as live:
        yield live
        live.wait_until_idle()


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="alice-secret", max_retries=0) as client:
        yield client


def validated(response: Any) -> Response:
    """Validate an answer with the package's own types, which its client does not check."""
    return Response.model_validate(response.model_dump(by_alias=True))


def test_text_answer_has_usage_and_request_parameters(
    client: openai.OpenAI, scripted: CallingBackend
) -> None:
    scripted.say("Because of clouds.")
    response = validated(
        client.responses.create(model="m", input="Why?", instructions="Be short.", metadata={"a": "b"})
    )
    assert response.output_text == "Because of clouds."
    assert [item.type for item in response.output] == ["message"]
    assert (response.status, response.instructions, response.metadata) == (
        "completed",
        "Be short.",
        {"a": "b"},
    )
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.usage.output_tokens_details.reasoning_tokens == 0
    assert "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nWhy?" in scripted.prompt


def test_reasoning_and_calls_are_items_that_can_be_sent_back(
    client: openai.OpenAI, scripted: CallingBackend
) -> None:
    scripted.say(CALLS)
    response = validated(client.responses.create(model="m", input="1 + 2, 3 + 4?", tools=[TOOL]))
    thought, message, *calls = [item.to_dict() for item in response.output]
    assert thought["content"] == [{"type": "reasoning_text", "text": "I should add."}]
    assert message["content"][0]["text"] == "Let me add."
    assert [json.loads(str(one["arguments"])) for one in calls] == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
    assert response.usage is not None
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    assert response.tools[0].to_dict().items() >= TOOL.items()
    scripted.say("3 and 7.")
    outputs: Any = [
        {"type": "function_call_output", "call_id": one["call_id"], "output": str(index)}
        for index, one in enumerate(calls)
    ]
    sent: Any = [{"role": "user", "content": "1 + 2, 3 + 4?"}, *response.output, *outputs]
    by_items = validated(client.responses.create(model="m", input=sent, tools=[TOOL]))
    prompt = scripted.prompt
    assert CALLS in prompt
    by_id = validated(
        client.responses.create(model="m", input=outputs, tools=[TOOL], previous_response_id=response.id)
    )
    assert scripted.prompt == prompt
    assert by_items.output_text == by_id.output_text == "3 and 7."


def test_response_echoes_tools_and_penalties_as_openai_does(
    client: openai.OpenAI, scripted: CallingBackend
) -> None:
    scripted.say("Well.")
    schema: Any = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    tool: Any = {"type": "function", "name": "add"}
    body: Any = {"tools": [tool], "text": {"format": schema}}
    response = client.responses.create(model="m", input="x", **body, extra_body={"presence_penalty": 0.5})
    fields = response.to_dict()
    assert (fields["presence_penalty"], fields["frequency_penalty"]) == (0.5, 0.0)
    nulls = {"description": None, "parameters": None, "strict": None}
    assert response.tools[0].model_dump().items() >= nulls.items()
    text: Any = fields["text"]
    assert text["format"] == {**schema, "description": None, "strict": None}


def test_custom_tool_is_called_with_text_and_answered(
    client: openai.OpenAI, scripted: CallingBackend
) -> None:
    patch: Any = {"type": "custom", "name": "apply_patch", "description": "Edits."}
    scripted.say("Let me edit." + call("apply_patch", input="*** Begin\n+a\n"))
    with client.responses.stream(model="m", input="Edit.", tools=[patch]) as stream:
        kinds = {event.type for event in stream}
        response = validated(stream.get_final_response())
    assert {"response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"} <= kinds
    called = response.output[1]
    assert called.type == "custom_tool_call"
    assert (called.name, called.input) == ("apply_patch", "*** Begin\n+a\n")
    result: Any = {"type": "custom_tool_call_output", "call_id": called.call_id, "output": "Done"}
    sent: Any = [{"role": "user", "content": "Edit."}, *response.output, result]
    scripted.say("Edited.")
    client.responses.create(model="m", input=sent, tools=[patch])
    prompt = scripted.prompt
    assert '"arguments": {"input": "*** Begin\\n+a\\n"}' in prompt
    client.responses.create(model="m", input=[result], tools=[patch], previous_response_id=response.id)
    assert scripted.prompt == prompt


def test_logprobs_are_those_of_the_text(client: openai.OpenAI, scripted: CallingBackend) -> None:
    scripted.say(CALLS)
    body: Any = {"model": "m", "input": "1 + 2?", "tools": [TOOL], "top_logprobs": 1}
    body["include"] = ["message.output_text.logprobs"]
    whole = validated(client.responses.create(**body))
    with client.responses.stream(**body) as stream:
        events = list(stream)
        streamed = validated(stream.get_final_response())
    deltas: Any = [event for event in events if event.type == "response.output_text.delta"]
    tokens = [item.token for event in deltas for item in event.logprobs]
    assert "".join(tokens) == "Let me add."
    for response in (whole, streamed):
        message: Any = response.output[1]
        assert [item.token for item in message.content[0].logprobs] == tokens
        assert all(len(item.top_logprobs) == 1 for item in message.content[0].logprobs)
    with pytest.raises(openai.BadRequestError, match="needs include to have message"):
        client.responses.create(model="m", input="x", top_logprobs=2)


def test_input_tokens_are_those_of_the_response(client: openai.OpenAI, scripted: CallingBackend) -> None:
    scripted.say("Well.")
    first = client.responses.create(model="m", input="Hello", instructions="Be short.", tools=[TOOL])
    assert first.usage is not None
    count = client.responses.input_tokens.count(
        model="m", input="Hello", instructions="Be short.", tools=[TOOL]
    )
    assert (count.object, count.input_tokens) == ("response.input_tokens", first.usage.input_tokens)
    second = client.responses.create(model="m", input="And?", previous_response_id=first.id)
    assert second.usage is not None
    again = client.responses.input_tokens.count(model="m", input="And?", previous_response_id=first.id)
    assert again.input_tokens == second.usage.input_tokens


def test_completed_response_cannot_be_cancelled(client: openai.OpenAI, scripted: CallingBackend) -> None:
    scripted.say("Well.")
    response = client.responses.create(model="m", input="Hello")
    with pytest.raises(openai.BadRequestError, match="the response is completed") as refused:
        client.responses.cancel(response.id)
    assert refused.value.code == "response_ended"


def test_stream_adds_up_to_the_response(client: openai.OpenAI, scripted: CallingBackend) -> None:
    scripted.say(CALLS)
    with client.responses.stream(model="m", input="1 + 2?", tools=[TOOL]) as stream:
        events = list(stream)
        final = validated(stream.get_final_response())
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    done: list[Any] = [event for event in events if event.type == "response.output_item.done"]
    assert [event.item.id for event in done] == [item.id for item in final.output]
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    arguments = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(arguments) == "".join(getattr(item, "arguments", "") for item in final.output)
    assert final.output_text == "Let me add."
    stored = validated(client.responses.retrieve(final.id))
    assert stored.usage == final.usage
    assert [item.id for item in stored.output] == [item.id for item in final.output]


def test_truncated_answer_is_incomplete(client: openai.OpenAI, scripted: CallingBackend) -> None:
    scripted.say("Once upon a time there was a fox.")
    body: Any = {"model": "m", "input": "Tell.", "max_output_tokens": 4}
    response = validated(client.responses.create(**body))
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"
    *_, last = client.responses.create(**body, stream=True)
    assert last.type == "response.incomplete"


def test_broken_call_is_never_a_completed_item(client: openai.OpenAI, scripted: CallingBackend) -> None:
    scripted.say(CALLS.removesuffix("4}}\n</tool_call>"))
    body: Any = {"model": "m", "input": "1 + 2?", "tools": [TOOL]}
    whole = validated(client.responses.create(**body))
    with client.responses.stream(**body) as events:
        streamed = validated(events.get_final_response())
    for response in (whole, streamed):
        assert [item.status for item in response.output if item.type == "function_call"] == [
            "completed",
            "incomplete",
        ]


def test_error_ends_the_stream(client: openai.OpenAI, scripted: CallingBackend) -> None:
    scripted.say("Once upon a time there was a fox.")
    scripted.client.error = "broken", "asked to fail"
    try:
        *_, error, failed = client.responses.create(model="m", input="Tell.", stream=True)
    finally:
        scripted.client.error = None
    assert error.type == "error"
    assert error.code == "engine_error"
    assert failed.type == "response.failed"
    assert validated(failed.response).error is not None
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(failed.response.id)


def test_stored_response_is_visible_only_to_its_caller(
    client: openai.OpenAI, scripted: CallingBackend
) -> None:
    scripted.say("Yes.")
    response = client.responses.create(model="m", input="Well?")
    bob = client.with_options(api_key="bob-secret")
    for response_id, who in ((response.id, bob), ("resp_unknown", client)):
        with pytest.raises(openai.NotFoundError) as unknown:
            who.responses.retrieve(response_id)
        assert unknown.value.code == "response_not_found"
        with pytest.raises(openai.BadRequestError, match="previous_response_id is") as refused:
            who.responses.create(model="m", input="And?", previous_response_id=response_id)
        assert refused.value.code == "previous_response_not_found"
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    kept = client.responses.create(model="m", input="Well?", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(kept.id)


def test_input_items_are_listed_in_pages(client: openai.OpenAI, scripted: CallingBackend) -> None:
    scripted.say("One.")
    first = client.responses.create(model="m", input="first question")
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "3"}
    more: Any = [{"role": "user", "content": [{"type": "input_text", "text": "second"}]}, call, result]
    scripted.say("Two.")
    second = client.responses.create(model="m", input=more, previous_response_id=first.id)

    (only,) = client.responses.input_items.list(first.id).data
    assert only.model_dump(exclude_none=True)["content"] == [{"type": "input_text", "text": "first question"}]
    page = client.responses.input_items.list(second.id, order="asc", limit=2)
    assert page.has_more
    items = list(page)  # the package asks for the pages that follow
    assert [item.type for item in items] == [*3 * ["message"], "function_call", "function_call_output"]
    assert [item.id for item in items[:2]] == [only.id, first.output[0].id]
    assert len({item.id for item in items}) == 5
    latest = list(client.responses.input_items.list(second.id))
    assert [item.id for item in latest] == [item.id for item in reversed(items)]
    for item in items:
        type(item).model_validate(item.model_dump(by_alias=True))
    for query, param in (({"limit": 0}, "limit"), ({"order": "up"}, "order"), ({"after": "none"}, "after")):
        with pytest.raises(openai.BadRequestError) as wrong:
            client.responses.input_items.list(second.id, extra_query=query)
        assert wrong.value.param == param
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list("resp_unknown")


def test_item_references_are_resolved(client: openai.OpenAI, scripted: CallingBackend) -> None:
    scripted.say("A fox.")
    response = client.responses.create(model="m", input="Who?")
    reference: Any = {"type": "item_reference", "id": response.output[0].id}
    client.responses.create(model="m", input=[reference, {"role": "user", "content": "Why?"}])
    assert "<|im_start|>assistant\nA fox.<|im_end|>\n<|im_start|>user\nWhy?" in scripted.prompt
    with pytest.raises(openai.BadRequestError, match="there is no item 'msg_1'"):
        client.responses.create(model="m", input=[{"type": "item_reference", "id": "msg_1"}])


def store_of(server: Live) -> ResponseStore:
    assert isinstance(server.state.responses, ResponseStore)
    return server.state.responses


def find(server: Live, response_id: str) -> StoredResponse:
    stored = store_of(server).find(Caller("alice"), response_id)
    assert stored is not None
    return stored


def test_fields_that_are_never_rendered_are_not_stored(
    server: Live, client: openai.OpenAI, scripted: CallingBackend
) -> None:
    unseen = "not rendered " * 100_000
    said = {"type": "output_text", "text": "A fox.", "annotations": [{"type": unseen}], "logprobs": [unseen]}
    thought = {"type": "reasoning", "summary": [], "encrypted_content": unseen}
    sent: Any = [{"role": "assistant", "content": [said]}, thought, {"role": "user", "content": "Why?"}]
    scripted.say("Because.")
    first = client.responses.create(model="m", input=sent)
    assert find(server, first.id).size < 10_000
    second = client.responses.create(model="m", input="And?", previous_response_id=first.id)
    assert "<|im_start|>assistant\nA fox.<|im_end|>\n<|im_start|>user\nWhy?" in scripted.prompt
    assert find(server, second.id).size < 20_000
    # The stored response itself is unchanged.
    assert client.responses.retrieve(first.id).model_dump() == first.model_dump()
    listed = list(client.responses.input_items.list(first.id, order="asc"))
    assert [item.type for item in listed] == ["message", "reasoning", "message"]
    assert listed[0].model_dump()["content"][0].items() >= {"text": "A fox.", "annotations": []}.items()


def test_conversations_share_the_items_of_earlier_turns(
    server: Live, client: openai.OpenAI, scripted: CallingBackend
) -> None:
    scripted.say("One.")
    first = client.responses.create(model="m", input="first")
    second = client.responses.create(model="m", input="second", previous_response_id=first.id)
    earlier, later = find(server, first.id).items, find(server, second.id).items
    assert (len(earlier), len(later)) == (2, 4)
    for mine, theirs in zip(earlier, later, strict=False):
        assert mine is theirs


def test_stored_and_new_items_share_one_size_limit(scripted: CallingBackend) -> None:
    with live_server(scripted, max_body_size=3072) as live:
        text = {"input": [{"role": "user", "content": "x" * 1000}]}

        def answer(**body: Any) -> Any:
            return live.post("/v1/responses", {**text, **body}).json()

        first = answer()
        second = answer(previous_response_id=first["id"])
        refused = answer(previous_response_id=second["id"])["error"]
        assert (refused["code"], refused["param"]) == ("conversation_too_large", "previous_response_id")
        assert "at most 3072 (--max-body-size) are allowed" in refused["message"]
        scripted.say("y" * 500)
        item = {"type": "item_reference", "id": answer()["output"][0]["id"]}
        answer(input=[item, item])
        refused = answer(input=[item] * 9)["error"]
        assert (refused["code"], refused["param"]) == ("conversation_too_large", "input")
        live.wait_until_idle()


class WatchedResponses(ResponseStore):
    """Records each look-up, and how many requests the caller has running at that time."""

    def __init__(self, caller: Caller) -> None:
        super().__init__(10, 1 << 20)
        self.lookups: list[Any] = []
        self.num_running: list[int] = []
        self.held: asyncio.Event | None = None  # what look-ups wait for
        self._owner = caller

    async def _note(self, what: Any) -> None:
        self.lookups.append(what)
        self.num_running.append(self._owner.num_running)
        if self.held is not None:
            await self.held.wait()

    async def conversation(self, caller: Caller, response_id: str) -> Any:
        await self._note(response_id)
        return await super().conversation(caller, response_id)

    async def find_items(self, caller: Caller, item_ids: Any, max_bytes: int) -> Any:
        await self._note(list(item_ids))
        return await super().find_items(caller, item_ids, max_bytes)


@pytest.fixture
def watched(server: Live, monkeypatch: pytest.MonkeyPatch) -> WatchedResponses:
    responses = WatchedResponses(server.state.keys.named("alice"))
    monkeypatch.setattr(server.state, "responses", responses)
    return responses


def test_each_referenced_item_is_fetched_once_and_after_admission(
    server: Live,
    client: openai.OpenAI,
    scripted: CallingBackend,
    watched: WatchedResponses,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scripted.say("A fox.")
    first, second = (client.responses.create(model="m", input="Who?") for _ in range(2))
    ids = [first.output[0].id, second.output[0].id]
    references: Any = [{"type": "item_reference", "id": item_id} for item_id in ids] * 3
    body: Any = {"model": "m", "input": references, "previous_response_id": first.id}
    client.responses.create(**body)
    assert scripted.prompt.count("A fox.") == 7
    assert watched.lookups == [first.id, ids]
    assert watched.num_running == [1, 1]
    alice = server.state.keys.named("alice")
    monkeypatch.setattr(alice, "max_concurrent", 0)
    with pytest.raises(openai.RateLimitError):
        client.responses.create(**body)
    assert len(watched.lookups) == 2


def test_request_can_be_cancelled_while_it_looks_up_items(
    server: Live, client: openai.OpenAI, watched: WatchedResponses
) -> None:
    first = client.responses.create(model="m", input="Who?")
    watched.held = asyncio.Event()
    body = {"input": "And?", "previous_response_id": first.id, "request_id": "held"}
    headers = {"authorization": "Bearer alice-secret"}
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(server.post, "/v1/responses", body, headers=headers)
        server.wait_until("a look-up", lambda: watched.lookups)
        assert server.http.delete("/v1/requests/held", headers=headers).json()["cancelled"]
        assert answer.result().status_code == 409
    assert server.state.keys.named("alice").num_running == 0


def test_errors_name_model_and_key(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        client.responses.create(model="gpt", input="x")
    search: Any = {"tools": [{"type": "web_search"}], "tool_choice": "required"}
    with pytest.raises(openai.BadRequestError, match="requires web_search") as refused:
        client.responses.create(model="m", input="x", **search)
    assert refused.value.param == "tool_choice"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").responses.create(model="m", input="x")


class Fox(BaseModel):
    name: str
    age: int


# ---- with weights ----


@pytest.fixture(scope="module")
def builtin(backend: Backend) -> Iterator[openai.OpenAI]:
    with live_server(backend) as live:
        with openai.OpenAI(base_url=f"{live.url}/v1", api_key="any", max_retries=0) as client:
            yield client
        live.wait_until_idle()


def test_text_format_is_enforced(builtin: openai.OpenAI) -> None:
    body: Any = {"model": MODEL, "input": "A fox?", "text_format": Fox, "temperature": 0}
    response = builtin.responses.parse(**body)
    assert isinstance(response.output_parsed, Fox)
    with builtin.responses.stream(**body) as stream:
        streamed = stream.get_final_response() if list(stream) else None
    assert streamed is not None
    assert streamed.output_parsed == response.output_parsed
    schema: Any = {"type": "json_schema", "name": "n", "schema": {"type": "array", "uniqueItems": True}}
    with pytest.raises(openai.BadRequestError, match=r"text\.format\.schema.*uniqueItems") as refused:
        builtin.responses.create(model=MODEL, input="x", text={"format": schema})
    assert refused.value.param == "text.format"


def test_continued_conversation_hits_the_prefix_cache(builtin: openai.OpenAI) -> None:
    first = builtin.responses.create(model=MODEL, input="Why does it rain? " * 8, max_output_tokens=20)
    second = builtin.responses.create(
        model=MODEL, input="Why?", previous_response_id=first.id, max_output_tokens=4
    )
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens > first.usage.input_tokens - 16


def test_cancel_ends_the_running_response(builtin: openai.OpenAI) -> None:
    # An id may be used again: the response that runs is meant, not the one that is stored.
    again: Any = {"request_id": "again", "ignore_eos": True}
    builtin.responses.create(model=MODEL, input="Go.", max_output_tokens=1, extra_body=again)
    endless: Any = {"model": MODEL, "input": "Go.", "extra_body": again}
    with builtin.responses.create(**endless, stream=True) as stream:
        events = iter(stream)
        first: Any = next(events)
        running = builtin.responses.retrieve(first.response.id)
        assert validated(running).status == "in_progress"
        assert validated(builtin.responses.cancel(first.response.id)).status == "cancelled"
        *_, last = events
    assert last.type == "response.incomplete"
    assert validated(last.response).status == "cancelled"
    assert builtin.responses.cancel(first.response.id).output == last.response.output
