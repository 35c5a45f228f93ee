"""An option is declared once; what is checked and what is said follow from that."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest

from inflight.errors import ConfigError
from inflight.option import MODEL, check, option, options_of


@dataclass(frozen=True, slots=True)
class Sample:
    size: int = option(4, MODEL, "Of it.", at_least=1, at_most=8)
    count: int | None = option(None, MODEL, "Of them.", at_least=2, unset="all")
    share: float = option(0.5, MODEL, "Of all.", above=0, at_most=1)
    wait: float | None = option(3.0, MODEL, "For it.", above=0, unit="seconds")
    patience: float = option(1.0, MODEL, "At all.", above=0, at_most=math.inf)
    kind: str = option("a", MODEL, "Of it.", choices=("a", "b"))
    depth: int | None = option(None, MODEL, "Of it.", choices=(1, 2))
    names: tuple[str, ...] = option(("x", "y"), MODEL, "Of it.")
    quick: bool = option(True, MODEL, "Or not.")
    other: str = "not an option"

    def __post_init__(self) -> None:
        check(self)


OPTIONS = options_of(Sample)


def test_types_come_from_the_field() -> None:
    assert {name: (item.value_type, item.optional) for name, item in OPTIONS.items()} == {
        "size": (int, False),
        "count": (int, True),
        "share": (float, False),
        "wait": (float, True),
        "patience": (float, False),
        "kind": (str, False),
        "depth": (int, True),
        "names": (tuple, False),
        "quick": (bool, False),
    }


@pytest.mark.parametrize(
    ("name", "allowed", "default"),
    [
        ("size", "an integer from 1 to 8", "4"),
        ("count", "None or an integer of at least 2", "all"),
        ("share", "a number above 0, at most 1", "0.5"),
        ("wait", "None or a positive number of seconds", "3.0"),
        ("patience", "a positive number", "1.0"),
        ("kind", "a, b", "a"),
        ("depth", "None, 1, 2", ""),
        ("names", "", "x y"),
        ("quick", "", "true"),
    ],
)
def test_allowed_values_and_defaults_are_described(name: str, allowed: str, default: str) -> None:
    assert (OPTIONS[name].allowed, OPTIONS[name].default_text) == (allowed, default)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("size", [1, 8], [0, 9, 2.0, True, "4", None, 10**5000]),
        ("count", [None, 2, 10**9], [1, 2.5, False]),
        ("share", [1, 0.001], [0, 1.01, math.nan, "1", None, True]),
        ("wait", [None, 1, 0.1], [0, -1, math.inf, math.nan]),
        ("patience", [math.inf], [0, math.nan, None]),
        ("kind", ["b"], ["c", "", None, ["a"]]),
        ("depth", [None, 1, 2], [0, 3, "1"]),
    ],
)
def test_values_are_checked(name: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert getattr(Sample(**{name: value}), name) == value
    for value in bad:
        with pytest.raises(ConfigError, match=rf"{name} is .*: allowed is ") as caught:
            Sample(**{name: value})
        assert str(caught.value).endswith(f": allowed is {OPTIONS[name].allowed}")
        assert len(str(caught.value)) < 200


def test_error_names_the_first_wrong_field() -> None:
    with pytest.raises(ConfigError, match="size is 0"):
        Sample(size=0, count=0, kind="c")
