"""Hundreds of requests of all kinds, more than a third of which end at random moments: nothing is left behind.

INFLIGHT_SOAK=3000 makes it thousands, and prints what was seen.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from inflight import LLM, SamplingParams
from tests.server.live import ProcessBackend, live_server
from tests.server.test_command import serving, worker_of

NUM_REQUESTS = int(os.environ.get("INFLIGHT_SOAK", "240"))
NUM_AT_ONCE = 32
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
OTHERS: tuple[tuple[str, str, Any, int], ...] = (  # method, path, body, status
    ("GET", "/health", None, 200),
    ("GET", "/metrics", None, 200),
    ("GET", "/v1/models", None, 200),
    ("POST", "/tokenize", {"prompt": "Once upon a time"}, 200),
    ("POST", "/detokenize", {"tokens": [5, 6, 7]}, 200),
    ("POST", COMPLETIONS, {"prompt": "x", "top_p": 7}, 400),
    ("POST", CHAT, {"messages": [{"role": "user", "content": "word " * 3000}]}, 400),
    ("GET", "/v1/requests/unknown", None, 404),
)


@dataclass(frozen=True)
class Question:
    """A generation, and its answers when it runs alone."""

    path: str
    body: dict[str, Any]
    texts: list[str]


@pytest.fixture(scope="module")
def questions(llm: LLM) -> list[Question]:
    """Short and long, with prefixes in common, greedy and seeded, one answer and several."""
    found = []
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
        found.append(Question(COMPLETIONS, {**body, "prompt": prompt}, [a.text for a in output.outputs]))
        if number < 8:
            messages: Any = [{"role": "user", "content": f"Tell me about {'rain and ' * number}foxes."}]
            output = llm.chat(messages, SamplingParams(**fields))[0]
            body["logprobs"] = None
            found.append(Question(CHAT, {**body, "messages": messages}, [a.text for a in output.outputs]))
    return found


class Soak:
    """A crowd of clients. What a request is depends on its number alone, not on who comes to it first."""

    def __init__(self, url: str, questions: list[Question], seed: int) -> None:
        self._url = url
        self._questions = questions
        self._long = [question for question in questions if question.body["max_tokens"] >= 24]
        self._seed = seed
        self.seen: Counter[str] = Counter()

    async def run(self, num_requests: int) -> None:
        numbers = iter(range(num_requests))
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._url, timeout=120, limits=limits) as self._http:
            await asyncio.gather(*(self._client(numbers) for _ in range(NUM_AT_ONCE)))
        assert 3 * self.seen["cut short"] >= num_requests

    async def _client(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            chance = random.Random(f"{self._seed}/{number}")
            match number % 10:
                case 0 | 3 | 5 | 8:
                    while not await self._cut_short(chance.choice(self._long), chance, f"soak-{number}"):
                        self.seen["whole before it was cut"] += 1  # so another one is
                    self.seen["cut short"] += 1
                case 9:
                    method, path, body, status = chance.choice(OTHERS)
                    assert (await self._http.request(method, path, json=body)).status_code == status
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
                assert response.status_code in (200, 404)  # 404: it was not there yet
                texts, reasons = await answer
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
            assert response.status_code == 200, response.text
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
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return texts, reasons
                if line:
                    num_events += 1
                    for choice in json.loads(line.removeprefix("data: "))["choices"]:
                        texts[choice["index"]] += choice.get("text") or choice.get("delta", {}).get(
                            "content", ""
                        )
                        reasons[choice["index"]] = choice["finish_reason"]
                if num_events == leave_after:
                    return texts, reasons
        raise AssertionError("the stream was short")


def test_nothing_is_left_behind(questions: list[Question]) -> None:
    backend = ProcessBackend(num_blocks=512, max_num_seqs=24, max_queue=256)
    try:
        with live_server(backend) as live:
            asyncio.run(Soak(live.url, questions, seed=0).run(2 * NUM_AT_ONCE))
            live.wait_until_idle()
            num_tasks = backend.run(num_tasks_of(live.server))
            soak = Soak(live.url, questions, seed=1)
            asyncio.run(soak.run(NUM_REQUESTS))
            live.wait_until_idle()
            client = backend.client
            assert not client._requests
            assert not client._open
            assert not client._calls
            assert not any(caller.num_running for caller in live.state.keys.callers)
            assert live.state.metrics.num_disconnects > 0
            live.wait_until("no connection", lambda: not live.server.server_state.connections)
            assert not live.server.server_state.tasks
            assert backend.run(num_tasks_of(live.server)) == num_tasks
            kv = backend.run(backend.engine.stats()).kv
            assert (kv.num_used, kv.num_free + kv.num_cached) == (0, 512)
            assert client.num_dropped_frames == 0
    finally:
        backend.close()


async def num_tasks_of(server: Any) -> int:
    while server.server_state.connections:
        await asyncio.sleep(0.01)
    return len(asyncio.all_tasks())


def resident(process_id: int) -> int:
    """Bytes."""
    status = Path(f"/proc/{process_id}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


def blocks(http: httpx.Client) -> dict[str, float]:
    families = text_string_to_metric_families(http.get("/metrics").text)
    return {
        sample.labels["state"]: sample.value
        for family in families
        if family.name == "inflight:kv_blocks"
        for sample in family.samples
    }


def test_no_memory_grows(questions: list[Question], capfd: pytest.CaptureFixture[str]) -> None:
    options = ("--max-num-seqs", "24", "--request-history", "64", "--no-log-requests")
    with serving(*options) as (process, http, _):
        processes = process.pid, worker_of(process)
        asyncio.run(Soak(str(http.base_url), questions, seed=0).run(120))
        before = [resident(number) for number in processes]
        soak = Soak(str(http.base_url), questions, seed=2)
        asyncio.run(soak.run(NUM_REQUESTS))
        while blocks(http)["used"]:
            pass
        after = [resident(number) for number in processes]
        with capfd.disabled():
            if "INFLIGHT_SOAK" in os.environ:
                shown = [f"{a >> 20} -> {b >> 20} MiB" for a, b in zip(before, after, strict=True)]
                print(f"\n{NUM_REQUESTS} requests: {dict(soak.seen)}, blocks {blocks(http)}")
                print(f"resident memory: server {shown[0]}, engine {shown[1]}")
        assert sum(blocks(http).values()) == 1024
    # What one more kind of request first needs is not growth; what each of them leaves would be.
    assert all(end - start < 24 << 20 for start, end in zip(before, after, strict=True))
