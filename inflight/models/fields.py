"""Typed reading of a `config.json`: a field that is missing or of the wrong kind is named."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from inflight.errors import ModelError, shown

_MOST = {"num_hidden_layers": 4096}
_MOST_OTHERWISE = 1 << 24
_MOST_FLOAT = sys.float_info.max  # an integer of JSON may be larger


class Fields:
    """A JSON object and where it stands. A null counts as missing."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self.values = values
        self.where = where

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        """Up to a limit that no real model reaches, so that nothing made from it takes all memory."""
        value = self._get(name, default)
        most = _MOST.get(name, _MOST_OTHERWISE)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.error(name, f"an integer from {least} to {most}")
        return value

    def number(self, name: str, default: float | None = None, above: float = 0.0) -> float:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not above < value <= _MOST_FLOAT:
            raise self.error(name, f"a finite number above {above:g}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def string(self, name: str, default: str | None = None) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.error(name, "a string")
        return value

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        value = self._get(name, None)
        numeric = isinstance(value, list) and all(
            isinstance(item, int | float) and not isinstance(item, bool) and 0 < item <= _MOST_FLOAT
            for item in value
        )
        if not numeric or len(value) != length:
            raise self.error(name, f"a list of {length} positive numbers")
        return tuple(float(item) for item in value)

    def strings(self, name: str) -> list[str]:
        value = self._get(name, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(name, "a list of strings")
        return value

    def part(self, name: str) -> Fields:
        value = self._get(name, None)
        if not isinstance(value, Mapping):
            raise self.error(name, "an object")
        return Fields(value, f"{name} of {self.where}")

    def check_supported(self, fixed: Mapping[str, tuple[Any, ...]]) -> None:
        """Refuse a model that computes otherwise. `fixed`: fields, and the values that they may have."""
        if "quantization_config" in self:
            raise ModelError(
                f"{self.where} has a quantization_config: only bf16, fp16 and fp32 checkpoints can be served"
            )
        for name, allowed in fixed.items():
            if self.values.get(name) not in allowed:
                raise self.error(
                    name, " or ".join("null" if value is None else repr(value) for value in allowed)
                )

    def error(self, name: str, allowed: str) -> ModelError:
        return ModelError(f"{name} in {self.where} is {shown(self.values.get(name))}: it must be {allowed}")

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.where} has no {name!r}, which is needed")
        return value
