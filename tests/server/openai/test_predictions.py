"""OpenAI's `prediction`: a draft of the answer, which is verified, counted, and changes no token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from inflight import SamplingParams
from inflight.scheduling.drafts import AdaptiveSpeculation
from inflight.server.openai.schemas import ChatCompletion
from tests.scheduling.guessing import FreeSteps
from tests.server.live import Backend, Live, live_server, stream

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Tell me a story about a cat."}]
BODY: dict[str, Any] = {"messages": MESSAGES, "temperature": 0, "max_completion_tokens": 40}


@pytest.fixture(scope="module")
def drafting() -> Iterator[Backend]:
    backend = Backend(num_blocks=512, speculative_config={"method": "ngram"})
    speculation = backend.core.scheduler.speculation
    assert isinstance(speculation, AdaptiveSpeculation)
    speculation._costs = FreeSteps()  # instead of this machine's
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def live(drafting: Backend) -> Iterator[Live]:
    with live_server(drafting, max_prompt_tokens=300) as live:
        yield live


def ask(live: Live, **body: Any) -> dict[str, Any]:
    response = live.post(PATH, {**BODY, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def predicted(text: Any) -> dict[str, Any]:
    return {"prediction": {"type": "content", "content": text}}


def counts(answer: dict[str, Any]) -> dict[str, int]:
    details = answer["usage"]["completion_tokens_details"]
    return {name: count for name, count in details.items() if "prediction" in name}


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def test_right_prediction_is_accepted(live: Live) -> None:
    without = ask(live)
    answer = ask(live, **predicted(text_of(without)))
    ChatCompletion.model_validate(answer, strict=True)
    assert text_of(answer) == text_of(without)
    assert counts(answer)["accepted_prediction_tokens"] > 25
    assert counts(answer)["rejected_prediction_tokens"] < 5
    assert answer["usage"]["completion_tokens"] == without["usage"]["completion_tokens"] == 40


def test_parts_are_one_prediction(live: Live) -> None:
    text = text_of(ask(live))
    parts = [{"type": "text", "text": text[:20]}, {"type": "text", "text": text[20:]}]
    details = ask(live, **predicted(parts))["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 25


def test_drafts_resume_behind_a_change(live: Live) -> None:
    without = text_of(ask(live))
    words = without.split(" ")
    words[5:7] = ["something", "else", "entirely"]
    answer = ask(live, **predicted(" ".join(words)))
    assert text_of(answer) == without
    details = answer["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 20
    assert details["rejected_prediction_tokens"] > 0


def test_wrong_prediction_is_rejected_and_costs_no_tokens(live: Live) -> None:
    without = ask(live)
    answer = ask(live, **predicted(text_of(without)[:12] + " or something that is not said at all, ever"))
    assert text_of(answer) == text_of(without)
    details = answer["usage"]["completion_tokens_details"]
    assert details["rejected_prediction_tokens"] > 0
    assert answer["usage"]["completion_tokens"] == without["usage"]["completion_tokens"]


def test_only_answers_with_a_prediction_count_it(live: Live) -> None:
    for body in ({}, predicted("")):
        assert counts(ask(live, **body)) == {}
    assert counts(ask(live, **predicted("zz qq"))) == {
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
    }


def test_stream_counts_it_at_its_end(live: Live) -> None:
    text = text_of(ask(live))
    body = {**BODY, **predicted(text), "stream_options": {"include_usage": True}}
    last = stream(live, PATH, body)[-1]
    assert last["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 25


def test_several_answers_share_a_prediction(live: Live) -> None:
    text = text_of(ask(live))
    details = ask(live, n=2, **predicted(text))["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 50


@pytest.mark.parametrize(
    "prediction",
    [{"type": "content"}, {"type": "file", "content": "x"}, {"type": "content", "content": 3}, "x", []],
)
def test_malformed_predictions_are_rejected(live: Live, prediction: Any) -> None:
    response = live.post(PATH, {**BODY, "prediction": prediction})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("prediction")


def test_long_predictions_are_rejected(live: Live) -> None:
    error = live.post(PATH, {**BODY, **predicted("word " * 400)}).json()["error"]
    assert (error["param"], "at most 300 are allowed" in error["message"]) == ("prediction", True)
    error = live.post(PATH, {**BODY, **predicted("x" * 1_000_000)}).json()["error"]
    assert (error["param"], "has 1000000 characters" in error["message"]) == ("prediction", True)


def test_without_speculation_it_changes_nothing(backend: Backend) -> None:
    with live_server(backend) as live:
        answer, without = ask(live, **predicted("whatever")), ask(live)
        assert text_of(answer) == text_of(without)
        assert counts(answer) == {}
        live.wait_until_idle()


def test_python_has_it_as_a_parameter(drafting: Backend) -> None:
    async def generate(**fields: Any) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=20, **fields)
        outputs = [output async for output in drafting.engine.generate("Once upon a time", params)]
        return [token_id for output in outputs[-1:] for token_id in output.outputs[0].token_ids]

    without = drafting.run(generate())
    text = drafting.engine.frontend.tokenizer.decode(without)  # type: ignore[union-attr]
    before = drafting.core.scheduler.speculation.stats.num_accepted
    assert drafting.run(generate(prediction=text)) == without
    assert drafting.core.scheduler.speculation.stats.num_accepted > before + 8
