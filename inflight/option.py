"""How an option is declared: once, as a field of a config dataclass.

    block_size: int = option(16, MEMORY, "Tokens in a KV block.", at_least=1, at_most=1024)

Flags, environment variables, config files, checks and docs are all derived from that. This module stays cheap to
import: the command line reads it before anything heavy is loaded.
"""

from __future__ import annotations

import math
import types
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from inflight.errors import ConfigError, shown

# Groups of options, in the order they are shown.
MODEL, MEMORY, SCHEDULING, NETWORK = "Model", "Memory", "Scheduling", "Network"
ACCESS, LIMITS, WATCHING, LIFE = "Access", "Limits", "Watching", "Life"
PANELS = (MODEL, MEMORY, SCHEDULING, NETWORK, ACCESS, LIMITS, WATCHING, LIFE)
PYTHON = "Python"  # no flag: only for the Python API


@dataclass(frozen=True, slots=True)
class Option:
    """One option. Limits are for numbers; None means no limit."""

    name: str
    value_type: type  # int, float, bool, str, tuple (of strings) or dict
    optional: bool  # None is allowed
    default: Any
    panel: str
    help: str
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    choices: tuple[Any, ...] = ()
    unit: str = ""
    unset: str = ""  # what a default of None or () means
    short: str = ""  # a second, shorter flag

    def allows(self, value: Any) -> bool:
        """Return whether a value is in range. Only numbers and choices have a range."""
        if value is None and self.optional:
            return True
        if self.choices:
            return value in self.choices
        if self.value_type not in (int, float):
            return True
        kinds = int if self.value_type is int else int | float
        return (
            isinstance(value, kinds)
            and not isinstance(value, bool)
            and (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (value < math.inf if self.at_most is None else value <= self.at_most)
        )

    def chosen(self, value: Any) -> Any:
        """Return the choice that equals a value up to case, or the value itself."""
        return next((item for item in self.choices if str(item).lower() == str(value).lower()), value)

    @property
    def allowed(self) -> str:
        """The range in words; empty if there is none."""
        if self.choices:
            return ", ".join(map(str, (None, *self.choices) if self.optional else self.choices))
        if self.value_type not in (int, float):
            return ""
        return f"{'None or ' if self.optional else ''}{self._numbers()}"

    def _numbers(self) -> str:
        if self.above == 0 and self.at_most in (None, math.inf):
            return f"a positive number of {self.unit}" if self.unit else "a positive number"
        noun = "an integer" if self.value_type is int else "a number"
        if self.at_least is not None:
            if self.at_most is not None:
                return f"{noun} from {self.at_least:g} to {self.at_most:g}"
            return f"{noun} of at least {self.at_least:g} {self.unit}".rstrip()
        return f"{noun} above {self.above:g}, at most {self.at_most:g}"

    @property
    def default_text(self) -> str:
        """The default as shown in help and docs; empty if there is none."""
        if self.default is None or self.default == ():
            return self.unset
        return " ".join(self.default) if self.value_type is tuple else str(self.default).lower()

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"


def option(default: Any, panel: str, help: str, **more: Any) -> Any:
    """Declare an option as a dataclass field; `more` are further fields of `Option`."""
    return field(default=default, metadata={"panel": panel, "help": help, **more})


@cache
def options_of(config: Any) -> dict[str, Option]:
    """Return the options of a config class, by name."""
    hints = get_type_hints(config)
    return {
        item.name: Option(item.name, *option_type(hints[item.name]), item.default, **item.metadata)
        for item in fields(config)
        if item.metadata
    }


def option_type(hint: Any) -> tuple[type, bool]:
    """Return the type of an option (int for `int | None`, str for a Literal) and whether it may be None."""
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    first = next(member for member in members if member is not type(None))
    value_type = str if get_origin(first) is Literal else get_origin(first) or first
    return value_type, type(None) in members


def check(config: Any) -> None:
    """Raise ConfigError for the first field that is out of range."""
    config_type: Any = type(config)
    for declared in options_of(config_type).values():
        value = getattr(config, declared.name)
        if not declared.allows(value):
            raise ConfigError(f"{declared.name} is {shown(value)}: allowed is {declared.allowed}")


def read_yaml(path: Path, what: str) -> Any:
    """Return the contents of a YAML file; `what` names it in errors."""
    import yaml  # an optional dependency

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} {str(path)!r} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark is not None else ""
        raise ConfigError(f"{what} {str(path)!r} is not YAML{where}") from None
