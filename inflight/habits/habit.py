"""One habit: a name of vLLM's that is none here, or not with every value: of a flag, an option of `LLM`, a variable.

    Habit("scheduling_policy NAME", {"fcfs": "--policy continuous", "priority": "--policy priority"}, "why not")

An option has its name in Python, from which that of its flag follows. `becomes` says, value by value, what is given
here instead; nothing where the value changes nothing. "*" stands for every value that has no line of its own. What is
not set (none, false, 0, empty) changes nothing unless `becomes` says otherwise. All other values are refused with the
reason. Values are compared in small letters, and a switch has the values true and false.
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
TAKEN = {ANY: ""}  # whatever it says, nothing changes
MAX_SHOWN = 24  # characters of a value that errors repeat: longer ones are JSON, or secrets
_NONE = ("none", "null")
_OFF = (*_NONE, "false", "0", "0.0", "", "{}", "[]")
_OPTION = re.compile(r"\$(\w+)")  # in a reason
_SIZE = re.compile(r"(\d+|\d+\.\d+(?=[kmgt]))([kKmMgGtT])(i?B)?")
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}


@dataclass(frozen=True)
class Habit:
    """What becomes of some names that are treated alike."""

    usage: (
        str  # with commas: a name with a word behind it takes a value, with dots several, others are switches
    )
    becomes: Mapping[str, str] = field(default_factory=dict)
    reason: str = (
        ""  # why other values are refused, or why none matters, and what to do instead; $name is an option
    )
    note: str = ""  # told where it is taken as a flag, though it may not do what was hoped for
    off_matters: bool = False  # false, 0 and what is empty are values like others

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(text.partition(" ")[0] for text in self.usage.split(", "))

    @cached_property
    def takes_value(self) -> dict[str, bool]:
        """By flag."""
        return {flag_of(text.partition(" ")[0]): " " in text for text in self.usage.split(", ")}

    def takes_many(self, flag: str) -> bool:
        """Whether it takes several values one after the other: `--sizes N...`."""
        return any(
            flag_of(text.partition(" ")[0]) == flag and text.endswith("...")
            for text in self.usage.split(", ")
        )

    def why(self, *, flags: bool) -> str:
        """The reason, with options named as they are on a command line or in Python."""
        return _OPTION.sub(lambda found: flag_of(found[1]) if flags else found[1], self.reason or self.note)

    def instead(self, value: str) -> str | None:
        """What is typed here instead, with {} for the value; None where that cannot be had."""
        known = value.lower()
        found = self.becomes.get(known, self.becomes.get(ANY))
        is_unset = known in (_NONE if self.off_matters else _OFF)
        return "" if found is None and is_unset else found

    def arguments(self, flag: str, value: str) -> list[str]:
        """The same as words of a command line. Raises ConfigError with the reason for a value that cannot be."""
        found = self.instead(value)
        if found is None:
            is_plain = not self.takes_value.get(flag, True) and value.lower() == "true"
            told = "" if is_plain or len(value) > MAX_SHOWN else f" {value}"
            raise ConfigError(f"{flag}{told}: {self.why(flags=True)}")
        return [
            word.replace("{size}", plain_size(value))
            .replace("{gib}", plain_size(f"{value}G"))
            .replace("{}", value)
            for word in found.split(" ")
            if word
        ]


class Habits:
    """Several, found by name or by flag."""

    def __init__(self, rows: Iterable[Habit] = ()) -> None:
        self.rows = tuple(rows)
        self._by_name = {name: row for row in self.rows for name in (*row.names, *row.takes_value)}

    def find(self, name: str) -> Habit | None:
        return self._by_name.get(name)


def flag_of(name: str) -> str:
    """Of an option. Flags and variables are written as they are."""
    return f"--{name.replace('_', '-')}" if name[0].islower() else name


def plain_size(text: str) -> str:
    """32768 of "32K" and "32KiB", 32000 of "32k" and "32KB"; what is no such size as it is."""
    found = _SIZE.fullmatch(text)
    if found is None:
        return text
    number, unit, end = found.groups()
    is_binary = end == "iB" if end else unit.isupper()
    return str(int(float(number) * (1024 if is_binary else 1000) ** _POWERS[unit.lower()]))


def as_text(value: Any) -> str:
    """A value out of a file or of Python as one would type it."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        return shown(value)
