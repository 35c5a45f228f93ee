"""Typed reading of what configs and GGUF metadata hold. Errors name the field that is missing or has the wrong type."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from inflight.errors import ModelError, shown

_MOST = {
    "num_hidden_layers": 4096,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4096),
}
_MOST_OTHERWISE = 1 << 24
_MOST_FLOAT = sys.float_info.max  # an integer of JSON may be larger


class Fields:
    """Values by name, and the name of their file for error messages. A null counts as missing, which is an error unless
    there is a default. `prefix` comes before each name in the file."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json", prefix: str = "") -> None:
        self.values = values
        self.where = where
        self._prefix = prefix

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def get(self, name: str, default: Any, allowed: str, is_allowed: Callable[[Any], bool]) -> Any:
        """Return a value, or raise an error that says what is allowed."""
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.where} has no {self._prefix + name!r}, which is required")
        if not is_allowed(value):
            raise self.error(name, allowed)
        return value

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        """Return an integer, bounded so that a bogus config cannot exhaust memory."""
        most = _MOST.get(name, _MOST_OTHERWISE)
        value: int = self.get(
            name,
            default,
            f"an integer from {least} to {most}",
            lambda value: type(value) is int and least <= value <= most,
        )
        return value

    def number(self, name: str, default: float | None = None, above: float = 0.0) -> float:
        allowed = "a finite number" + (f" above {above:g}" if above > -math.inf else "")
        return float(self.get(name, default, allowed, lambda value: _is_number(value, above)))

    def same_integer(self, *names: str, least: int = 1) -> int:
        """Return the integer that configs hold under one of several names."""
        present = [name for name in names if name in self]
        values = {name: self.integer(name, least=least) for name in present or names[:1]}
        if len(set(values.values())) > 1:
            raise self.error(present[1], f"equal to {present[0]}, {values[present[0]]}")
        return next(iter(values.values()))

    def boolean(self, name: str, default: bool) -> bool:
        value: bool = self.get(name, default, "true or false", lambda value: isinstance(value, bool))
        return value

    def string(self, name: str, default: str | None = None) -> str:
        value: str = self.get(name, default, "a string", lambda value: isinstance(value, str))
        return value

    def numbers(self, name: str, length: int | None = None, above: float = 0.0) -> list[float]:
        allowed = "a list of numbers" if length is None else f"a list of {length} positive numbers"
        values = self._list(name, None, allowed, lambda item: _is_number(item, above))
        if length not in (None, len(values)):
            raise self.error(name, allowed)
        return [float(item) for item in values]

    def integers(self, name: str, default: list[int] | None = None) -> list[int]:
        """Return a list of integers, by default an empty one."""
        return self._list(name, default or [], "a list of integers", lambda item: type(item) is int)

    def strings(self, name: str, default: list[str] | None = None) -> list[str]:
        return self._list(name, default, "a list of strings", lambda item: isinstance(item, str))

    def _list(self, name: str, default: Any, allowed: str, is_allowed: Callable[[Any], bool]) -> list[Any]:
        value: list[Any] = self.get(
            name, default, allowed, lambda value: isinstance(value, list) and all(map(is_allowed, value))
        )
        return value

    def part(self, name: str) -> Fields:
        part = self.get(name, None, "an object", lambda value: isinstance(value, Mapping))
        return Fields(part, f"{name} of {self.where}")

    def check_supported(self, fixed: Mapping[str, tuple[Any, ...]]) -> None:
        """Raise unless each field in `fixed` has one of its supported values."""
        for name, allowed in fixed.items():
            if self.values.get(name) not in allowed:
                raise self.error(
                    name, " or ".join("null" if value is None else repr(value) for value in allowed)
                )

    def error(self, name: str, allowed: str) -> ModelError:
        value = shown(self.values.get(name))
        return ModelError(f"{self._prefix}{name} in {self.where} is {value}: it must be {allowed}")


def _is_number(value: Any, above: float) -> bool:
    return type(value) in (int, float) and above < value <= _MOST_FLOAT
