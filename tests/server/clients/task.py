"""The task of every client's agent loop, its two tools, and a model that knows how to do it.

    question -> get_weather(city="Paris") -> multiply(a=12, b=7) -> "It is sunny in Paris, and 12 times 7 is 84."

The built-in model does it by itself. A second model, whose words are written here, does what that one does not: it
thinks first, and makes both calls at once. Server, HTTP and parsers are real for both.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from inflight.checkpoint.builtin import checkpoint_folder
from inflight.request import Request
from tests.server.live import Backend, Live, live_server
from tests.server.scripted import ScriptedBackend, write_folder

KEY = "secret"
MESSAGES: Any = [{"role": "user", "content": "Why does it rain?"}]  # for the built-in model
QUESTION = "What is the weather in Paris, and what is 12 times 7?"
EXPECTED_CALLS = [("get_weather", {"city": "Paris"}), ("multiply", {"a": 12, "b": 7})]
ANSWER = "It is sunny in Paris, and 12 times 7 is 84."


class Report(BaseModel):
    """The answer as an object."""

    city: str
    weather: str
    product: int


REPORT = Report(city="Paris", weather="sunny", product=84)
THOUGHT = "I need a tool."
# The built-in model has not learned what to put into an object.
knowing_model = pytest.mark.parametrize("served", ["_knowing"], indirect=True)


@dataclass
class Toolbox:
    """The tools of one loop, and which calls they got."""

    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def functions(self) -> tuple[Callable[..., str], Callable[..., int]]:
        """Return the tools as functions, for packages that read signatures and docstrings."""

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
        """Run a call of the model, for loops written by hand."""
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
        get_weather, multiply = self.functions()
        return get_weather(**parsed) if name == "get_weather" else str(multiply(**parsed))

    def check(self, answer: str | None) -> None:
        """Check that each tool was called correctly, and that the answer has their results."""
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
    thought: str | None = None  # before its first call
    report: Report | None = (
        None  # what it says when it is asked for an object; the built-in model says anything
    )

    def check_report(self, report: object) -> None:
        """Check an object that the model was asked for."""
        assert isinstance(report, Report)
        assert self.report in (None, report)

    @property
    def base_url(self) -> str:
        """For clients of OpenAI's API."""
        return f"{self.url}/v1"


def _call(name: str, arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def _say(prompt: str, *, constrained: bool) -> str:
    """Return the next output of a model that knows the task."""
    report = REPORT.model_dump_json()
    if "[[ ## " in prompt:
        return _say_fields(prompt)
    for name in ("final_result", "Report", "PartialReport"):  # tools by which packages ask for an object
        if f'"name": "{name}"' in prompt:
            return _call(name, json.loads(report))
    if (
        '"name": "get_weather"' not in prompt
    ):  # no tools: it is asked for the object itself, or just for an answer
        return report if constrained else ANSWER
    if "<tool_response>" in prompt:
        assert "<tool_response>\nsunny\n</tool_response>" in prompt
        assert "<tool_response>\n84\n</tool_response>" in prompt
        return ANSWER
    if "Observation:" in prompt.rpartition(QUESTION)[2]:  # smolagents, which ends with a call
        return _call("final_answer", {"answer": ANSWER})
    calls = "\n".join(_call(*call) for call in EXPECTED_CALLS)
    return f"<think>\n{THOUGHT}\n</think>\n\n{calls}"


def _say_fields(prompt: str) -> str:
    """Return the next output for dspy, which asks for fields between markers, and lists earlier calls in the prompt."""
    fields = {"reasoning": THOUGHT, "answer": ANSWER}
    if "[[ ## next_tool_name ## ]]" in prompt:
        done = [index for index in range(len(EXPECTED_CALLS)) if f"[[ ## observation_{index} ## ]]" in prompt]
        name, arguments = [*EXPECTED_CALLS, ("finish", {})][len(done)]
        fields = {"next_thought": THOUGHT, "next_tool_name": name, "next_tool_args": json.dumps(arguments)}
    return (
        "".join(f"[[ ## {name} ## ]]\n{text}\n\n" for name, text in fields.items()) + "[[ ## completed ## ]]"
    )


class KnowingBackend(ScriptedBackend):
    """A model that knows the task."""

    max_model_len = 16384  # smolagents' own prompt is long

    def __init__(self, folder: Path) -> None:
        super().__init__(write_folder(folder))
        self.client.reply = self._reply

    def _reply(self, request: Request) -> str:
        tokenizer = self.engine.frontend.tokenizer
        assert tokenizer is not None
        prompt = tokenizer.decode(request.token_ids, skip_special_tokens=False)
        return _say(prompt, constrained=request.params.structured_outputs is not None)


class GreedyBackend(Backend):
    """The built-in model, greedy by default, so that tests do not depend on sampling."""

    def __init__(self, folder: Path) -> None:
        shutil.copytree(checkpoint_folder(), folder, dirs_exist_ok=True)
        path = folder / "generation_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "do_sample": False}))
        super().__init__(model=str(folder), num_blocks=512)


@contextmanager
def serve_task(backend: Backend) -> Iterator[Live]:
    try:
        with live_server(backend, served_model_name=("m",), api_key=(KEY,)) as live:
            yield live
    finally:
        backend.close()
