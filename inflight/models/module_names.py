"""Matching of module names with the lists and patterns of a `quantization_config`, in bounded time.

Checkpoints are untrusted, and Python's `re` may take forever: for `(.|.)` thirty times it tries 2^30 ways, and nothing
can interrupt it. So `re` only parses an expression. A match computes, from right to left, the set of positions at which
each part of the expression can begin: that takes linear time and needs no backtracking. Sets are bits of an integer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

from inflight.errors import ModelError, shown

Matches = Callable[[str], bool]
Accepts = Callable[[str], Any]  # a character

MAX_PATTERN = 4096  # characters
MAX_STEPS = 20_000_000  # for all names that are matched with one config: seconds
STEPS_PER_CHARACTER = 10  # of parsing an expression

_parser: Any = import_module("re._parser")  # it has no type stubs
_WORD = re.compile(r"\w")
_CATEGORIES: dict[str, tuple[Accepts, bool]] = {
    "CATEGORY_DIGIT": (str.isdecimal, False),
    "CATEGORY_NOT_DIGIT": (str.isdecimal, True),
    "CATEGORY_SPACE": (str.isspace, False),
    "CATEGORY_NOT_SPACE": (str.isspace, True),
    "CATEGORY_WORD": (_WORD.match, False),
    "CATEGORY_NOT_WORD": (_WORD.match, True),
}


class _Name:
    """A name that is matched. Position i is before character i, the last one behind all of them."""

    def __init__(self, text: str, spend: Callable[[int], None]) -> None:
        self.text = text
        self.spend = spend
        self.everywhere = (2 << len(text)) - 1
        self._of_characters: dict[str, int] = {}
        for index, character in enumerate(text):
            self._of_characters[character] = self._of_characters.get(character, 0) | 1 << index
        self._accepted: dict[Accepts, int] = {}

    def places(self, accepts: Accepts) -> int:
        """Return the positions of characters that are accepted."""
        places = self._accepted.get(accepts)
        if places is None:
            places = sum(bits for character, bits in self._of_characters.items() if accepts(character))
            self._accepted[accepts] = places
        return places


# The positions from which a part of an expression matches up to any of the given ones.
_Starts = Callable[[_Name, int], int]


class ModuleNames:
    """Makes matchers of names, which share a limit of steps. Errors name `where`, the config."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._steps_left = MAX_STEPS
        self._name = _Name("", self._spend)

    def exactly(self, names: Iterable[str]) -> Matches:
        names = frozenset(names)

        def matches(module: str) -> bool:
            self._spend(1)
            return module in names

        return matches

    def some(self, names: Iterable[str], test: Callable[[str, str], bool]) -> Matches:
        """Match modules for which `test(module, name)` is true for some name."""
        names = tuple(names)

        def matches(module: str) -> bool:
            self._spend(1 + len(names))
            return any(test(module, name) for name in names)

        return matches

    def within(self, names: Iterable[str]) -> Matches:
        """Match modules that have one of these names, or are inside one that has. Names may be cut at dots on both
        sides ("mlp.gate", "lm_head"), and have wildcards."""
        names = frozenset(names)
        patterns = [
            self.pattern(rf".*\.{re.escape(name)}\.".replace(r"\*", ".*")) for name in names if "*" in name
        ]

        def matches(module: str) -> bool:
            parts = module.split(".")
            count = len(parts)
            self._spend(count * count)
            runs = (".".join(parts[i:j]) for i in range(count) for j in range(i + 1, count + 1))
            return not names.isdisjoint(runs) or any(pattern(f".{module}.") for pattern in patterns)

        return matches

    def pattern(self, pattern: str) -> Matches:
        """Match modules that begin as a regular expression says."""
        where = f"{shown(pattern)} in {self._where}"
        if len(pattern) > MAX_PATTERN:
            raise ModelError(f"{where} has {len(pattern)} characters: at most {MAX_PATTERN} are allowed")
        self._spend(STEPS_PER_CHARACTER * len(pattern))
        try:
            parsed = _parser.parse(pattern)
            if parsed.state.flags & ~re.UNICODE:
                raise ModelError(f"{where} has flags, such as (?i): they are not supported")
            starts = _sequence(parsed)
        except (re.error, RecursionError, OverflowError) as error:
            raise ModelError(f"{where} is not a regular expression: {error}") from None
        except NotImplementedError as error:
            raise ModelError(f"{where} has {error}, which is not supported") from None

        def matches(module: str) -> bool:
            if self._name.text != module:
                self._name = _Name(module, self._spend)
            return bool(starts(self._name, self._name.everywhere) & 1)

        return matches

    def _spend(self, steps: int) -> None:
        self._steps_left -= steps
        if self._steps_left < 0:
            raise ModelError(
                f"the lists and regular expressions in {self._where} take too long to match with the names of all "
                "modules: make them shorter"
            )


# ---- parts of an expression ----


def _sequence(parts: Iterable[tuple[Any, Any]]) -> _Starts:
    backward = [_part(str(operation), argument) for operation, argument in parts][::-1]

    def starts(name: _Name, ends: int) -> int:
        name.spend(1 + len(backward))
        for part in backward:
            ends = part(name, ends)
            if not ends:
                break
        return ends

    return starts


def _part(operation: str, argument: Any) -> _Starts:
    if operation in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
        return _character(_accepts(operation, argument))
    match operation, argument:
        case "BRANCH", (_, choices):
            return _branch([_sequence(choice) for choice in choices])
        case "SUBPATTERN", (_, 0, 0, inner):
            return _sequence(inner)
        case "MAX_REPEAT" | "MIN_REPEAT", (least, most, inner):
            return _repeat(least, most, _sequence(inner))
        case "ASSERT" | "ASSERT_NOT", (1, inner):
            return _ahead(_sequence(inner), operation == "ASSERT_NOT")
        case "AT", place if str(place) in _PLACES:
            is_at = _PLACES[str(place)]
            return lambda name, ends: ends & is_at(name)
    unsupported = {"ASSERT": "look-behind", "ASSERT_NOT": "look-behind", "SUBPATTERN": "flags"}
    raise NotImplementedError(unsupported.get(operation, operation.lower().replace("_", " ")))


def _accepts(operation: str, argument: Any) -> Accepts:
    """Return whether a part that stands for one character accepts it."""
    match operation:
        case "LITERAL" | "NOT_LITERAL":
            negated = operation == "NOT_LITERAL"
            return lambda character: (ord(character) == argument) != negated
        case "ANY":
            return lambda character: character != "\n"
        case "RANGE":
            low, high = argument
            return lambda character: low <= ord(character) <= high
        case "CATEGORY" if str(argument) in _CATEGORIES:
            test, negated = _CATEGORIES[str(argument)]
            return lambda character: bool(test(character)) != negated
        case "IN":
            kinds = [(str(operation), value) for operation, value in argument]
            negated = kinds[0][0] == "NEGATE"
            tests = [_accepts(*item) for item in kinds[negated:]]
            return lambda character: any(test(character) for test in tests) != negated
    raise NotImplementedError(str(argument).lower())


def _character(accepts: Accepts) -> _Starts:
    return lambda name, ends: ends >> 1 & name.places(accepts)


def _branch(choices: list[_Starts]) -> _Starts:
    def starts(name: _Name, ends: int) -> int:
        reached = 0
        for choice in choices:
            reached |= choice(name, ends)
        return reached

    return starts


def _repeat(least: int, most: int, part: _Starts) -> _Starts:
    def starts(name: _Name, ends: int) -> int:
        # More repetitions than there are characters add nothing.
        for optional, times in ((False, least), (True, most - least)):
            for _ in range(min(times, len(name.text) + 1)):
                reached = part(name, ends) | (ends if optional else 0)
                if reached == ends:
                    break
                ends = reached
        return ends

    return starts


def _ahead(inner: _Starts, negated: bool) -> _Starts:
    def starts(name: _Name, ends: int) -> int:
        matching = inner(name, name.everywhere)
        return ends & (name.everywhere & ~matching if negated else matching)

    return starts


def _boundaries(name: _Name) -> int:
    words = name.places(_WORD.match)
    return words ^ words << 1


def _end(name: _Name) -> int:
    end = 1 << len(name.text)
    return end | end >> 1 if name.text.endswith("\n") else end


_PLACES: dict[str, Callable[[_Name], int]] = {
    "AT_BEGINNING": lambda _: 1,
    "AT_BEGINNING_STRING": lambda _: 1,
    "AT_END": _end,
    "AT_END_STRING": lambda name: 1 << len(name.text),
    "AT_BOUNDARY": _boundaries,
    "AT_NON_BOUNDARY": lambda name: name.everywhere & ~_boundaries(name),
}
