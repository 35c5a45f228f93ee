"""vLLM's commands, flags and variables: docs/from-vllm.md and the code agree, and every line of the page works."""

from __future__ import annotations

from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from inflight.cli.main import app
from inflight.cli.option_sources import gather, unused_variables
from inflight.cli.vllm_environment import VARIABLE_RULES
from inflight.cli.vllm_flags import BENCH_RULES, COMMANDS, SERVE_RULES
from inflight.errors import ConfigError
from inflight.server.config import SERVE_OPTIONS
from inflight.vllm_rules import ANY, CompatRule, CompatRules
from tests.cli.vllm.page import ABSENT, ACCEPTED, OTHER_NAME, PAGE, SAME, Line, section

ROOT: Any = typer.main.get_command(app)
SERVE, BENCH = ROOT.commands["serve"], ROOT.commands["bench"].commands["serve"]
FLAG_TABLES = {"Serve flags": (SERVE, SERVE_RULES), "Bench flags": (BENCH, BENCH_RULES)}
VARIABLES = "Environment variables"
UNSET = ("None", "null", "false", "0", "0.0", "", "{}", "[]")


def parsed(command: Any, *words: str) -> dict[str, Any]:
    """Return the options that these words set."""
    context = command.make_context(f"inflight {command.name}", list(words))
    default = {param.name: param.get_default(context) for param in command.params}
    return {name: value for name, value in context.params.items() if value not in (default[name], [], ())}


def rejection(command: Any, *words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parsed(command, *words)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def value_of(rule: CompatRule, harmless: bool) -> str:
    """Return a value that has no effect here, or one that does."""
    values = [value for value, args in rule.mapping.items() if (not args) is harmless]
    value = values[-1] if values else "none" if harmless else "something"
    return "7" if value == ANY else value


def typed(rule: CompatRule, name: str, value: str) -> list[str]:
    if rule.takes_value[name]:
        return [name, value]
    return [name] if value == "true" else [f"--no-{name[2:]}"]


def test_commands_work_or_name_a_replacement() -> None:
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


def try_same(command: Any, rules: CompatRules, name: str) -> None:
    """Check that the flag sets the option of the same name."""
    known = {opt: param for param in command.params for opt in param.opts}
    if name not in known:  # the model, which is positional
        assert parsed(command, name, "7") == {name[2:]: "7"}
        return
    param = known[name]
    rule = rules.find(name)
    words = [name] if param.is_flag else [name, "7" if rule is None else value_of(rule, harmless=False)]
    if param.default is True:
        words = [param.secondary_opts[0]]
    assert list(parsed(command, *words)) == [param.name]


def try_other_name(command: Any, rules: CompatRules, name: str, line: Line) -> None:
    rule = rules.find(name)
    assert rule is not None
    here = line.code[0]
    option = here.split()[0].removeprefix("--no-").removeprefix("--").replace("-", "_")
    option = {"json": "as_json"}.get(option, option)
    assert list(parsed(command, *typed(rule, name, value_of(rule, harmless=False)))) == [option]
    if not rule.takes_value[name]:
        assert parsed(command, name) == parsed(command, *here.split())


def try_accepted(command: Any, rules: CompatRules, name: str) -> None:
    rule = rules.find(name)
    assert rule is not None
    value = value_of(rule, harmless=True) if rule.takes_value[name] else "true"
    assert parsed(command, *typed(rule, name, value)) == {}


def try_absent(command: Any, rules: CompatRules, name: str, line: Line) -> None:
    rule = rules.find(name)
    assert rule is not None
    words = [name, "something"] if rule.takes_value[name] else [name]
    assert rejection(command, *words) == f"{' '.join(words)}: {rule.explanation(flags=True)}"
    if name != line.names[0]:
        return  # the other names of the line have the same rule
    assert not any(rule.mapping.values())
    for value in (*UNSET, *rule.mapping):
        if rule.takes_value[name] or value == "false":
            assert parsed(command, *typed(rule, name, value)) == {}


@pytest.mark.parametrize("title", FLAG_TABLES)
def test_flags_do_what_the_page_says(title: str) -> None:
    command, rules = FLAG_TABLES[title]
    for line in section(title):
        for name in line.names:
            if line.outcome == SAME:
                try_same(command, rules, name)
            elif line.outcome == OTHER_NAME:
                try_other_name(command, rules, name, line)
            elif line.outcome == ACCEPTED:
                try_accepted(command, rules, name)
            else:
                try_absent(command, rules, name, line)


@pytest.mark.parametrize("title", [*FLAG_TABLES, VARIABLES])
def test_page_has_a_line_for_every_rule(title: str) -> None:
    rules = FLAG_TABLES[title][1] if title in FLAG_TABLES else VARIABLE_RULES
    on_page = {line.names: line for line in section(title)}
    assert sum(map(len, on_page)) > (150 if title == "Serve flags" else 20)
    for rule in rules.rows:
        assert tuple(rule.takes_value) in on_page


def test_replacements_are_existing_options() -> None:
    for command, rules in FLAG_TABLES.values():
        known = {opt for param in command.params for opt in (*param.opts, *param.secondary_opts)}
        replacements = {args.split()[0] for rule in rules.rows for args in rule.mapping.values() if args}
        assert replacements <= known


def test_variables_do_what_the_page_says() -> None:
    for line in section(VARIABLES):
        for name in line.names:
            rule = VARIABLE_RULES.find(name)
            assert rule is not None
            if line.outcome == ABSENT:
                assert unused_variables(SERVE_OPTIONS, {name: "7"}) == [
                    f"{name} is set, but has no effect: {rule.reason}"
                ]
                value = value_of(rule, harmless=True)
            else:
                value = value_of(rule, harmless=line.outcome == ACCEPTED)
            if value != "something":
                assert unused_variables(SERVE_OPTIONS, {name: value}) == []
                options = gather(SERVE_OPTIONS, {}, {name: value}, compat_rules=SERVE_RULES)
                option = line.code[0].removeprefix("--").replace("-", "_") if line.outcome == SAME else ""
                assert list(options) == ([option] if option else [])


# Features that docs/comparison.md lists as missing, with an argument that must be rejected as long as they are.
MISSING = {
    "LoRA": "--enable-lora",
    "Speculative decoding": "--speculative-model x",
    "Images, audio and video": "--allowed-local-media-path x",
    "One engine on several machines": "--nnodes 2",
    "KV offloading": "--kv-offloading-size 4",
    "Remote code": "--logits-processors x",
}


@pytest.mark.parametrize("feature", MISSING)
def test_features_listed_as_missing_are_rejected(feature: str) -> None:
    page = (PAGE.parent / "comparison.md").read_text(encoding="utf-8")
    listed = page.partition("## What it does not do (yet)\n")[2]
    assert f"**{feature}**" in listed
    assert rejection(SERVE, *MISSING[feature].split())
