"""One question and all that follows from it: a call, two, a chain of them, or none at all."""

from collections.abc import Sequence
from random import Random
from typing import Literal

from tools.builtin import explain, facts, smalltalk, stories, tool_sums, unknown
from tools.builtin.chat_format import Turn
from tools.builtin.systems import SYSTEMS
from tools.builtin.tool_draws import FAMILIES, SUMS, family_tools, task_for
from tools.builtin.tool_names import Naming
from tools.builtin.tool_tasks import Task
from tools.builtin.toolbox import TaughtTool

Size = Literal["short", "usual", "long"]
_PARALLEL = (" Do both at once.", " Call both tools at the same time.", " Do it in parallel.")


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
    able = [tool for tool in tools if tool.family in (*SUMS, "calculator", "chooser")]
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
    if not families & {*SUMS, "calculator", "chooser"}:
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
    if families & {*SUMS, "calculator", "chooser"}:
        families |= {"sums"}
    missing = [family for family in FAMILIES if family not in families]
    if not missing:
        return None
    tool = rng.choice(family_tools(rng, rng.choice(missing), naming, held_out))
    if any(tool.noun and tool.noun == one.noun for one in tools):
        return None
    task = task_for(rng, tool, held_out)
    if "sums" not in families and tool.family in SUMS and len(str(task.call.arguments)) < 24:
        return None  # small sums are known by heart
    answer = rng.choice(SYSTEMS["unfit"])
    thought = f"The user wants {task.wanted}, but none of the tools fits."
    return [
        Turn("user", task.question),
        Turn("assistant", answer, (), thought, "no fitting tool", ("tool",)),
    ]


def one_round(rng: Random, tools: list[TaughtTool], naming: Naming, held_out: bool, size: Size) -> list[Turn]:
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
