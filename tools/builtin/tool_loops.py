"""Whole agent loops: the model calls tools, which answer its own calls, until it has told all results.

The tools have the names that clients use, written with the system messages and the schemas of each framework. A loop is
finished if the last answer has all results; a tool that is called with wrong arguments returns an error.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tools.builtin import tool_sums
from tools.builtin.chat_format import IM_START, Call, Turn, segments
from tools.builtin.tool_draws import draw_tools, task_for
from tools.builtin.tool_frameworks import FRAMEWORKS
from tools.builtin.tool_people import person_task, person_tool
from tools.builtin.tool_rounds import two_tasks
from tools.builtin.tool_tasks import Task
from tools.builtin.toolbox import TaughtTool

MAX_TURNS = 6
_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
_SYSTEMS = {
    "openai-agents": (
        "You are a helpful agent.",
        "You are a helpful assistant.",
        "You provide help to the user.",
    ),
    "pydantic-ai": ("", "Be concise, reply with one sentence.", "Use the tools to answer."),
    "langchain": ("", "You are a helpful assistant", "You are a helpful assistant. Use the tools."),
    "instructor": ("",),
    "ai": ("", "You are a friendly assistant.", "You are a helpful assistant."),
    "by hand": ("", "You are a helpful assistant."),
}


def parsed_calls(text: str) -> list[Any]:
    """The calls in what the model wrote; one that is not JSON stays text."""
    found: list[Any] = []
    for call in _CALL.findall(text):
        try:
            found.append(json.loads(call))
        except json.JSONDecodeError:
            found.append(call)
    return found


@dataclass(slots=True)
class Loop:
    framework: str
    kind: str
    system: str
    tools: tuple[dict[str, Any], ...]
    tasks: tuple[Task, ...]
    needed: tuple[str, ...]  # in the last answer; without any, the calls alone count
    messages: list[Turn] = field(default_factory=list)
    finished: bool = False
    right: bool = False

    @property
    def prompt(self) -> str:
        *pieces, _ = segments(self.system, self.tools, self.messages)
        return "".join(piece.text for piece in pieces) + f"{IM_START}assistant\n"

    def take(self, written: str) -> None:
        """One answer of the model, and what the tools say to its calls."""
        calls = parsed_calls(written)
        if not calls:
            self.finished = True
            self.right = bool(self.needed) and all(word.lower() in written.lower() for word in self.needed)
            self.messages.append(Turn("assistant", written))
        elif all(isinstance(call, dict) and isinstance(call.get("arguments"), dict) for call in calls):
            made = tuple(Call(str(call.get("name")), call["arguments"]) for call in calls)
            self.messages.append(Turn("assistant", "", made))
            self.messages += [Turn("tool", self._result(call)) for call in made]
            if not self.needed:
                self.finished, self.right = True, made == tuple(task.call for task in self.tasks)
        else:
            self.finished = True
            self.messages.append(Turn("assistant", written))

    def _result(self, call: Call) -> str:
        for task in self.tasks:
            if task.call == call:
                return task.outcome.result
        return "Error: wrong arguments"


def _sums(tools: Sequence[TaughtTool]) -> list[TaughtTool]:
    return [one for one in tools if one.family in (*tool_sums.OPERATIONS, "calculator", "chooser")]


def new_loop(rng: Random) -> Loop:
    """A question for one tool, for two of them, or for two sums of which the second needs the first."""
    framework = rng.choice(tuple(FRAMEWORKS))
    write, system = FRAMEWORKS[framework], rng.choice(_SYSTEMS[framework])
    if framework == "instructor":
        person = person_tool(rng)
        task = person_task(rng, person)
        return Loop(
            framework, "extraction", system, (write(person),), (task,), (), [Turn("user", task.question)]
        )
    tools: list[TaughtTool] = []
    while len(tools) < 2:
        tools = draw_tools(rng, "common", False, rng.choice((2, 2, 3)))
    kind = rng.choice(("one tool", "two tools", "two tools", "chain"))
    able = _sums(tools)
    if kind == "chain" and able:
        question, tasks = tool_sums.chained_tasks(rng, (rng.choice(able), rng.choice(able)))
        needed = tasks[1].outcome.needed
    elif kind == "one tool":
        one = task_for(rng, rng.choice(tools), held_out=False)
        question, tasks, needed = one.question, (one, one), one.outcome.needed
    else:
        kind = "two tools"
        first, second = (task_for(rng, tool, held_out=False) for tool in rng.sample(tools, 2))
        question = two_tasks(rng, first, second)[0].content
        tasks, needed = (first, second), (*first.outcome.needed, *second.outcome.needed)
    schemas = tuple(write(tool) for tool in tools)
    return Loop(framework, kind, system, schemas, tasks, needed, [Turn("user", question)])


def loops(seed: int, count: int) -> Iterator[Loop]:
    return (new_loop(Random(f"{seed}/loop/{index}")) for index in range(count))


def run_loops(started: Sequence[Loop], write: Callable[[Sequence[str]], list[str]]) -> None:
    """All of them to their end, one turn of each at a time."""
    for _ in range(MAX_TURNS):
        going = [one for one in started if not one.finished]
        if not going:
            return
        for one, written in zip(going, write([one.prompt for one in going]), strict=True):
            one.take(written)


def loop_report(done: Sequence[Loop], show: int) -> str:
    """A table of frameworks and kinds, then some of those that went wrong."""
    lines = [f"{'agent loop':28} {'right':>6} {'of':>6}"]
    for name, key in [(one, "framework") for one in FRAMEWORKS] + [
        (one, "kind") for one in ("one tool", "two tools", "chain", "extraction")
    ]:
        found = [one.right for one in done if getattr(one, key) == name]
        if found:
            lines.append(f"{name:28} {sum(found):6} {len(found):6} {sum(found) / len(found):7.1%}")
    right = sum(one.right for one in done)
    lines.append(f"{'all':28} {right:6} {len(done):6} {right / len(done):7.1%}")
    for one in [one for one in done if not one.right][:show]:
        *pieces, _ = segments("", (), one.messages)
        lines.append(f"\n--- {one.framework}, {one.kind}\n{''.join(piece.text for piece in pieces)}")
    return "\n".join(lines)
