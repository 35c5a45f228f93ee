"""A command line as people type it, made into the one that the command has: habits, lists, underscores."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from inflight.errors import ConfigError
from inflight.habits.habit import Habit, Habits

SIMILAR = 0.8  # what is less like a flag than this is no misspelling of it
MODEL = "--model"  # the model may be given by its place, too
UNSET = "None"  # as a value: as if the flag were not there
_BOOLEANS = ("true", "false")


@dataclass(frozen=True, slots=True)
class KnownFlag:
    """A flag that a command has."""

    takes_value: bool
    takes_many: bool = False  # may be repeated, and so takes several values


class ArgumentReader:
    """Reads the words of a command line from left to right."""

    def __init__(self, known: dict[str, KnownFlag], habits: Habits, command: str, has_model: bool) -> None:
        self._known = known
        self._habits = habits
        self._command = command
        self._has_model = has_model  # by its place
        self._words: list[str] = []  # that are left, the next one last
        self._is_model_known = False
        self.notes: list[str] = []  # to tell whoever typed this

    def read(self, words: Iterable[str]) -> list[str]:
        """The same in the command's own flags. Raises ConfigError for a flag that is not known, or cannot be had."""
        self._words = list(words)[::-1]
        found: list[str] = []
        # A bare word is the model, unless that is known: then it belongs to the list before it.
        self._is_model_known = not self._has_model or any(
            word.partition("=")[0] == MODEL for word in self._words
        )
        while self._words:
            word = self._words.pop()
            if word == "--":
                return [*found, word, *self._words[::-1]]
            if not word.startswith("-") or word == "-":
                self._is_model_known = True
                found.append(word)
            else:
                found += self._flag(word)
        return found

    def _flag(self, word: str) -> list[str]:
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        given = value if equals else None
        habit = None if name in self._known and not name.startswith("--") else self._habit(name)
        if habit is not None:
            return self._from_habit(habit, name, given)
        if self._has_model and name == MODEL and name not in self._known:
            return [self._value(name, given)]
        known = self._known.get(name)
        if known is None:
            if not name.startswith("--"):
                return [word]  # several short flags in one, perhaps
            raise ConfigError(self._unknown(name))
        if name == "--help":  # of vLLM's --help=all and --help=NAME, the help has both
            return [name]
        if not known.takes_value:
            return [name if given is None else f"{name}={given}"]
        if given is None and not self._words:
            return [name]
        values = self._values(name, given) if known.takes_many else [self._value(name, given)]
        if values == [UNSET] and not known.takes_many:
            return []
        return [part for value in values for part in (name, value)]

    def _habit(self, name: str) -> Habit | None:
        """Also for a switch that is switched off, a member of a JSON object (--x.y), and -O3."""
        for flag in (name, name.replace("--no-", "--", 1), name.partition(".")[0], name[:2]):
            found = self._habits.find(flag)
            if found is not None and (flag != name[:2] or name[2:].isdigit() or flag == name):
                return found
        return None

    def _from_habit(self, habit: Habit, name: str, given: str | None) -> list[str]:
        if name in habit.takes_value:
            value = self._value(name, given) if habit.takes_value[name] else self._switch(given)
            if habit.takes_many(name) and given is None:
                self._more_values()
        elif "." in name:
            value = self._value(name, given)
        elif name.startswith("--no-"):
            value, name = "false", name.replace("--no-", "--", 1)
        else:
            name, value = name[:2], name[2:]
        found = habit.arguments(name, value)
        if habit.note:
            self.notes.append(f"{name}: {habit.why(flags=True)}")
        if found and found[0] not in self._known:
            raise ConfigError(self._unknown(name))
        return [] if found[1:] == [UNSET] else found

    def _switch(self, given: str | None) -> str:
        """true, unless what stands behind it says otherwise."""
        if given is None and self._words and self._words[-1].lower() in _BOOLEANS:
            given = self._words.pop()
        return "true" if given is None else given

    def _value(self, name: str, given: str | None) -> str:
        if given is not None:
            return given
        if not self._words:
            raise ConfigError(f"{name} needs a value")
        return self._words.pop()

    def _values(self, name: str, given: str | None) -> list[str]:
        """Those of a list: a JSON list, or words one after the other."""
        value = self._value(name, given)
        return [*(listed(value) or [value]), *(self._more_values() if given is None else ())]

    def _more_values(self) -> list[str]:
        """The words up to the next flag, unless one of them may be the model."""
        values = []
        while self._is_model_known and self._words and not self._words[-1].startswith("-"):
            values.append(self._words.pop())
        return values

    def _unknown(self, name: str) -> str:
        alike = get_close_matches(name, self._known, n=1, cutoff=SIMILAR)
        meant = f" ({alike[0]}?)" if alike else ""
        return f"there is no option {name}{meant}: `{self._command} --help` has all of them"


def listed(text: str) -> list[str]:
    """The strings of a JSON list; none where it is no such list."""
    try:
        found: Any = json.loads(text) if text.startswith("[") else None
    except ValueError:
        return []
    return found if isinstance(found, list) and all(isinstance(item, str) for item in found) else []
