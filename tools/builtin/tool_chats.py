"""Whole chats with tools: a system prompt, the tools, and rounds of questions, with and without thoughts.

    python -m tools.builtin.tool_chats --examples 5 --seed 1

prints examples. A chat is decided by (seed, index) alone. Held-out chats use cities, names of tools and parameters,
and questions that are never trained on.
"""

import argparse
from dataclasses import dataclass
from random import Random
from typing import Any

from tools.builtin import explain, stories
from tools.builtin.chat_format import Call, Segment, Turn, dumps, segments
from tools.builtin.copying import exercise
from tools.builtin.systems import SYSTEMS, system_prompt
from tools.builtin.tool_draws import draw_tools
from tools.builtin.tool_frameworks import written
from tools.builtin.tool_names import Naming
from tools.builtin.tool_people import extraction, person_task, person_tool
from tools.builtin.tool_rounds import Size, one_round, one_task
from tools.builtin.tool_tasks import follow_up
from tools.builtin.toolbox import TaughtTool, ToolParameter

# Of the chats that are trained on: what every client uses has to be certain, all else has to be read.
_NAMINGS: dict[Naming, float] = {"common": 0.35, "varied": 0.3, "made up": 0.35}
_THINKING_SHARE = 0.3
_LONG_SHARE = 0.08
_COPYING_SHARE = 0.5


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
        messages += one_round(rng, tools, naming, held_out, size)
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
