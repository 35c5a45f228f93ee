"""Writes the rows of docs/from-vllm.md that repeat data: what is accepted without effect, or absent, and why.

python -m tools.from_vllm_page

The text around the tables, and the rows of names that work, are written by hand in the page itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from inflight.cli.vllm_environment import VARIABLE_RULES
from inflight.cli.vllm_flags import BENCH_RULES, COMMANDS, SERVE_RULES
from inflight.server.app import MISSING_ROUTES
from inflight.server.openai.schemas import ChatBody, CompletionBody
from inflight.vllm_names import (
    LLM_METHODS,
    LLM_RULES,
    METHOD_RULES,
    MISSING_MODULES,
    MISSING_NAMES,
    PROMPT_RULES,
    SAMPLING_RULES,
)
from inflight.vllm_rules import IGNORED, CompatRule, CompatRules

PAGE = Path(__file__).parent.parent / "docs" / "from-vllm.md"
ACCEPTED, ABSENT = "accepted", "absent"


def page(text: str) -> str:
    """Return the page with the rows of each table as the data has them."""
    for title, rows in TABLES.items():
        head, heading, rest = text.partition(f"\n## {title}\n")
        assert heading, title
        section, *others = re.split(r"(?=\n## )", rest, maxsplit=1)
        text = "".join([head, heading, _with_rows(section, rows()), *others])
    return text


def _with_rows(section: str, rows: list[str]) -> str:
    lines = section.splitlines()
    outcomes = {row.split(" | ")[1] for row in rows}
    kept = [line for line in lines if not (line.startswith("| `") and line.split(" | ")[1] in outcomes)]
    end = max(index for index, line in enumerate(kept) if line.startswith("| ")) + 1
    return "\n".join([*kept[:end], *rows, *kept[end:]]) + "\n"


def _row(names: Iterable[str], outcome: str, here: str) -> str:
    return f"| {', '.join(f'`{name}`' for name in names)} | {outcome} | {here} |"


def _of_rules(rules: CompatRules, flags: bool) -> list[str]:
    """Return the rows of rules that replace nothing, those without any effect first."""
    rows: list[tuple[str, str]] = []
    for rule in rules.rows:
        if any(rule.mapping.values()):
            continue  # another name, or other values
        names = tuple(rule.takes_value) if flags else [name for name in rule.names if name[0] != "-"]
        if _has_no_effect(rule, flags):
            rows.append((ACCEPTED, _row(names, ACCEPTED, rule.explanation(flags=flags))))
        else:
            values = ", ".join(f"`{value}`" for value in rule.mapping)
            accepted = f" (accepted: {values})" if values else ""
            rows.append((ABSENT, _row(names, ABSENT, rule.explanation(flags=flags) + accepted)))
    return [row for outcome in (ACCEPTED, ABSENT) for kind, row in rows if kind == outcome]


def _has_no_effect(rule: CompatRule, flags: bool) -> bool:
    """Return whether every value is accepted: on a command line, a switch has but one."""
    only_true = flags and not any(rule.takes_value.values()) and rule.mapping == {"true": ""}
    return rule.mapping == IGNORED or only_true


def _of_reasons(reasons: Mapping[str, str], prefix: str = "") -> list[str]:
    """Return a row for each reason, with all names that have it."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(prefix + name)
    return [_row(group, ABSENT, reason) for reason, group in names.items()]


def _of_fields() -> list[str]:
    chat, completions = ChatBody.unsupported(), CompletionBody.unsupported()
    either = {
        name: reason
        for name, reason in (completions | chat).items()
        if name not in ("echo", "add_special_tokens")
    }
    return _of_reasons(either)


TABLES: dict[str, Callable[[], list[str]]] = {
    "Commands": lambda: _of_reasons(COMMANDS),
    "Serve flags": lambda: _of_rules(SERVE_RULES, flags=True),
    "Bench flags": lambda: _of_rules(BENCH_RULES, flags=True),
    "Environment variables": lambda: _of_rules(VARIABLE_RULES, flags=True),
    "Imports": lambda: _of_reasons(MISSING_NAMES),
    "Modules": lambda: _of_reasons(MISSING_MODULES, "vllm."),
    "LLM options": lambda: _of_rules(LLM_RULES, flags=False),
    "LLM methods": lambda: _of_reasons(LLM_METHODS),
    "Arguments of methods": lambda: _of_rules(METHOD_RULES, flags=False),
    "Prompts": lambda: _of_rules(PROMPT_RULES, flags=False),
    "SamplingParams": lambda: _of_rules(SAMPLING_RULES, flags=False),
    "Request fields": _of_fields,
    "Routes": lambda: _of_reasons(MISSING_ROUTES),
}


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
