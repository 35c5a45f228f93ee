"""Normalizes a command line: translates vLLM's flags, splits lists and accepts underscores for dashes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from inflight.errors import ConfigError
from inflight.vllm_rules import CompatRule, CompatRules, join_reasons

SIMILAR = 0.8  # an unknown flag that is less similar to a known one than this is not taken for a misspelling
MODEL = "--model"  # the model may also be a positional argument
UNSET = "None"  # a flag with this value is treated as absent
_BOOLEANS = ("true", "false")


@dataclass(frozen=True, slots=True)
class KnownFlag:
    """A flag that a command defines."""

    takes_value: bool
    takes_many: bool = False  # may be repeated, so it also accepts several values in a row


class ArgumentReader:
    """Reads the words of a command line from left to right."""

    def __init__(
        self,
        known: dict[str, KnownFlag],
        rules: CompatRules,
        command: str,
        has_model: bool,
        greedy_lists: bool = False,
    ) -> None:
        self._known = known
        self._rules = rules
        self._command = command
        self._has_model = has_model  # whether the model is a positional argument
        # Lists take all words up to the next flag, even if the model is unknown.
        self._greedy_lists = greedy_lists
        self._words: list[str] = []  # the remaining words, the next one last
        self._is_model_known = False
        self.notes: list[str] = []  # notes for the user

    def read(self, words: Iterable[str]) -> list[str]:
        """Return the command line in the command's own flags.

        Raises ConfigError that names all flags which are unknown or not supported.
        """
        self._words = list(words)[::-1]
        arguments: list[str] = []
        reasons: list[str] = []
        # A bare word is the model; once the model is known, it belongs to the list before it.
        self._is_model_known = (
            self._greedy_lists
            or not self._has_model
            or any(word.partition("=")[0] == MODEL for word in self._words)
        )
        while self._words:
            word = self._words.pop()
            if word == "--":
                arguments += [word, *self._words[::-1]]
                break
            if not word.startswith("-") or word == "-":
                self._is_model_known = True
                arguments.append(word)
            else:
                try:
                    arguments += self._flag(word)
                except ConfigError as error:
                    reasons.append(str(error))
                    self._bare_words()  # possibly values of an unknown flag
        if reasons:
            raise ConfigError(join_reasons(reasons))
        return arguments

    def _flag(self, word: str) -> list[str]:
        name, equals, text = word.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        inline = text if equals else None  # the value of --name=value
        rule = None if name in self._known and not name.startswith("--") else self._find_rule(name)
        if rule is not None:
            return self._apply_rule(rule, name, inline)
        if self._has_model and name == MODEL and name not in self._known:
            return [self._value(name, inline)]
        known = self._known.get(name)
        if known is None:
            if not name.startswith("--"):
                return [word]  # may be several short flags in one
            raise ConfigError(self._unknown(name))
        if name == "--help":  # vLLM has --help=all and --help=NAME; our help always shows everything
            return [name]
        if not known.takes_value:
            return [name if inline is None else f"{name}={inline}"]
        if inline is None and not self._words:
            return [name]
        values = self._values(name, inline) if known.takes_many else [self._value(name, inline)]
        if values == [UNSET] and not known.takes_many:
            return []
        return [part for value in values for part in (name, value)]

    def _find_rule(self, name: str) -> CompatRule | None:
        """Return a flag's rule. Also handles --no-x, members of JSON objects (--x.y) and -O3."""
        for flag in (name, name.replace("--no-", "--", 1), name.partition(".")[0], name[:2]):
            rule = self._rules.find(flag)
            if rule is not None and (flag != name[:2] or name[2:].isdigit() or flag == name):
                return rule
        return None

    def _apply_rule(self, rule: CompatRule, name: str, inline: str | None) -> list[str]:
        if name in rule.takes_value:
            value = self._value(name, inline) if rule.takes_value[name] else self._switch(inline)
            if rule.takes_many(name) and inline is None:
                self._more_values()
        elif "." in name:
            value = self._value(name, inline)
        elif name.startswith("--no-"):
            value, name = "false", name.replace("--no-", "--", 1)
        else:
            name, value = name[:2], name[2:]
        arguments = rule.arguments(name, value)
        if rule.note:
            self.notes.append(f"{name}: {rule.explanation(flags=True)}")
        if arguments and arguments[0] not in self._known:
            raise ConfigError(self._unknown(name))
        return [] if arguments[1:] == [UNSET] else arguments

    def _switch(self, inline: str | None) -> str:
        """Return a switch's value, which is true unless true or false follows."""
        if inline is None and self._words and self._words[-1].lower() in _BOOLEANS:
            inline = self._words.pop()
        return "true" if inline is None else inline

    def _value(self, name: str, inline: str | None) -> str:
        if inline is not None:
            return inline
        if not self._words:
            raise ConfigError(f"{name} needs a value")
        return self._words.pop()

    def _values(self, name: str, inline: str | None) -> list[str]:
        """Return the values of a list: a JSON list, or several words in a row."""
        value = self._value(name, inline)
        return [*(parse_list(value) or [value]), *(self._more_values() if inline is None else ())]

    def _more_values(self) -> list[str]:
        """Return the words up to the next flag, unless one of them may be the model."""
        return self._bare_words() if self._is_model_known else []

    def _bare_words(self) -> list[str]:
        words = []
        while self._words and not self._words[-1].startswith("-"):
            words.append(self._words.pop())
        return words

    def _unknown(self, name: str) -> str:
        similar = get_close_matches(name, self._known, n=1, cutoff=SIMILAR)
        hint = f" (did you mean {similar[0]}?)" if similar else ""
        return f"there is no option {name}{hint}: `{self._command} --help` lists all of them"


def parse_list(text: str) -> list[str]:
    """Return the strings of a JSON list, or nothing if the text is not such a list."""
    try:
        items: Any = json.loads(text) if text.startswith("[") else None
    except ValueError:
        return []
    return items if isinstance(items, list) and all(isinstance(item, str) for item in items) else []
