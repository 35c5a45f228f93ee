"""The tree of errors is the one that its docstring draws."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from inflight import errors
from inflight.errors import ConfigError, EngineError, InflightError, RequestError

CLASSES = {name: value for name, value in vars(errors).items() if inspect.isclass(value)}


def drawn() -> dict[str, str]:
    """Child -> parent, as the docstring draws them: a name's column tells its depth."""
    found: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    for match in re.finditer(r"^[ │├└─]*?(\w+Error)\b", errors.__doc__ or "", re.MULTILINE):
        column = match.start(1) - match.start()
        while path and path[-1][0] >= column:
            path.pop()
        found[match[1]] = path[-1][1] if path else "Exception"
        path.append((column, match[1]))
    return found


def test_exception_tree_in_the_docstring_is_correct() -> None:
    assert drawn() == {name: value.__bases__[0].__name__ for name, value in CLASSES.items()}
    assert len(CLASSES) > 10


@pytest.mark.parametrize("name", CLASSES)
def test_every_error_is_an_inflight_error_with_a_docstring(name: str) -> None:
    assert issubclass(CLASSES[name], InflightError)
    assert CLASSES[name].__doc__


def test_errors_of_a_request_are_value_errors() -> None:
    """Code written for other engines catches ValueError, and RuntimeError for a dead engine."""
    assert issubclass(RequestError, ValueError)
    assert issubclass(ConfigError, ValueError)
    assert issubclass(EngineError, RuntimeError)
    assert not issubclass(EngineError, RequestError)


def test_truncated_values_end_with_an_ellipsis() -> None:
    assert errors.shown("x" * 98) == f"'{'x' * 98}'"
    assert errors.shown("x" * 99) == f"'{'x' * 98}…"
    assert errors.shown(["x"] * 1000, 20) == "['x', 'x', 'x', 'x'…"
    assert errors.shown(10**5000) == "a huge int"
    assert errors.clipped("abcdef", 4) == "abc…"


def test_no_message_is_truncated_silently() -> None:
    pattern = re.compile(r"!r:\.\d|:\.\d{3,}\}")
    package = Path(errors.__file__).parent
    assert [str(path) for path in package.rglob("*.py") if pattern.search(path.read_text("utf-8"))] == []
