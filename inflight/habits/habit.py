"""One habit: a flag or a variable of vLLM's that is none here, or not with every value.

    Habit("--scheduling-policy NAME", {"fcfs": "--policy continuous", "priority": "--policy priority"}, "why not")

`becomes` says, value by value, what is typed here instead; nothing where the value changes nothing. All other values
are refused with the reason. Values are compared in small letters, a switch has the values true and false, and "*"
stands for every value that has no line of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from inflight.errors import ConfigError

ANY = "*"
MAX_SHOWN = 24  # characters of a value that errors repeat: longer ones are JSON, or secrets
_SIZE = re.compile(r"(\d+|\d+\.\d+(?=[kmgt]))([kKmMgGtT])")
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}


@dataclass(frozen=True)
class Habit:
    """What becomes of some flags that are treated alike."""

    flags: str  # with commas, as a usage line has them: one with a word behind it takes a value, others are switches
    becomes: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""  # why other values are refused, and what to do instead
    note: str = ""  # told where it is taken, though it may not do what was hoped for

    def takes_many(self, flag: str) -> bool:
        """Whether it takes several values one after the other: `--sizes N...`."""
        return any(text.startswith(f"{flag} ") and text.endswith("...") for text in self.flags.split(", "))

    @cached_property
    def takes_value(self) -> dict[str, bool]:
        """By flag."""
        return {
            flag: bool(value) for flag, _, value in (text.partition(" ") for text in self.flags.split(", "))
        }

    def arguments(self, flag: str, value: str) -> list[str]:
        """What is typed here instead. Raises ConfigError with the reason for a value that cannot be."""
        known = value.lower()
        template = self.becomes.get(known, self.becomes.get(ANY))
        if template is None:
            is_plain = not self.takes_value.get(flag, True) and known == "true"
            shown = "" if is_plain or len(value) > MAX_SHOWN else f" {value}"
            raise ConfigError(f"{flag}{shown}: {self.reason}")
        return [
            word.replace("{size}", plain_size(value)).replace("{}", value)
            for word in template.split(" ")
            if word
        ]


class Habits:
    """Several, found by flag."""

    def __init__(self, rows: Iterable[Habit] = ()) -> None:
        self.rows = tuple(rows)
        self._by_flag = {flag: row for row in self.rows for flag in row.takes_value}

    def find(self, flag: str) -> Habit | None:
        return self._by_flag.get(flag)


def plain_size(text: str) -> str:
    """32768 of "32K", 32000 of "32k"; what is no such size as it is."""
    found = _SIZE.fullmatch(text)
    if found is None:
        return text
    number, unit = found.groups()
    return str(int(float(number) * (1000 if unit.islower() else 1024) ** _POWERS[unit.lower()]))


def as_text(value: Any) -> str:
    """A value out of a file as one would type it."""
    return value if isinstance(value, str) else json.dumps(value)
