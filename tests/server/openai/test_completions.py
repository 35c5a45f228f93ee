"""/v1/completions: the same tokens as without a server, in OpenAI's shapes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inflight import LLM, SamplingParams
from inflight.server import engine_response
from inflight.server.openai.schemas import Completion
from tests.server.live import Backend, Live, events, stream

PATH = "/v1/completions"
PROMPT = "Once upon a time"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}


def expected(llm: LLM, prompt: Any = PROMPT, **params: Any) -> Any:
    fields = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, **params}
    return llm.generate(prompt, SamplingParams(**fields))[0]


def test_whole_answer_has_the_tokens_of_an_offline_run(live: Live, llm: LLM) -> None:
    answer = live.complete(PROMPT, **GREEDY)
    whole = expected(llm)
    Completion.model_validate(answer, strict=True)
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == "inflight-builtin"
    assert answer["choices"] == [
        {
            "index": 0,
            "text": whole.outputs[0].text,
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    num_prompt = len(whole.prompt_token_ids)
    assert answer["usage"]["prompt_tokens"] == num_prompt
    assert answer["usage"]["completion_tokens"] == 24
    assert answer["usage"]["total_tokens"] == num_prompt + 24


def test_events_add_up_to_the_whole_answer(live: Live, llm: LLM) -> None:
    events = stream(live, PATH, {"prompt": PROMPT, **GREEDY})
    for event in events:
        Completion.model_validate(event, strict=True)
        assert "usage" not in event
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
    choices = [event["choices"][0] for event in events]
    assert "".join(choice["text"] for choice in choices) == expected(llm).outputs[0].text
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
def test_long_answer_is_sent_in_parts(live: Live, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    body: dict[str, Any] = {**GREEDY, "n": 3, "prompt_logprobs": 2}
    if path == PATH:
        body |= {"prompt": PROMPT, "logprobs": 3, "echo": True}
    else:
        body |= {"messages": [{"role": "user", "content": PROMPT}], "logprobs": True, "top_logprobs": 3}
    at_once = live.post(path, body)
    assert "content-length" in at_once.headers
    monkeypatch.setattr(engine_response, "PART_SIZE", 1000)
    with live.http.stream("POST", path, json=body) as response:
        assert response.headers["transfer-encoding"] == "chunked"
        assert response.headers["content-type"] == "application/json"
        in_parts = json.loads(response.read())
    assert in_parts["choices"] == at_once.json()["choices"]
    assert in_parts.get("prompt_logprobs") == at_once.json().get("prompt_logprobs")


def test_usage_is_in_the_last_event_with_include_usage(live: Live) -> None:
    events = stream(live, PATH, {"prompt": PROMPT, **GREEDY, "stream_options": {"include_usage": True}})
    assert all(event["usage"] is None for event in events[:-1])
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 24


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_so_far_comes_with_every_event(path: str, live: Live, backend: Backend) -> None:
    body = {"prompt": PROMPT} if path == PATH else {"messages": [{"role": "user", "content": PROMPT}]}
    options = {"include_usage": True, "continuous_usage_stats": True}
    body |= {**GREEDY, "stream": True, "stream_options": options}
    with backend.held_steps(4) as held, live.http.stream("POST", path, json=body) as response:
        received = events(response)
        first = [next(received)]
        while not first[-1]["usage"]["completion_tokens"]:  # the event that only names the role
            first.append(next(received))
        held.allow(4)
        first.append(next(received))
        held.release()
        *later, last = received
    counts = [event["usage"]["completion_tokens"] for event in [*first, *later]]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == 24
    assert len(set(counts)) > 2, "they grow"
    assert {event["usage"]["prompt_tokens"] for event in [*first, *later]} == {last["usage"]["prompt_tokens"]}


def test_special_tokens_are_omitted_without_add_special_tokens(live: Live, llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    for add in (None, True, False):
        answer = live.complete(PROMPT, **GREEDY, add_special_tokens=add)
        assert answer["usage"]["prompt_tokens"] == len(tokenizer.encode(PROMPT, add is not False))


def test_repeated_prompt_is_cached_unless_the_salt_differs(live: Live) -> None:
    prompt = [7] * 100
    live.complete(prompt, **GREEDY)
    details = live.complete(prompt, **GREEDY)["usage"]["prompt_tokens_details"]
    assert details == {"cached_tokens": 96}
    salted = live.complete(prompt, **GREEDY, cache_salt="mine")["usage"]["prompt_tokens_details"]
    assert salted == {"cached_tokens": 0}


@pytest.mark.parametrize("streamed", [False, True])
def test_several_prompts_with_several_answers_match_an_offline_run(
    streamed: bool, live: Live, llm: LLM
) -> None:
    prompts = [PROMPT, "The little fox", "A"]
    params = {"n": 2, "temperature": 1.0, "max_tokens": 9, "seed": 5, "top_p": 1.0, "top_k": 0}
    body = {"prompt": prompts, "ignore_eos": True, **params}
    texts: dict[int, str] = {}
    if streamed:
        for event in stream(live, PATH, body):
            for choice in event["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    else:
        answer = live.complete(**body)
        texts = {choice["index"]: choice["text"] for choice in answer["choices"]}
        assert answer["usage"]["completion_tokens"] == 6 * 9
    whole = [output.text for prompt in prompts for output in expected(llm, prompt, **params).outputs]
    assert [texts[index] for index in range(6)] == whole
    assert whole[0] != whole[1]


def test_token_ids_are_accepted_as_prompts(live: Live, llm: LLM) -> None:
    ids = expected(llm).prompt_token_ids
    text = expected(llm).outputs[0].text
    assert live.complete(ids, **GREEDY)["choices"][0]["text"] == text
    choices = live.complete([ids, [5, 6]], **GREEDY)["choices"]
    assert [choice["text"] for choice in choices] == [text, expected(llm, [5, 6]).outputs[0].text]


def test_token_ids_are_returned_with_the_text(live: Live, llm: LLM) -> None:
    whole = expected(llm)
    (choice,) = live.complete(PROMPT, **GREEDY, return_token_ids=True)["choices"]
    assert choice["token_ids"] == whole.outputs[0].token_ids
    assert choice["prompt_token_ids"] == whole.prompt_token_ids
    events = stream(live, PATH, {"prompt": PROMPT, **GREEDY, "return_token_ids": True})
    choices = [event["choices"][0] for event in events]
    assert [i for choice in choices for i in choice["token_ids"]] == whole.outputs[0].token_ids
    assert [choice for choice in choices if "prompt_token_ids" in choice] == choices[:1]


def test_stop_string_ends_the_answer(live: Live, llm: LLM) -> None:
    text = expected(llm).outputs[0].text
    stop = text[20:24]
    cut = text[: text.index(stop)]
    (choice,) = live.complete(PROMPT, **GREEDY, stop=stop)["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (cut, "stop", stop)
    events = stream(live, PATH, {"prompt": PROMPT, **GREEDY, "stop": [stop, "never there"]})
    choices = [event["choices"][0] for event in events]
    assert "".join(choice["text"] for choice in choices) == cut
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", stop)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("prompt", [PROMPT, [5, 6, 7]])
def test_echo_puts_the_prompt_before_the_answer(streamed: bool, prompt: Any, live: Live, llm: LLM) -> None:
    whole = expected(llm, prompt)
    before = prompt if isinstance(prompt, str) else llm.get_tokenizer().decode(prompt)
    body = {"prompt": prompt, **GREEDY, "echo": True}
    if streamed:
        text = "".join(event["choices"][0]["text"] for event in stream(live, PATH, body))
    else:
        text = live.complete(**body)["choices"][0]["text"]
    assert text == before + whole.outputs[0].text


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_logprobs_are_those_of_an_offline_run(streamed: bool, echo: bool, live: Live, llm: LLM) -> None:
    whole = expected(llm, logprobs=3, prompt_logprobs=3)
    body = {"prompt": PROMPT, **GREEDY, "logprobs": 3, "echo": echo}
    if streamed:
        parts = [event["choices"][0]["logprobs"] for event in stream(live, PATH, body)]
        logprobs = {name: [item for part in parts for item in part[name]] for name in parts[0]}
    else:
        logprobs = live.complete(**body)["choices"][0]["logprobs"]
    ids = [*(whole.prompt_token_ids if echo else []), *whole.outputs[0].token_ids]
    positions = [*(whole.prompt_logprobs if echo else []), *whole.outputs[0].logprobs]
    decode = llm.get_tokenizer().decode
    assert logprobs["tokens"] == [decode([i], skip_special_tokens=False) for i in ids]
    assert logprobs["token_logprobs"] == [
        None if position is None else pytest.approx(position[i].logprob, abs=1e-5)
        for i, position in zip(ids, positions, strict=True)
    ]
    for top, position in zip(logprobs["top_logprobs"], positions, strict=True):
        if position is None:
            assert top is None
        else:
            assert set(top) == {logprob.decoded_token for logprob in position.values()}
    offsets = [sum(map(len, logprobs["tokens"][:index])) for index in range(len(ids))]
    assert logprobs["text_offset"] == offsets


def test_max_tokens_0_with_echo_returns_only_the_prompts_logprobs(live: Live, llm: LLM) -> None:
    whole = expected(llm, logprobs=0, prompt_logprobs=0)
    answer = live.complete(PROMPT, max_tokens=0, echo=True, logprobs=0)
    (choice,) = answer["choices"]
    assert choice["text"] == PROMPT
    assert choice["finish_reason"] == "length"
    pairs = zip(whole.prompt_logprobs[1:], whole.prompt_token_ids[1:], strict=True)
    scores = [None, *(position[token_id].logprob for position, token_id in pairs)]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(scores, abs=1e-5)
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["prompt_tokens"] == len(whole.prompt_token_ids)
    record = live.http.get(f"/v1/requests/{answer['id']}").json()["answers"][0]
    assert record["num_output_tokens"] == 0, "nothing is generated to be dropped"
    events = stream(live, PATH, {"prompt": PROMPT, "max_tokens": 0, "echo": True})
    assert "".join(event["choices"][0]["text"] for event in events) == PROMPT


def test_prompt_logprobs_are_those_of_an_offline_run(live: Live, llm: LLM) -> None:
    whole = expected(llm, prompt_logprobs=1)
    (choice,) = live.complete(PROMPT, **GREEDY, prompt_logprobs=1)["choices"]
    positions = choice["prompt_logprobs"]
    assert positions[0] is None
    assert [set(map(int, position)) for position in positions[1:]] == [
        set(p) for p in whole.prompt_logprobs[1:]
    ]


def test_max_tokens_is_16_by_default(live: Live) -> None:
    assert live.complete(PROMPT, ignore_eos=True)["usage"]["completion_tokens"] == 16


def test_parameters_reach_the_engine(live: Live, llm: LLM) -> None:
    params: dict[str, Any] = {
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.01,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "seed": 11,
        "min_tokens": 5,
        "logit_bias": {"17": -100, "300": 5},
        "bad_words": ["fox"],
        "stop_token_ids": [12],
        "max_tokens": 24,
    }
    whole = llm.generate(PROMPT, SamplingParams(**params))[0].outputs[0]
    assert live.complete(PROMPT, **params)["choices"][0]["text"] == whole.text
