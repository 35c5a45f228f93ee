"""The task that every client's agent loop is given, its two tools, and a model that knows how to do it.

    question -> get_weather(city="Paris") -> multiply(a=12, b=7) -> "It is sunny in Paris, and 12 times 7 is 84."

The server, its HTTP and its parsers are real; only what the model says is written here. A model that can do the task by
itself needs nothing but a `Served` of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from inflight.request import Request
from tests.server.live import Live, live_server
from tests.server.scripted import ScriptedBackend, write_folder

KEY = "secret"
QUESTION = "What is the weather in Paris, and what is 12 times 7?"
EXPECTED_CALLS = [("get_weather", {"city": "Paris"}), ("multiply", {"a": 12, "b": 7})]
ANSWER = "It is sunny in Paris, and 12 times 7 is 84."


class Report(BaseModel):
    """The answer as an object."""

    city: str
    weather: str
    product: int


REPORT = Report(city="Paris", weather="sunny", product=84)


@dataclass
class Toolbox:
    """The tools of one loop, and which calls they got."""

    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def functions(self) -> tuple[Callable[..., str], Callable[..., int]]:
        """As packages take them that read signatures and docstrings."""

        def get_weather(city: str) -> str:
            """The weather in a city.

            Args:
                city: Its name.
            """
            self.calls.append(("get_weather", {"city": city}))
            return "sunny"

        def multiply(a: int, b: int) -> int:
            """The product of two numbers.

            Args:
                a: The first.
                b: The second.
            """
            self.calls.append(("multiply", {"a": a, "b": b}))
            return a * b

        return get_weather, multiply

    def run(self, name: str, arguments: str | dict[str, Any]) -> str:
        """A call of the model, for loops written by hand."""
        given = json.loads(arguments) if isinstance(arguments, str) else arguments
        get_weather, multiply = self.functions()
        return get_weather(**given) if name == "get_weather" else str(multiply(**given))

    def check(self, answer: str | None) -> None:
        """The task is done: each tool was called as it should be, and the answer says what they gave."""
        assert sorted(self.calls, key=str) == EXPECTED_CALLS
        assert answer is not None
        assert "sunny" in answer
        assert "84" in answer


SCHEMAS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "multiply": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}
CHAT_TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    for name, schema in SCHEMAS.items()
]


@dataclass(frozen=True)
class Served:
    """A server and the model that clients ask for."""

    url: str
    model: str

    @property
    def base_url(self) -> str:
        """For clients of OpenAI's API."""
        return f"{self.url}/v1"


def _call(name: str, arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def _say(prompt: str, *, constrained: bool, at_once: bool) -> str:
    """What a model that knows the task says next."""
    report = REPORT.model_dump_json()
    for name in ("final_result", "Report"):  # tools by which packages ask for an object
        if f'"name": "{name}"' in prompt:
            return _call(name, json.loads(report))
    if (
        '"name": "get_weather"' not in prompt
    ):  # no tools: it is asked for the object itself, or just for an answer
        return report if constrained else ANSWER
    calls = [_call(*call) for call in EXPECTED_CALLS]
    num_results = prompt.count("<tool_response>")
    if num_results == len(calls):
        assert "<tool_response>\nsunny\n</tool_response>" in prompt
        assert "<tool_response>\n84\n</tool_response>" in prompt
        return ANSWER
    thought = "<think>\nI need a tool.\n</think>\n\n"
    return thought + ("\n".join(calls) if at_once else calls[num_results])


class KnowingBackend(ScriptedBackend):
    """A model that knows the task: it calls the tools one after the other, or both at once."""

    def __init__(self, folder: Path, *, at_once: bool) -> None:
        super().__init__(write_folder(folder))
        self._at_once = at_once
        self.client.reply = self._reply

    def _reply(self, request: Request) -> str:
        tokenizer = self.engine.frontend.tokenizer
        assert tokenizer is not None
        prompt = tokenizer.decode(request.token_ids, skip_special_tokens=False)
        return _say(prompt, constrained=request.params.structured_outputs is not None, at_once=self._at_once)


@contextmanager
def serve_knowing_model(folder: Path, *, at_once: bool) -> Iterator[Live]:
    backend = KnowingBackend(folder, at_once=at_once)
    try:
        with live_server(backend, served_model_name=("m",), api_key=(KEY,)) as live:
            yield live
    finally:
        backend.close()
