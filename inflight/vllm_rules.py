"""Compatibility rules: how vLLM's flags, options of `LLM` and environment variables are treated here.

    CompatRule("scheduling_policy NAME", {"fcfs": "--policy continuous", "priority": "--policy priority"}, "why not")

An option is listed under its name in Python, from which the name of its flag follows. `mapping` says, value by value,
which arguments replace it; empty arguments mean that the value is accepted and has no effect. "*" stands for every
value without its own entry. Unset values (none, false, 0, empty) have no effect unless `mapping` says otherwise.
All other values are rejected with the reason. Values are compared in lower case, and switches have the values true and
false.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from inflight.errors import ConfigError, shown

ANY = "*"
IGNORED = {ANY: ""}  # every value is accepted and has no effect
MAX_SHOWN = 24  # errors repeat values of at most this many characters: longer ones are JSON, or secrets
_NONE = ("none", "null")
_OFF = (*_NONE, "false", "0", "0.0", "", "{}", "[]")
_OPTION = re.compile(r"\$(\w+)")  # an option's name in a reason
_SIZE = re.compile(r"(\d+|\d+\.\d+(?=[kmgt]))([kKmMgGtT])(i?B)?")
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}


@dataclass(frozen=True)
class CompatRule:
    """How some names that are treated alike are handled."""

    # Comma-separated names. A name followed by a word takes a value, with dots several; other names are switches.
    usage: str
    mapping: Mapping[str, str] = field(default_factory=dict)
    # Why other values are rejected, or why no value has an effect, and what to do instead. $name is an option.
    reason: str = ""
    note: str = ""  # logged when the flag is accepted, since it may not do what the user expects
    off_matters: bool = False  # treat false, 0 and empty values like any other value

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(text.partition(" ")[0] for text in self.usage.split(", "))

    @cached_property
    def takes_value(self) -> dict[str, bool]:
        """Whether each flag takes a value."""
        return {flag_of(text.partition(" ")[0]): " " in text for text in self.usage.split(", ")}

    def takes_many(self, flag: str) -> bool:
        """Return whether a flag takes several values in a row: `--sizes N...`."""
        return any(
            flag_of(text.partition(" ")[0]) == flag and text.endswith("...")
            for text in self.usage.split(", ")
        )

    def explanation(self, *, flags: bool) -> str:
        """Return the reason, with options named as on a command line or as in Python."""
        return _OPTION.sub(lambda match: flag_of(match[1]) if flags else match[1], self.reason or self.note)

    def replacement(self, value: str) -> str | None:
        """Return the arguments that replace this one, with {} for the value, or None if it is not supported."""
        key = value.lower()
        arguments = self.mapping.get(key, self.mapping.get(ANY))
        is_unset = key in (_NONE if self.off_matters else _OFF)
        return "" if arguments is None and is_unset else arguments

    def arguments(self, flag: str, value: str) -> list[str]:
        """Return the replacement as words of a command line.

        Raises ConfigError with the reason if the value is not supported.
        """
        replacement = self.replacement(value)
        if replacement is None:
            is_plain = not self.takes_value.get(flag, True) and value.lower() == "true"
            repeated = "" if is_plain or len(value) > MAX_SHOWN else f" {value}"
            raise ConfigError(f"{flag}{repeated}: {self.explanation(flags=True)}")
        return [
            word.replace("{size}", plain_size(value))
            .replace("{gib}", plain_size(f"{value}G"))
            .replace("{}", value)
            for word in replacement.split(" ")
            if word
        ]


class CompatRules:
    """A table of rules, looked up by name or by flag."""

    def __init__(self, rows: Iterable[CompatRule] = ()) -> None:
        self.rows = tuple(rows)
        self._by_name = {name: row for row in self.rows for name in (*row.names, *row.takes_value)}

    def find(self, name: str) -> CompatRule | None:
        return self._by_name.get(name)


def join_reasons(reasons: list[str]) -> str:
    """Return one message for all options that cannot be used."""
    if len(reasons) == 1:
        return reasons[0]
    return "\n  ".join([f"{len(reasons)} options cannot be used:", *reasons])


def flag_of(name: str) -> str:
    """Return an option's flag. Names that already are flags or variables are returned unchanged."""
    return f"--{name.replace('_', '-')}" if name[0].islower() else name


def plain_size(text: str) -> str:
    """Return 32768 for "32K" and "32KiB", 32000 for "32k" and "32KB", and any other text unchanged."""
    match = _SIZE.fullmatch(text)
    if match is None:
        return text
    number, unit, end = match.groups()
    is_binary = end == "iB" if end else unit.isupper()
    return str(int(float(number) * (1024 if is_binary else 1000) ** _POWERS[unit.lower()]))


def as_text(value: Any) -> str:
    """Return a value from a file or from Python as it would be typed on a command line."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        return shown(value)
