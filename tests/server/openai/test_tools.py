"""/v1/chat/completions: calls, thoughts and constraints, as clients send and see them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from inflight.server.openai.schemas import ChatChunk, ChatCompletion
from tests.frontend.agents.templates import MISTRAL
from tests.frontend.text.templates import CHATML
from tests.server.live import Live, stream
from tests.server.scripted import ScriptedClient, scripted_server, write_folder

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "What is 1 + 2?"}


def tool(name: str = "add", **function: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters, **function}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def call(name: str = "add", arguments: str = '{"a": 1, "b": 2}') -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


THOUGHTS = "<think>\nHm, an easy one.\n</think>\n\n"
OUTPUTS = {
    "content": "It is 3.",
    "thoughts and content": f"{THOUGHTS}It is 3.",
    "one call": call(),
    "content and two calls": f"{THOUGHTS}Let me see.\n{call()}\n{call('mul')}",
    "a call that breaks off": f'{THOUGHTS}<tool_call>\n{{"name": "add", "arguments": {{"a": ',
    "no call at all": "<tool_call>\nnothing",
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Live, ScriptedClient]]:
    with scripted_server(write_folder(tmp_path_factory.mktemp("qwen3"))) as served:
        yield served


@pytest.fixture
def live(served: tuple[Live, ScriptedClient]) -> Live:
    return served[0]


@pytest.fixture
def model(served: tuple[Live, ScriptedClient]) -> ScriptedClient:
    served[1].piece, served[1].error = 1, None
    return served[1]


def ask(live: Live, **body: Any) -> dict[str, Any]:
    response = live.post(PATH, {"messages": [USER], **body})
    assert response.status_code == 200, response.text
    ChatCompletion.model_validate(response.json(), strict=True)
    answer: dict[str, Any] = response.json()
    return answer


def added_up(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the deltas of a stream make, as OpenAI's clients add them up."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "reasoning_content": "", "tool_calls": []}
    for event in events:
        ChatChunk.model_validate(event, strict=True)
        for choice in event["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning", "reasoning_content"):
                message[name] += delta.get(name) or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert (call["index"], call["type"]) == (len(message["tool_calls"]), "function")
                    assert call["function"]["arguments"] == ""
                    message["tool_calls"].append({"id": call["id"], **call["function"]})
                else:
                    assert list(call) == ["index", "function"]
                    assert list(call["function"]) == ["arguments"]
                    message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return message


@pytest.mark.parametrize("name", OUTPUTS)
def test_stream_adds_up_to_the_whole_answer(live: Live, model: ScriptedClient, name: str) -> None:
    model.script = OUTPUTS[name]
    body = {"messages": [USER], "tools": [tool(), tool("mul")]}
    answer = ask(live, **body)
    (choice,) = answer["choices"]
    message = choice["message"]
    for model.piece in (1, 7, 1000):
        events = stream(live, PATH, {**body, "stream_options": {"include_usage": True}})
        streamed = added_up(events)
        assert streamed["content"] == (message["content"] or "")
        assert streamed["reasoning"] == streamed["reasoning_content"] == message.get("reasoning", "")
        calls = [
            {"name": c["function"]["name"], "arguments": c["function"]["arguments"]}
            for c in message.get("tool_calls", [])
        ]
        assert [{"name": c["name"], "arguments": c["arguments"]} for c in streamed["tool_calls"]] == calls
        assert events[-2]["choices"][0]["finish_reason"] == choice["finish_reason"]
        assert events[-1]["usage"] == answer["usage"]


def test_whole_answer_has_calls_and_reasoning(live: Live, model: ScriptedClient) -> None:
    model.script = OUTPUTS["content and two calls"]
    answer = ask(live, tools=[tool(), tool("mul")])
    message = answer["choices"][0]["message"]
    assert message["content"] == "Let me see."
    assert message["reasoning_content"] == message["reasoning"] == "Hm, an easy one."
    names = [call["function"]["name"] for call in message["tool_calls"]]
    assert names == ["add", "mul"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": 1, "b": 2}
    assert all(call["id"].startswith("call_") and len(call["id"]) == 29 for call in message["tool_calls"])
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert (
        0
        < answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
        < answer["usage"]["completion_tokens"]
    )


def test_answer_with_only_calls_has_null_content(live: Live, model: ScriptedClient) -> None:
    model.script = call()
    assert ask(live, tools=[tool()])["choices"][0]["message"]["content"] is None


def test_answer_cut_inside_a_call_finishes_with_length(live: Live, model: ScriptedClient) -> None:
    model.script = call()
    choice = ask(live, tools=[tool()], max_tokens=30)["choices"][0]
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("script", "stop", "expected"),
    [
        (call(), '"b"', "stop"),  # in the arguments
        (call(), '"arguments', "stop"),  # in the head of the call
        (
            f"{call()}\n{call('mul')}",
            '"mul"',
            "tool_calls",
        ),  # the first call is whole, and the second never began
        (f"{call()}\n{call('mul', '[7]')}", "7", "stop"),  # the first call is whole, the second is not
        (call(), "</tool_call>", "tool_calls"),  # the arguments are whole
        (f"{call()}\nDone.", "Done", "tool_calls"),
        (OUTPUTS["a call that breaks off"], "never", "stop"),  # the model itself ended it
    ],
)
def test_broken_call_does_not_finish_with_tool_calls(
    live: Live, model: ScriptedClient, script: str, stop: str, expected: str, streamed: bool
) -> None:
    model.script = script
    body = {"messages": [USER], "tools": [tool(), tool("mul")], "stop": [stop]}
    if streamed:
        events = stream(live, PATH, body)
        reason, calls = events[-1]["choices"][0]["finish_reason"], added_up(events)["tool_calls"]
        arguments = [text["arguments"] for text in calls]
    else:
        (choice,) = ask(live, **body)["choices"]
        reason = choice["finish_reason"]
        arguments = [text["function"]["arguments"] for text in choice["message"].get("tool_calls", ())]
    assert reason == expected
    if expected == "tool_calls":
        assert [json.loads(text) for text in arguments] == [{"a": 1, "b": 2}]


def test_call_markers_are_content_without_tools(live: Live, model: ScriptedClient) -> None:
    model.script = call()
    bodies: list[dict[str, Any]] = [
        {},
        {"tools": []},
        {"tools": None, "tool_choice": None},
        {"tools": [tool()], "tool_choice": "none"},
    ]
    for body in bodies:
        choice = ask(live, **body)["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (call(), "stop")


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_are_offered(live: Live, model: ScriptedClient, mode: str) -> None:
    model.script = call()
    prompt = prompt_of(live, model, tools=[tool(), tool("mul")], tool_choice=allowed(mode, "add"))
    assert '"name": "add"' in prompt
    assert '"name": "mul"' not in prompt
    assert (model.requests[-1].params.structured_outputs is not None) == (mode == "required")


def test_only_one_call_without_parallel_tool_calls(live: Live, model: ScriptedClient) -> None:
    model.script = f"{call()}\n{call()}"
    body: dict[str, Any] = {"tools": [tool()], "parallel_tool_calls": False}
    assert len(ask(live, **body)["choices"][0]["message"]["tool_calls"]) == 1
    assert len(added_up(stream(live, PATH, {"messages": [USER], **body}))["tool_calls"]) == 1


@pytest.mark.parametrize("streamed", [False, True])
def test_reasoning_is_omitted_without_include_reasoning(
    live: Live, model: ScriptedClient, streamed: bool
) -> None:
    model.script = OUTPUTS["thoughts and content"]
    body = {"messages": [USER], "include_reasoning": False}
    message = added_up(stream(live, PATH, body)) if streamed else ask(live, **body)["choices"][0]["message"]
    assert not message.get("reasoning")
    assert message["content"] == "It is 3."


def test_logprobs_and_ids_cover_all_tokens(live: Live, model: ScriptedClient) -> None:
    model.script = OUTPUTS["content and two calls"]
    body = {"tools": [tool(), tool("mul")], "logprobs": True, "return_token_ids": True}
    (choice,) = ask(live, **body)["choices"]
    assert choice["token_ids"] == [*model.encode(model.script), *model.facts.eos_token_ids]
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    choices = [event["choices"][0] for event in stream(live, PATH, {"messages": [USER], **body})]
    assert [i for item_choice in choices for i in item_choice.get("token_ids", ())] == choice["token_ids"]
    scored = [
        item
        for item_choice in choices
        if item_choice["logprobs"]
        for item in item_choice["logprobs"]["content"]
    ]
    assert scored == choice["logprobs"]["content"]


def prompt_of(live: Live, model: ScriptedClient, **body: Any) -> str:
    ask(live, **body)
    request = model.requests[-1]
    tokenizer = live.state.model.frontend.tokenizer
    assert tokenizer is not None
    return tokenizer.decode(request.token_ids, skip_special_tokens=False)


HISTORY = [
    USER,
    {
        "role": "assistant",
        "content": None,
        "reasoning": "Hm.",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a":1,"b":2}'}},
            {"id": "call_2", "type": "function", "function": {"name": "add", "arguments": "{broken"}},
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "3"}]},
    {"role": "tool", "tool_call_id": "call_2", "content": "no JSON"},
]


def test_calls_and_results_are_rendered_into_the_prompt(live: Live, model: ScriptedClient) -> None:
    prompt = prompt_of(live, model, messages=HISTORY, tools=[tool(strict=False)])
    assert call() in prompt
    assert '"arguments": {broken}' in prompt
    assert "<tool_response>\n3\n</tool_response>\n<tool_response>\nno JSON\n</tool_response>" in prompt
    assert '"name": "add"' in prompt
    assert "strict" not in prompt


def test_answer_can_be_sent_back_unchanged(live: Live, model: ScriptedClient) -> None:
    model.script = OUTPUTS["content and two calls"]
    tools = [tool(), tool("mul")]
    message = ask(live, tools=tools)["choices"][0]["message"]
    results = [{"role": "tool", "tool_call_id": c["id"], "content": "3"} for c in message["tool_calls"]]
    prompt = prompt_of(live, model, messages=[USER, message, *results], tools=tools)
    assert f"Let me see.\n{call()}\n{call('mul')}<|im_end|>" in prompt


def test_effort_reaches_the_template(live: Live, model: ScriptedClient) -> None:
    assert "<think>" not in prompt_of(live, model, reasoning_effort="high")
    assert prompt_of(live, model, reasoning_effort="none").endswith("<think>\n\n</think>\n\n")
    kwargs = {"enable_thinking": True}
    assert "<think>" not in prompt_of(live, model, reasoning_effort="none", chat_template_kwargs=kwargs)


def test_tokenize_counts_tools(live: Live, model: ScriptedClient) -> None:
    body = {"messages": [USER], "tools": [tool()]}
    ask(live, **body)
    assert live.post("/tokenize", body).json()["tokens"] == model.requests[-1].token_ids


CONSTRAINED: list[tuple[dict[str, Any], bool]] = [  # what is asked for, and whether it is a constraint
    ({"tools": [tool()]}, False),
    ({"tools": [tool()], "tool_choice": "auto"}, False),
    ({"tools": [tool()], "tool_choice": "required"}, True),
    ({"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "add"}}}, True),
    ({"tools": [tool(strict=True)]}, True),
    ({"tools": [tool(strict=True)], "tool_choice": "none"}, False),
    ({"response_format": {"type": "text"}}, False),
    ({"response_format": {"type": "json_object"}}, True),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {}, "strict": True},
            }
        },
        True,
    ),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": None}}}, True),
    ({"structured_outputs": {"regex": "[a-z]+", "json": None}}, True),
    ({"guided_choice": ["a", "b"], "guided_json": None, "structured_outputs": None}, True),
    ({"max_reasoning_tokens": 0}, True),
    ({"max_reasoning_tokens": 10**30}, False),  # more than there is room for
    ({"thinking_token_budget": 0}, True),
]


@pytest.mark.parametrize(("body", "constrained"), CONSTRAINED)
def test_required_calls_and_formats_are_constrained(
    live: Live, model: ScriptedClient, body: Any, constrained: bool
) -> None:
    ask(live, **body)
    assert (model.requests[-1].params.structured_outputs is not None) == constrained


SCHEMA = {"type": "object", "properties": {"a": {"uniqueItems": True}}}
ROWS: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": "add"}, "tools", "array"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]", "only tools of type function"),
    ({"tools": [{"type": "function"}]}, "tools[0]", "must be an object"),
    ({"tools": [tool("")]}, "tools[0]", "letters"),
    ({"tools": [tool("a b")]}, "tools[0]", "letters"),
    ({"tools": [tool(), tool()]}, "tools", "another tool already has this name"),
    ({"tools": [tool(parameters=[])]}, "tools[0]", "JSON schema"),
    ({"tools": [tool(strict=1)]}, "tools[0]", "true or false"),
    ({"tools": [tool()] * 600}, "tools", "512"),
    ({"tools": [tool(strict=True, parameters=SCHEMA)]}, "tools[0].function.parameters", "'uniqueItems'"),
    ({"tool_choice": "required"}, "tool_choice", "no tools are given"),
    ({"tools": [tool()], "tool_choice": "any"}, "tool_choice", "it must be none, auto, required"),
    (
        {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "mul"}}},
        "tool_choice",
        "no tool has this name",
    ),
    (
        {"tools": [tool()], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
        "tool_choice",
        "it must have a mode, which is auto or required, and tools",
    ),
    (
        {"tools": [tool()], "tool_choice": allowed("required", "mul")},
        "tool_choice",
        "allows mul: no tool has this",
    ),
    ({"functions": [{"name": "add"}]}, "functions", "send them as tools"),
    ({"function_call": {"name": "add"}}, "function_call", "use tool_choice"),
    ({"reasoning_effort": "huge"}, "reasoning_effort", "huge"),
    ({"max_reasoning_tokens": -1}, "max_reasoning_tokens", "0"),
    ({"thinking_token_budget": 1, "max_reasoning_tokens": 1}, "thinking_token_budget", "both"),
    ({"response_format": {"type": "yaml"}}, "response_format.type", "yaml"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        "response_format",
        "'uniqueItems'",
    ),
    ({"guided_json": SCHEMA}, "guided_json", "'uniqueItems'"),
    ({"guided_json": "{"}, "guided_json", "guided_json"),
    ({"guided_regex": "("}, "guided_regex", "guided_regex"),
    ({"guided_choice": []}, "guided_choice", "guided_choice has 0 texts"),
    ({"guided_grammar": ""}, "guided_grammar", "guided_grammar is ''"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "both given"),
    ({"structured_outputs": {}}, "structured_outputs", "nothing"),
    ({"structured_outputs": {"answer": "x"}}, "structured_outputs", "has answer"),
    ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs", "'uniqueItems'"),
    (
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"id": "x"}]}]},
        "messages",
        "a function with a name",
    ),
    ({"messages": [USER, {"role": "tool", "tool_call_id": "x"}]}, "messages", "content"),
]


@pytest.mark.parametrize(("body", "param", "message"), ROWS)
def test_invalid_tools_and_constraints_are_rejected(
    live: Live, body: dict[str, Any], param: str, message: str
) -> None:
    response = live.post(PATH, {"messages": [USER], **body})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param, error
    assert message in error["message"], error


@pytest.mark.parametrize("code", ["constraint_failed", "no_token_allowed"])
def test_failing_constraint_is_a_client_error(live: Live, model: ScriptedClient, code: str) -> None:
    model.script, model.error = "{", (code, "inside")
    response = live.post(PATH, {"messages": [USER], "guided_json": {}})
    assert (response.status_code, response.json()["error"]["code"]) == (400, code)
    with live.http.stream("POST", PATH, json={"messages": [USER], "stream": True}) as streamed:
        last = [line for line in streamed.iter_lines() if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == code


def test_tools_are_rejected_if_the_template_does_not_show_them(tmp_path: Any) -> None:
    with scripted_server(write_folder(tmp_path, CHATML)) as (live, model):
        response = live.post(PATH, {"messages": [USER], "tools": [tool()]})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "tools_unavailable")
        assert "does not support tools" in response.json()["error"]["message"]
        model.script = call()
        answer = ask(live, tools=[tool()], tool_choice="none")
        assert answer["choices"][0]["message"]["content"] == call()
        assert "completion_tokens_details" not in answer["usage"]  # no reader at all


def test_unknown_call_format_needs_a_parser_option(tmp_path: Any) -> None:
    shows = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML
    folder = write_folder(tmp_path, shows)
    with scripted_server(folder) as (live, _):
        response = live.post(PATH, {"messages": [USER], "tools": [tool()]})
        assert "--tool-call-parser" in response.json()["error"]["message"]
    with scripted_server(folder, tool_call_parser="hermes", reasoning_parser="think") as (live, model):
        model.script = OUTPUTS["content and two calls"]
        message = ask(live, tools=[tool(), tool("mul")])["choices"][0]["message"]
        assert (message["reasoning"], len(message["tool_calls"])) == ("Hm, an easy one.", 2)


def test_call_ids_are_shortened_for_templates_that_need_it(tmp_path: Any) -> None:
    with scripted_server(write_folder(tmp_path, MISTRAL, ("[TOOL_CALLS]",))) as (live, model):
        model.script = '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]'
        message = ask(live, tools=[tool()])["choices"][0]["message"]
        (call,) = message["tool_calls"]
        prompt = prompt_of(live, model, messages=[USER, message], tools=[tool()])
        assert call["id"] not in prompt
        assert '"arguments": {"a": 1}' in prompt


def test_fields_added_by_clients_are_not_shown_to_the_model(tmp_path: Any) -> None:
    """openai's helpers add what they parsed, litellm what it did not know; both send it back."""
    with scripted_server(write_folder(tmp_path, MISTRAL, ("[TOOL_CALLS]",))) as (live, model):
        model.script = '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]'
        message = ask(live, tools=[tool()])["choices"][0]["message"]
        plain = prompt_of(live, model, messages=[USER, message], tools=[tool()])
        message |= {"parsed": {"sum": 3}, "provider_specific_fields": {"reasoning": "Hm."}}
        message["tool_calls"][0]["function"]["parsed_arguments"] = {"a": 1}
        assert prompt_of(live, model, messages=[USER, message], tools=[tool()]) == plain
