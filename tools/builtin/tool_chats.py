"""Chats with tools: questions that need one call, two, a chain of them, or none at all, with and without thoughts.

    python -m tools.builtin.tool_chats --examples 5 --seed 1

prints examples. A chat is decided by (seed, index) alone. Held-out chats use cities, names of tools and parameters,
and questions that are never trained on.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from tools.builtin import explain, facts, smalltalk, stories, tool_sums, unknown
from tools.builtin.chat_format import Call, Segment, Turn, dumps, segments
from tools.builtin.copying import exercise
from tools.builtin.systems import SYSTEMS, system_prompt
from tools.builtin.tool_forms import form_task, form_tool
from tools.builtin.tool_frameworks import written
from tools.builtin.tool_names import Naming, renamed
from tools.builtin.tool_people import extraction, person_task, person_tool
from tools.builtin.tool_tasks import DATA_FAMILIES, Task, data_task, data_tool, follow_up
from tools.builtin.toolbox import TaughtTool, ToolParameter

_SUMS = ("add", "subtract", "multiply", "divide")
# The taught ones come most often; the others make it look at names and descriptions.
_FAMILIES = (
    *("weather",) * 5,
    *("time",) * 4,
    *("lookup",) * 4,
    *("sums",) * 7,
    *("attribute",) * 4,
    *("form",) * 6,
    *DATA_FAMILIES,
)
_COMMON_FAMILIES = (*("weather",) * 3, *("time",) * 2, *("lookup",) * 2, *("sums",) * 4)
# Of the chats that are trained on: what every client uses has to be certain, all else has to be read.
_NAMINGS: dict[Naming, float] = {"common": 0.35, "varied": 0.3, "made up": 0.35}
_THINKING_SHARE = 0.3
_LONG_SHARE = 0.08
_COPYING_SHARE = 0.5
Size = Literal["short", "usual", "long"]
_PARALLEL = (" Do both at once.", " Call both tools at the same time.", " Do it in parallel.")


@dataclass(frozen=True, slots=True)
class ToolChat:
    """A document with tools. Its kind is that of its last question."""

    kind: str
    system: str
    tools: tuple[dict[str, Any], ...]
    messages: tuple[Turn, ...]

    @property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(segments(self.system, self.tools, self.messages))

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments)


def _sum_tools(rng: Random, held_out: bool) -> list[TaughtTool]:
    """Tools for sums in one style: two styles at once would leave open which to call."""
    roll = rng.random()
    if roll < 0.3:
        return [tool_sums.calculator_tool(rng, held_out)]
    if roll < 0.4:
        return [tool_sums.chooser_tool(rng, held_out)]
    keys = rng.sample(_SUMS, rng.choice((1, 2, 2, 3, 4)))
    return [tool_sums.operation_tool(rng, key, held_out) for key in keys]


def _family_tools(rng: Random, family: str, naming: Naming, held_out: bool) -> list[TaughtTool]:
    if family == "form":
        return [form_tool(rng, naming, held_out)]
    tools = _sum_tools(rng, held_out) if family == "sums" else [data_tool(rng, family, held_out)]
    return [renamed(rng, tool, naming, held_out) for tool in tools]


def draw_tools(rng: Random, naming: Naming, held_out: bool, num_families: int) -> list[TaughtTool]:
    """Tools of different families, with different names."""
    found: list[TaughtTool] = []
    families: set[str] = set()
    for _ in range(num_families):
        family = rng.choice(_COMMON_FAMILIES if naming == "common" and num_families < 4 else _FAMILIES)
        if family in families and family not in ("attribute", "form"):
            continue
        if family in ("now", "time") and families & {"now", "time"}:
            continue
        families.add(family)
        for tool in _family_tools(rng, family, naming, held_out):
            clash = any(tool.name == one.name or (tool.noun and tool.noun == one.noun) for one in found)
            if not clash:
                found.append(tool)
    return found


def task_for(rng: Random, tool: TaughtTool, held_out: bool) -> Task:
    if tool.family == "person":
        return person_task(rng, tool, held_out)
    if tool.family == "form":
        return form_task(rng, tool, held_out)
    if tool.family == "calculator" and rng.random() < 0.3:
        return tool_sums.expression_task(rng, tool)
    if tool.family in (*_SUMS, "calculator", "chooser"):
        return tool_sums.sum_task(rng, tool, held_out)
    return data_task(rng, tool, held_out)


def _called(task: Task, skill: str, first: bool = True) -> Turn:
    lead = "The user wants" if first else "Next, the user wants"
    thought = f"{lead} {task.wanted}, so I call {task.call.name}."
    return Turn("assistant", "", (task.call,), thought, skill)


def _answered(tasks: Sequence[Task], skill: str, content: str = "") -> Turn:
    thought = (
        "I have the result, so I can answer." if len(tasks) == 1 else "I have all results, so I can answer."
    )
    answer = content or " ".join(task.outcome.answer for task in tasks)
    needed = tuple(word for task in tasks for word in task.outcome.needed)
    return Turn("assistant", answer, (), thought, skill, (content,) if content else needed)


def one_task(task: Task) -> list[Turn]:
    return [
        Turn("user", task.question),
        _called(task, "call"),
        Turn("tool", task.outcome.result),
        _answered([task], "answer"),
    ]


def _both(rng: Random, first: Task, second: Task) -> str:
    """One question for two tasks."""
    forms = [
        f"Please {first.order} and {second.order}.",
        f"{first.question} And then {second.order}.",
        f"{first.question} {second.question}",
        f"First {first.order}, then {second.order}.",
        f"I have two questions. {first.question} {second.question}",
        f"{first.order[:1].upper()}{first.order[1:]} and {second.order}.",
    ]
    if first.want and second.want:
        forms += [
            f"What is {first.want}, and what is {second.want}?",
            f"What is {first.want} and what is {second.want}?",
            f"Tell me {first.want} and {second.want}.",
            f"What is {first.want}? And what is {second.want}?",
            f"I need {first.want} and {second.want}.",
        ]
    return rng.choice(forms)


def two_tasks(rng: Random, first: Task, second: Task) -> list[Turn]:
    """One call after the other; both in one message only where the user asks for that."""
    question = _both(rng, first, second)
    if rng.random() < 0.12:
        both = Turn(
            "assistant",
            "",
            (first.call, second.call),
            f"The user wants both at once, so I call {first.call.name} and {second.call.name}.",
            "parallel calls",
        )
        results = [Turn("tool", task.outcome.result) for task in (first, second)]
        asked = Turn("user", question + rng.choice(_PARALLEL))
        return [asked, both, *results, _answered([first, second], "answer both")]
    return [
        Turn("user", question),
        _called(first, "first call"),
        Turn("tool", first.outcome.result),
        _called(second, "second call", first=False),
        Turn("tool", second.outcome.result),
        _answered([first, second], "answer both"),
    ]


def chained(rng: Random, tools: Sequence[TaughtTool]) -> list[Turn] | None:
    """A sum whose result goes into the next one."""
    able = [tool for tool in tools if tool.family in (*_SUMS, "calculator", "chooser")]
    if not able:
        return None
    question, (one, two) = tool_sums.chained_tasks(rng, (rng.choice(able), rng.choice(able)))
    return [
        Turn("user", question),
        _called(one, "first call"),
        Turn("tool", one.outcome.result),
        _called(two, "chained call", first=False),
        Turn("tool", two.outcome.result),
        _answered([two], "answer"),
    ]


def plain(rng: Random, tools: Sequence[TaughtTool], size: Size) -> list[Turn]:
    """Small talk and what the model knows by heart: no tool is needed."""
    families = {tool.family for tool in tools}
    kinds = [smalltalk.small_talk, smalltalk.introduction, smalltalk.joke, facts.opposite, facts.animal_fact]
    kinds += [smalltalk.small_talk, facts.fact, facts.capital_city]
    if size != "short":
        kinds += [explain.why, explain.serving, stories.story]
    if "lookup" not in families:
        kinds.append(unknown.unknown)
    if not families & {*_SUMS, "calculator", "chooser"}:
        kinds.append(facts.arithmetic)
    example = rng.choice(kinds)(rng)
    thought = "I can answer this without a tool."
    return [
        Turn("user", example.turns[0]),
        Turn("assistant", example.turns[1], (), thought, "plain answer"),
    ]


def unfit(rng: Random, tools: Sequence[TaughtTool], naming: Naming, held_out: bool) -> list[Turn] | None:
    """A question for a tool that is not there."""
    families = {tool.family for tool in tools}
    if families & {"now", "time"}:
        families |= {"now", "time"}
    if families & {*_SUMS, "calculator", "chooser"}:
        families |= {"sums"}
    missing = [family for family in _FAMILIES if family not in families]
    if not missing:
        return None
    tool = rng.choice(_family_tools(rng, rng.choice(missing), naming, held_out))
    if any(tool.noun and tool.noun == one.noun for one in tools):
        return None
    task = task_for(rng, tool, held_out)
    if "sums" not in families and tool.family in _SUMS and len(str(task.call.arguments)) < 24:
        return None  # small sums are known by heart
    answer = rng.choice(SYSTEMS["unfit"])
    thought = f"The user wants {task.wanted}, but none of the tools fits."
    return [
        Turn("user", task.question),
        Turn("assistant", answer, (), thought, "no fitting tool", ("tool",)),
    ]


_OUTPUT_FIELDS = ("answer", "result", "response", "text", "output", "summary", "message")


def output_tool(rng: Random) -> TaughtTool:
    """A tool that takes the final answer, as frameworks with typed outputs have."""
    name = rng.choice(("final_result", "final_answer", "return_answer", "Answer", "Output", "respond"))
    describe = rng.choice(
        ("The final response which ends this conversation", "Give the final answer.", "The answer.")
    )
    parameter = ToolParameter(
        rng.choice(_OUTPUT_FIELDS), "string", rng.choice(("", "The answer to the question."))
    )
    return TaughtTool("output", name, describe, (parameter,))


def _through(output: TaughtTool, messages: list[Turn]) -> list[Turn]:
    """The same messages, the final answer by the output tool."""
    *before, last = messages
    call = Call(output.name, {output.parameters[0].name: last.content})
    return [*before, last._replace(content="", calls=(call,), skill="output call")]


def _filler(rng: Random) -> str:
    """Text that has nothing to do with the question, as long instructions have."""
    make = rng.choice((explain.why, explain.serving, explain.how_to, stories.story, explain.advice))
    return make(rng).turns[1]


def _rounds(rng: Random, tools: list[TaughtTool], naming: Naming, held_out: bool, size: Size) -> list[Turn]:
    """One question and all that follows from it."""
    while True:
        roll = rng.random()
        if roll < 0.12:
            return plain(rng, tools, size)
        if roll < 0.24:
            found = unfit(rng, tools, naming, held_out)
        elif roll < 0.34:
            found = chained(rng, tools)
        elif roll < 0.62 and len(tools) > 1:
            first, second = rng.sample(tools, 2) if rng.random() < 0.85 else [rng.choice(tools)] * 2
            found = two_tasks(rng, task_for(rng, first, held_out), task_for(rng, second, held_out))
        else:
            found = one_task(task_for(rng, rng.choice(tools), held_out))
        if found is not None:
            return found


def _thoughtless(rng: Random, messages: list[Turn], last_question: int) -> list[Turn]:
    """Leaves the thoughts to the answers after the last question, where they are asked for at all."""
    keep = rng.random() < _THINKING_SHARE
    sent_back = rng.random() < 0.5  # or else the client drops them, and only the last one is new
    return [
        message
        if keep and (index == len(messages) - 1 or (sent_back and index > last_question))
        else message._replace(thought="")
        for index, message in enumerate(messages)
    ]


def _extraction_chat(rng: Random, held_out: bool) -> ToolChat:
    """JSON without a tool."""
    question, found = extraction(rng, held_out)
    answer = Turn(
        "assistant", dumps(found), (), f"The text is about {found['name']}.", "json", (dumps(found),)
    )
    messages = _thoughtless(rng, [Turn("user", question), answer], 0)
    system = rng.choice(("", *SYSTEMS["extract"], *SYSTEMS["short"][:2]))
    return ToolChat("json", system, (), tuple(messages))


def _person_chat(rng: Random, naming: Naming, held_out: bool) -> ToolChat:
    tool = person_tool(rng, held_out and naming != "common")
    others = draw_tools(rng, naming, held_out, rng.choice((0, 0, 0, 1, 2)))
    messages = one_task(person_task(rng, tool, held_out))
    if rng.random() < 0.7:
        messages = messages[:2]
    messages = _thoughtless(rng, [one._replace(skill=f"person {one.skill}") for one in messages], 0)
    tools = [tool, *others]
    rng.shuffle(tools)
    system = rng.choice(SYSTEMS["extract"]) if rng.random() < 0.5 else system_prompt(rng, held_out)
    return ToolChat("person", system, written(rng, tools, short=False), tuple(messages))


def _num_families(rng: Random, size: Size) -> int:
    if size == "long":
        return rng.randint(3, 24)
    return rng.choice((1, 1, 2) if size == "short" else (1, 1, 2, 2, 2, 3, 3, 4, 5))


def _chat(rng: Random, naming: Naming, held_out: bool, size: Size) -> ToolChat:
    tools: list[TaughtTool] = []
    while not tools:
        tools = draw_tools(rng, naming, held_out, _num_families(rng, size))
    messages: list[Turn] = []
    last_question = 0
    output = output_tool(rng) if rng.random() < 0.07 else None
    # The tools are read once and used for several questions, which saves tokens.
    for number in range(1 if output else rng.choice((1, 2, 3) if size == "short" else (1, 1, 2, 3, 4))):
        last_question = len(messages)
        messages += _rounds(rng, tools, naming, held_out, size)
        if number == 0 and rng.random() < 0.06:
            task = follow_up(rng, tools[0], held_out)
            if task and messages[1].calls and messages[1].calls[0].name == tools[0].name:
                last_question = len(messages)
                messages += one_task(task)
    if output:
        messages, tools = _through(output, messages), [*tools, output]
    messages = _thoughtless(rng, messages, last_question)
    rng.shuffle(tools)
    system = (
        ""
        if size == "short"
        else system_prompt(rng, held_out, rng.randint(5, 80) if size == "long" else None)
    )
    if size == "long":
        system += "".join(f"\n\n{_filler(rng)}" for _ in range(rng.choice((0, 1, 2, 4, 7))))
    kind = messages[last_question + 1].skill
    return ToolChat(kind, system, written(rng, tools, size == "short"), tuple(messages))


def drawn_naming(rng: Random) -> Naming:
    return rng.choices(tuple(_NAMINGS), tuple(_NAMINGS.values()))[0]


def tool_chat(seed: int, index: int, held_out: bool = False, naming: Naming | None = None) -> ToolChat:
    """The chat of this index, from the training side or from the held-out one."""
    rng = Random(f"{seed}/{'held out tools' if held_out else 'tools'}/{index}")
    naming = naming or drawn_naming(rng)
    roll = rng.random()
    if roll < 0.02:
        return _extraction_chat(rng, held_out)
    if roll < 0.1:
        return _person_chat(rng, naming, held_out)
    return _chat(rng, naming, held_out, "long" if rng.random() < _LONG_SHARE else "usual")


def easy_chat(seed: int, index: int) -> ToolChat:
    """What the training begins with: copying, and chats with one or two tools in few words."""
    rng = Random(f"{seed}/easy/{index}")
    if rng.random() < _COPYING_SHARE:
        return ToolChat("copy", "", (), tuple(exercise(rng)))
    return _chat(rng, drawn_naming(rng), held_out=False, size="short")


def main() -> None:
    parser = argparse.ArgumentParser(description="Print examples of chats with tools.")
    parser.add_argument("--examples", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--held-out", action="store_true", help="chats of the evaluation")
    parser.add_argument("--easy", action="store_true", help="chats that the training begins with")
    arguments = parser.parse_args()
    for index in range(arguments.examples):
        if arguments.easy:
            chat = easy_chat(arguments.seed, index)
        else:
            chat = tool_chat(arguments.seed, index, arguments.held_out)
        print(f"--- {chat.kind}\n{chat.text}")


if __name__ == "__main__":
    main()
