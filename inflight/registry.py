"""Plug-ins chosen by name, imported when they are used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Generic, TypeVar, cast

from inflight.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps names to `module:attribute` targets. Unless it is closed, a name with a colon is itself a target."""

    def __init__(self, noun: str, targets: Mapping[str, str], closed: bool = False) -> None:
        self._noun = noun
        self._targets = dict(targets)
        self._closed = closed

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def get(self, name: str) -> T:
        target = self._targets.get(name, "" if self._closed else name)
        module_name, colon, attribute = target.partition(":")
        if not colon:
            allowed = ", ".join(self._targets) + ("" if self._closed else ", or give module:attribute")
            raise ConfigError(f"unknown {self._noun} {name!r}: choose one of {allowed}")
        try:
            return cast(T, getattr(import_module(module_name), attribute))
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"{self._noun} {name!r} cannot be imported: {error}") from error
