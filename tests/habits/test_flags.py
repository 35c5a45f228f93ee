"""Flags and variables of vLLM: every line of docs/from-vllm.md is tried, and no line of the code is missing there."""

from __future__ import annotations

import re
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from inflight.cli import app
from inflight.errors import ConfigError
from inflight.habits.bench_flags import BENCH_HABITS
from inflight.habits.commands import COMMANDS
from inflight.habits.habit import ANY, Habit, Habits
from inflight.habits.serve_flags import SERVE_HABITS
from inflight.habits.variables import VARIABLE_HABITS
from inflight.option_sources import gather, unread
from inflight.server.config import SERVE_OPTIONS
from tests.habits.page import ABSENT, ACCEPTED, OTHER_NAME, PAGE, SAME, Line, section

ROOT: Any = typer.main.get_command(app)
SERVE, BENCH = ROOT.commands["serve"], ROOT.commands["bench"].commands["serve"]
FLAG_TABLES = {"Serve flags": (SERVE, SERVE_HABITS), "Bench flags": (BENCH, BENCH_HABITS)}
VARIABLES = "Environment variables"
UNSET = ("None", "null", "false", "0", "0.0", "", "{}", "[]")


def parsed(command: Any, *words: str) -> dict[str, Any]:
    """The options that these words set."""
    context = command.make_context(f"inflight {command.name}", list(words))
    default = {param.name: param.get_default(context) for param in command.params}
    return {name: value for name, value in context.params.items() if value not in (default[name], [], ())}


def refusal(command: Any, *words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parsed(command, *words)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def value_of(habit: Habit, harmless: bool) -> str:
    """A value that changes nothing here, or one that does."""
    alike = [value for value, args in habit.becomes.items() if (not args) is harmless]
    value = alike[-1] if alike else "none" if harmless else "something"
    return "7" if value == ANY else value


def typed(habit: Habit, name: str, value: str) -> list[str]:
    if habit.takes_value[name]:
        return [name, value]
    return [name] if value == "true" else [f"--no-{name[2:]}"]


def test_commands() -> None:
    lines = section("Commands")
    for line in lines:
        for name in line.names:
            result = CliRunner().invoke(app, [*name.split(), *([] if line.outcome == ABSENT else ["--help"])])
            if line.outcome == ABSENT:
                assert str(result.exception) == f"there is no command {name}: {line.here}"
            else:
                assert result.exit_code == 0
    assert {name: line.here for line in lines if line.outcome == ABSENT for name in line.names} == COMMANDS
    assert CliRunner().invoke(app, ["-v"]).stdout.startswith("inflight ")


def try_same(command: Any, habits: Habits, name: str) -> None:
    """By its own name it sets its own option, with a value that it takes."""
    known = {opt: param for param in command.params for opt in param.opts}
    if name not in known:  # the model, which has a place
        assert parsed(command, name, "7") == {name[2:]: "7"}
        return
    param = known[name]
    habit = habits.find(name)
    words = [name] if param.is_flag else [name, "7" if habit is None else value_of(habit, harmless=False)]
    if param.default is True:
        words = [param.secondary_opts[0]]
    assert list(parsed(command, *words)) == [param.name]


def try_other_name(command: Any, habits: Habits, name: str, line: Line) -> None:
    habit = habits.find(name)
    assert habit is not None
    here = line.code[0]
    option = here.split()[0].removeprefix("--no-").removeprefix("--").replace("-", "_")
    option = {"json": "as_json"}.get(option, option)
    assert list(parsed(command, *typed(habit, name, value_of(habit, harmless=False)))) == [option]
    if not habit.takes_value[name]:
        assert parsed(command, name) == parsed(command, *here.split())


def try_accepted(command: Any, habits: Habits, name: str, line: Line) -> None:
    habit = habits.find(name)
    assert habit is not None
    assert line.here == habit.why(flags=True)
    value = value_of(habit, harmless=True) if habit.takes_value[name] else "true"
    assert parsed(command, *typed(habit, name, value)) == {}


def try_absent(command: Any, habits: Habits, name: str, line: Line) -> None:
    habit = habits.find(name)
    assert habit is not None
    words = [name, "something"] if habit.takes_value[name] else [name]
    assert refusal(command, *words) == f"{' '.join(words)}: {habit.why(flags=True)}"
    check_words(line, habit)
    if name != line.names[0]:
        return  # those beside it are the same in the code
    assert not any(habit.becomes.values())
    for value in (*UNSET, *habit.becomes):
        if habit.takes_value[name] or value == "false":
            assert parsed(command, *typed(habit, name, value)) == {}


def check_words(line: Line, habit: Habit) -> None:
    """The page has the reason in the words of the code, and names all values that are taken."""
    reason, _, accepted = line.here.partition(" (accepted: ")
    assert reason == habit.why(flags=True)
    assert set(re.findall(r"`([^`]+)`", accepted)) == habit.becomes.keys()


@pytest.mark.parametrize("title", FLAG_TABLES)
def test_every_flag_of_the_page_does_what_the_page_says(title: str) -> None:
    command, habits = FLAG_TABLES[title]
    for line in section(title):
        for name in line.names:
            if line.outcome == SAME:
                try_same(command, habits, name)
            elif line.outcome == OTHER_NAME:
                try_other_name(command, habits, name, line)
            elif line.outcome == ACCEPTED:
                try_accepted(command, habits, name, line)
            else:
                try_absent(command, habits, name, line)


@pytest.mark.parametrize("title", [*FLAG_TABLES, VARIABLES])
def test_every_line_of_the_code_is_on_the_page(title: str) -> None:
    habits = FLAG_TABLES[title][1] if title in FLAG_TABLES else VARIABLE_HABITS
    on_page = {line.names: line for line in section(title)}
    assert sum(map(len, on_page)) > (150 if title == "Serve flags" else 20)
    for habit in habits.rows:
        assert tuple(habit.takes_value) in on_page


def test_every_option_that_a_habit_leads_to_exists() -> None:
    for command, habits in FLAG_TABLES.values():
        known = {opt for param in command.params for opt in (*param.opts, *param.secondary_opts)}
        leads = {args.split()[0] for habit in habits.rows for args in habit.becomes.values() if args}
        assert leads <= known


def test_every_variable_of_the_page_does_what_the_page_says() -> None:
    for line in section(VARIABLES):
        for name in line.names:
            habit = VARIABLE_HABITS.find(name)
            assert habit is not None
            if line.outcome == ABSENT:
                assert unread(SERVE_OPTIONS, {name: "7"}) == [
                    f"{name} is set: nothing here reads it; {habit.reason}"
                ]
                check_words(line, habit)
                value = value_of(habit, harmless=True)
            else:
                value = value_of(habit, harmless=line.outcome == ACCEPTED)
            if value != "something":
                assert unread(SERVE_OPTIONS, {name: value}) == []
                given = gather(SERVE_OPTIONS, {}, {name: value}, habits=SERVE_HABITS)
                option = line.code[0].removeprefix("--").replace("-", "_") if line.outcome == SAME else ""
                assert list(given) == ([option] if option else [])


# Of the README's list of what is missing: what is refused as long as it is.
MISSING = {
    "Quantization": "--quantization fp8",
    "LoRA": "--enable-lora",
    "Speculative decoding": "--speculative-model x",
    "Images, audio and video": "--allowed-local-media-path x",
    "Mixture of experts": "--enable-expert-parallel",
    "One engine on several machines": "--nnodes 2",
    "KV memory elsewhere": "--kv-offloading-size 4",
    "Code of checkpoints": "--logits-processors x",
}


@pytest.mark.parametrize("what", MISSING)
def test_what_the_readme_says_is_missing_is_refused(what: str) -> None:
    readme = (PAGE.parent.parent / "README.md").read_text(encoding="utf-8")
    listed = readme.partition("## What it does not do (yet)\n")[2].partition("\n## ")[0]
    assert f"**{what}**" in listed
    assert refusal(SERVE, *MISSING[what].split())
