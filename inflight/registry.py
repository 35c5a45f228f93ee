"""Plug-ins chosen by name, imported when they are used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Generic, TypeVar, cast

from inflight.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps names to `module:attribute` targets. A name with a colon is itself a target."""

    def __init__(self, kind: str, targets: Mapping[str, str]) -> None:
        self.kind = kind
        self._targets = dict(targets)

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def get(self, name: str) -> T:
        target = self._targets.get(name, name)
        module_name, colon, attribute = target.partition(":")
        if not colon:
            allowed = ", ".join(self._targets)
            raise ConfigError(
                f"unknown {self.kind} {name!r}: choose one of {allowed}, or give module:attribute"
            )
        try:
            return cast(T, getattr(import_module(module_name), attribute))
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"{self.kind} {name!r} cannot be imported: {error}") from error
