"""A crowd of clients that ask for all kinds of things, and leave more than a third of their requests halfway."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from inflight import LLM, SamplingParams

NUM_AT_ONCE = 32
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
OTHERS: tuple[tuple[str, str, Any, int], ...] = (  # method, path, body, status
    ("GET", "/health", None, 200),
    ("GET", "/metrics", None, 200),
    ("GET", "/v1/models", None, 200),
    ("POST", "/tokenize", {"prompt": "Once upon a time"}, 200),
    ("POST", "/detokenize", {"tokens": [5, 6, 7]}, 200),
    ("POST", COMPLETIONS, {"prompt": "x", "top_p": 7}, 400),
    ("POST", CHAT, {"messages": [{"role": "user", "content": "word " * 5000}]}, 400),
    ("GET", "/v1/requests/unknown", None, 404),
)


@dataclass(frozen=True)
class Question:
    """A generation, and its answers when it runs alone."""

    path: str
    body: dict[str, Any]
    texts: list[str]


class OutageError(Exception):
    """The engine died or was found to hang under a request, or is not there yet."""


def questions_of(llm: LLM) -> list[Question]:
    """Short and long, with prefixes in common, greedy and seeded, one answer and several."""
    questions = []
    story = [5 + number % 300 for number in range(200)]
    for number in range(16):
        fields: dict[str, Any] = {
            **llm.get_default_sampling_fields(),
            "temperature": 0.0 if number % 2 else 0.9,
            "seed": number,
            "n": 1 + (number % 4 == 0),
            "max_tokens": 4 + number * number // 2,
            "ignore_eos": number % 3 == 0,
        }
        body = {**fields, "stream": number % 4 < 3, "logprobs": 2 if number == 7 else None}
        prompt = story[: 8 + 12 * number]
        output = llm.generate(prompt, SamplingParams(**fields))[0]
        questions.append(Question(COMPLETIONS, {**body, "prompt": prompt}, [a.text for a in output.outputs]))
        if number < 8:
            messages: Any = [{"role": "user", "content": f"Tell me about {'rain and ' * number}foxes."}]
            output = llm.chat(messages, SamplingParams(**fields))[0]
            body["logprobs"] = None
            questions.append(Question(CHAT, {**body, "messages": messages}, [a.text for a in output.outputs]))
    return questions


class Soak:
    """A crowd of clients. A request depends only on its number, not on the client that sends it."""

    def __init__(self, url: str, questions: list[Question], seed: int) -> None:
        self._url = url
        self._questions = questions
        self._long = [question for question in questions if question.body["max_tokens"] >= 24]
        self._seed = seed
        self.seen: Counter[str] = Counter()
        self.num_begun = 0

    async def run(self, num_requests: int) -> None:
        numbers = iter(range(num_requests))
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._url, timeout=120, limits=limits) as self._http:
            await asyncio.gather(*(self._client(numbers) for _ in range(NUM_AT_ONCE)))
        assert 3 * (self.seen["cut short"] + self.seen["lost"]) >= num_requests

    async def _client(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            self.num_begun += 1
            try:
                await self._one(number)
            except OutageError:
                self.seen["lost"] += 1
                while (await self._http.get("/ready")).status_code != 200:
                    await asyncio.sleep(0.05)

    async def _one(self, number: int) -> None:
        chance = random.Random(f"{self._seed}/{number}")
        match number % 10:
            case 0 | 3 | 5 | 8:
                while not await self._cut_short(chance.choice(self._long), chance, f"soak-{number}"):
                    self.seen["whole before it was cut"] += 1  # so another one is
                self.seen["cut short"] += 1
            case 9:
                method, path, body, status = chance.choice(OTHERS)
                response = await self._http.request(method, path, json=body)
                if response.status_code == 503:
                    raise OutageError
                assert response.status_code == status
                self.seen["others"] += 1
            case _:
                await self._whole(chance.choice(self._questions))
                self.seen["whole"] += 1

    async def _cut_short(self, question: Question, chance: random.Random, name: str) -> bool:
        """Leave after a moment, or after some events, or have it cancelled. Whether it was still going on."""
        moment = chance.random() ** 2 * 0.3
        match chance.choice(("moment", "events", "cancel")):
            case "moment":
                try:
                    await asyncio.wait_for(self._whole(question), moment)
                    return False
                except TimeoutError:
                    return True
            case "events":
                _, reasons = await self._stream(question, leave_after=chance.randrange(1, 40))
                return None in reasons
            case _:
                answer = asyncio.ensure_future(self._stream(question, request_id=name))
                await asyncio.sleep(moment)
                response = await self._http.delete(f"/v1/requests/{name}")
                texts, reasons = await answer  # first: it tells of an outage
                assert response.status_code in (200, 404)  # 404: it was not there yet
                for found, text, reason in zip(texts, question.texts, reasons, strict=True):
                    assert text.startswith(found)
                    assert reason == "abort" or found == text
                return "abort" in reasons

    async def _whole(self, question: Question) -> None:
        if question.body["stream"]:
            texts, reasons = await self._stream(question)
            assert None not in reasons
        else:
            response = await self._http.post(question.path, json=question.body)
            check_answer(response.status_code, response.text)
            choices = response.json()["choices"]
            texts = [
                choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices
            ]
        assert texts == question.texts

    async def _stream(
        self, question: Question, leave_after: int | None = None, **more: Any
    ) -> tuple[list[str], list[str | None]]:
        """The texts and the finish reasons. Fails if the stream is short, unless it was to be left."""
        texts = [""] * len(question.texts)
        reasons: list[str | None] = [None] * len(question.texts)
        body, num_events = {**question.body, "stream": True, **more}, 0
        async with self._http.stream("POST", question.path, json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode()
                if response.status_code == 409 and "cancelled" in text and "request_id" in more:
                    return texts, ["abort"] * len(reasons)  # it was not in the engine yet
                check_answer(response.status_code, text)
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return texts, reasons
                if line and not line.startswith(":"):  # a ping
                    num_events += 1
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        check_answer(503, line)
                    for choice in event["choices"]:
                        texts[choice["index"]] += choice.get("text") or choice.get("delta", {}).get(
                            "content", ""
                        )
                        reasons[choice["index"]] = choice["finish_reason"]
                if num_events == leave_after:
                    return texts, reasons
        raise AssertionError("the stream was short")


def check_answer(status: int, text: str) -> None:
    if status != 200 and "engine_unavailable" in text:
        raise OutageError
    assert status == 200, text
