"""/v1/chat/completions: shapes, the template, and what must not get through it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers

from inflight import LLM, SamplingParams
from inflight.server.openai.schemas import ChatChunk, ChatCompletion
from tests.server.live import Live, stream

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Why does it rain?"}]
GREEDY: dict[str, Any] = {"messages": MESSAGES, "temperature": 0, "max_completion_tokens": 24}


def ask(live: Live, **body: Any) -> dict[str, Any]:
    response = live.post(PATH, {**GREEDY, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def expected(llm: LLM, messages: Any = MESSAGES, **params: Any) -> Any:
    fields = {"temperature": 0, "max_tokens": 24, **params}
    return llm.chat(messages, SamplingParams(**fields))[0]


def test_whole_answer_has_the_tokens_of_an_offline_run(live: Live, llm: LLM) -> None:
    answer = ask(live)
    whole = expected(llm)
    ChatCompletion.model_validate(answer, strict=True)
    (choice,) = answer["choices"]
    assert answer["id"].startswith("chatcmpl-")
    assert choice["message"] == {"role": "assistant", "content": whole.outputs[0].text, "refusal": None}
    assert choice["finish_reason"] == whole.outputs[0].finish_reason
    assert answer["usage"]["prompt_tokens"] == len(whole.prompt_token_ids)


def test_events_add_up_to_the_whole_answer(live: Live, llm: LLM) -> None:
    events = stream(live, PATH, {**GREEDY, "stream_options": {"include_usage": True}})
    for event in events:
        ChatChunk.model_validate(event, strict=True)
    *chunks, last = events
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"][0]["delta"] == {}
    whole = expected(llm).outputs[0]
    assert chunks[-1]["choices"][0]["finish_reason"] == whole.finish_reason
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == whole.text
    assert last["usage"]["completion_tokens"] == len(whole.token_ids)


@pytest.mark.parametrize("streamed", [False, True])
def test_logprobs_are_those_of_an_offline_run(streamed: bool, live: Live, llm: LLM) -> None:
    body = {**GREEDY, "logprobs": True, "top_logprobs": 2}
    if streamed:
        choices = [event["choices"][0] for event in stream(live, PATH, body)]
        items = [item for choice in choices if choice["logprobs"] for item in choice["logprobs"]["content"]]
    else:
        items = ask(live, **body)["choices"][0]["logprobs"]["content"]
    whole = expected(llm, logprobs=2).outputs[0]
    tokenizer = llm.get_tokenizer()
    assert len(items) == len(whole.token_ids)
    for item, token_id, position in zip(items, whole.token_ids, whole.logprobs, strict=True):
        assert item["token"] == tokenizer.decode([token_id], skip_special_tokens=False)
        assert bytes(item["bytes"]) == item["token"].encode()
        assert item["logprob"] == pytest.approx(position[token_id].logprob, abs=1e-5)
        best = sorted(position.values(), key=lambda logprob: logprob.rank)[:2]
        assert [top["token"] for top in item["top_logprobs"]] == [logprob.decoded_token for logprob in best]


def test_several_answers_match_an_offline_run(live: Live, llm: LLM) -> None:
    params = {"n": 3, "temperature": 1.0, "seed": 3}
    texts = [output.text for output in expected(llm, **params).outputs]
    assert [choice["message"]["content"] for choice in ask(live, **params)["choices"]] == texts
    streamed = ["", "", ""]
    for event in stream(live, PATH, {**GREEDY, **params}):
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["delta"].get("content", "")
    assert streamed == texts


def test_answer_can_be_sent_back_with_all_its_fields(live: Live, llm: LLM) -> None:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": "It rains.",
        "refusal": None,
        "annotations": [],
        "tool_calls": None,
    }
    messages = [*MESSAGES, message, {"role": "user", "content": [{"type": "text", "text": "And why?"}]}]
    plain = [
        *MESSAGES,
        {"role": "assistant", "content": "It rains."},
        {"role": "user", "content": "And why?"},
    ]
    text = ask(live, messages=messages)["choices"][0]["message"]["content"]
    assert text == expected(llm, plain).outputs[0].text


def test_final_message_is_continued(live: Live, llm: LLM) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "Rain is"}]
    answer = ask(live, messages=messages, continue_final_message=True)
    (whole,) = llm.chat(
        messages,
        SamplingParams(temperature=0, max_tokens=24),
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert answer["choices"][0]["message"]["content"] == whole.outputs[0].text


def test_text_that_spells_a_special_token_stays_text(live: Live, llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    special = tokenizer.token(min(tokenizer.special_ids))
    plain = ask(live, return_token_ids=True)["prompt_token_ids"]
    for content in (
        f"Why {special} rain?",
        [{"type": "text", "text": part} for part in (special[:2], special[2:])],
    ):
        messages = [{"role": "user", "content": content}]
        ids = ask(live, messages=messages, return_token_ids=True)["prompt_token_ids"]
        specials = [i for i in ids if i in tokenizer.special_ids]
        assert specials == [i for i in plain if i in tokenizer.special_ids]
        assert special in tokenizer.decode(ids)


def test_parameters_without_effect_are_accepted(live: Live) -> None:
    harmless = {
        "tools": None,
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "store": False,
        "service_tier": "auto",
        "verbosity": "low",
        "modalities": ["text"],
        "parallel_tool_calls": True,
        "metadata": None,
        "reasoning_effort": None,
    }
    assert ask(live, **harmless)["choices"] == ask(live)["choices"]


class PanickingBackend:
    """A tokenizer's backend, with a real panic of its package for some texts."""

    def __init__(self, real: Any) -> None:
        self._real = real
        model = tokenizers.models.BPE({"a": 0}, [])
        broken = json.loads(tokenizers.Tokenizer(model).to_str())
        broken["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AQAAAAAAAAA="}
        self._broken = tokenizers.Tokenizer.from_str(json.dumps(broken))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        broken = any("panic" in text for text in texts)
        return (self._broken if broken else self._real).encode_batch_fast(texts, **options)


@pytest.mark.parametrize("long", [False, True])
def test_tokenizer_panic_fails_only_its_request(
    long: bool, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = live.state.model.frontend.tokenizer
    assert tokenizer is not None
    monkeypatch.setattr(tokenizer, "_backend", PanickingBackend(tokenizer._backend))
    padding = " x" * 2000 if long else ""  # long texts are tokenized in a thread
    for path, body in (
        ("/v1/completions", {"prompt": "panic" + padding, "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "panic" + padding}]}),
        ("/tokenize", {"prompt": "panic" + padding}),
    ):
        response = live.post(path, body)
        assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error"), path
    assert live.complete("good", max_tokens=1)["usage"]["completion_tokens"] == 1


def test_dead_template_worker_is_a_server_error(live: Live) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    assert live.post("/v1/chat/completions", body).status_code == 200
    for worker in live.state.model.frontend.chat_template._renderer._pool.idle:
        worker._process.kill()
        worker._process.wait()
    died = live.post("/v1/chat/completions", body)
    error = died.json()["error"]
    assert (died.status_code, error["code"]) == (503, "template_unavailable")
    assert (error["type"], died.headers["retry-after"]) == ("service_unavailable_error", "1")
    while live.post("/v1/chat/completions", body).status_code != 200:  # each of the dead is met once
        pass
