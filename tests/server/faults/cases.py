"""Requests whose answers are known, and what their clients receive."""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from inflight import LLM, SamplingParams
from tests.server.live import Live, ProcessBackend

PATH = "/v1/completions"


class ClientView:
    """A client's view of an answer: the status, the text, the errors, and whether the stream had its end mark."""

    def __init__(self, live: Live, body: dict[str, Any]) -> None:
        self.text, self.done = "", False
        self.errors: list[Any] = []
        with live.http.stream("POST", PATH, json=body) as response:
            self.status, self.headers = response.status_code, response.headers
            if response.headers["content-type"] == "application/json":
                self._take(json.loads(response.read()))
                return
            for line in filter(None, response.iter_lines()):
                if line.startswith(":"):  # a ping
                    continue
                assert not self.errors, "something came after the error"
                self.done = line == "data: [DONE]"
                if not self.done:
                    self._take(json.loads(line.removeprefix("data: ")))

    def _take(self, event: Any) -> None:
        if "error" in event:
            self.errors.append(event["error"])
            for word in ("Error", "/", "Traceback", "0x"):
                assert word not in event["error"]["message"]
        else:
            self.text += event["choices"][0]["text"]


class Case:
    """A request and the text it must produce whatever happens around it."""

    def __init__(self, prompt: list[int], max_tokens: int, text: str) -> None:
        self.text = text
        self.body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}

    def send(self, threads: ThreadPoolExecutor, live: Live, stream: bool = True) -> Future[ClientView]:
        return threads.submit(ClientView, live, {**self.body, "stream": stream})

    def is_correct(self, view: ClientView) -> bool:
        return view.status == 200 and view.text == self.text and not view.errors


def make_cases(llm: LLM, prompts: list[tuple[list[int], int]]) -> list[Case]:
    """Return a case for each prompt and number of tokens."""
    params = [SamplingParams(temperature=0, max_tokens=number, ignore_eos=True) for _, number in prompts]
    outputs = llm.generate([prompt for prompt, _ in prompts], params)
    return [
        Case(*prompt_and_length, output.outputs[0].text)
        for prompt_and_length, output in zip(prompts, outputs, strict=True)
    ]


def make_case(llm: LLM, prompt: list[int], max_tokens: int) -> Case:
    return make_cases(llm, [(prompt, max_tokens)])[0]


def wait_for_running(live: Live, number: int, waiting: int = 0) -> None:
    async def has_counts() -> bool:
        stats = await live.backend.engine.stats()
        return (stats.num_running, stats.num_waiting) == (number, waiting)

    live.wait_until(f"{number} running, {waiting} waiting", has_counts)


def health(live: Live) -> tuple[int, str]:
    response = live.http.get("/health")
    return response.status_code, response.json()["status"]


async def health_of(live: Live) -> bool:
    return not (await live.backend.engine.health()).healthy


def process_id(live: Live) -> int:
    """Return the id of the engine process."""
    assert isinstance(live.backend, ProcessBackend)
    number = live.backend.client.process_id
    assert number is not None
    return number
