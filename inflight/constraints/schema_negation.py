"""Returns schemas that together match what a JSON schema does not match."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import Any

from inflight.constraints.schema_document import (
    TYPES,
    SchemaDocument,
    UnsupportedKeywordError,
    all_of,
    any_of,
    has_no_effect,
    integral,
    is_annotation,
    type_of,
)

MAX_POSITIONS = 8  # of an item that must be present
MAX_CASES = 64  # of one keyword
MAX_WORD_CHARACTERS = 500  # in the strings that one negation excludes
_OPPOSITES = {  # of a bound: the type it applies to, the keyword that excludes its values, and the step between them
    "minimum": ("number", "exclusiveMaximum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
}
_ANY_TEXT = "(?s:.)*"
# A pattern that is a literal after ^, and perhaps before $.
_LITERAL_PATTERN = re.compile(r"\^((?:[\w /:@#=,;<>!'\"%&~-]|\\[-./^$*+?()\[\]{}|\\])*)(\$?)")


class Negation:
    """Negates the schemas of one document."""

    def __init__(self, document: SchemaDocument) -> None:
        self._document = document

    def negated(self, schema: Any, pointer: str) -> Any:
        """Return one schema for the values that a schema does not match."""
        return any_of(self.cases(schema, pointer))

    def cases(self, schema: Any, pointer: str) -> list[Any]:
        """Return schemas that together match the values that a schema does not match."""
        self._document.spend(1, pointer)
        if isinstance(schema, bool):
            return [] if schema else [True]
        if not isinstance(schema, dict):
            raise UnsupportedKeywordError("not", pointer, ": it must be a schema")
        negations: list[Any] = []
        for keyword, value in schema.items():
            cases = self._of_keyword(keyword, integral(keyword, value), schema, pointer)
            negations += itertools.islice(cases, MAX_CASES + 1)
            if len(negations) > MAX_CASES:
                raise UnsupportedKeywordError("not", pointer, ": it has too many cases")
        return negations

    def _of_keyword(self, keyword: str, value: Any, schema: dict[str, Any], pointer: str) -> Iterable[Any]:
        """Return the negations of one keyword, lazily where each of many parts has some.

        Values that other keywords exclude may be missing.
        """
        negate = self.cases
        if is_annotation(keyword) or has_no_effect(keyword, value):
            return []
        match keyword:
            case "$defs" | "definitions" | "minContains" | "maxContains" | "then" | "else":
                return []  # they do nothing by themselves
            case "additionalProperties" if value in (True, {}):
                return []
            case "type":
                return _outside_types([value] if isinstance(value, str) else value)
            case "const":
                return self._outside_values([value], pointer)
            case "enum":
                return self._outside_values(value, pointer)
            case "pattern":
                return _outside_pattern(value, pointer)
            case "required":
                return ({"type": "object", "properties": {name: False}} for name in value)
            case "properties":
                return (
                    {"type": "object", "properties": {name: any_of(negated)}, "required": [name]}
                    for name, inner in value.items()
                    if (negated := negate(inner, pointer))
                )
            case "prefixItems":
                return (
                    item for i, inner in enumerate(value) for item in _with_item(i, negate(inner, pointer))
                )
            case "items" if not isinstance(value, list):
                first = len(schema.get("prefixItems", ()))
                if value is False:
                    return [{"type": "array", "minItems": first + 1}]
                negated = negate(value, pointer)
                return [item for i in range(MAX_POSITIONS) for item in _with_item(first + i, negated)]
            case "contains":
                if schema.get("minContains", 1) != 1 or "maxContains" in schema:
                    raise UnsupportedKeywordError(keyword, pointer, " with minContains or maxContains here")
                return [{"type": "array", "items": self.negated(value, pointer)}]
            case "allOf":
                return itertools.chain.from_iterable(negate(inner, pointer) for inner in value)
            case "anyOf":
                return [all_of([self.negated(inner, pointer) for inner in value])]
            case "oneOf":
                none = all_of([self.negated(inner, pointer) for inner in value])
                pairs = itertools.combinations(value, 2)
                return itertools.chain([none], (all_of(list(pair)) for pair in pairs))
            case "not":
                return [value]
            case "if":
                met = [value, self.negated(schema.get("then", True), pointer)]
                unmet = [self.negated(value, pointer), self.negated(schema.get("else", True), pointer)]
                return [all_of(met), all_of(unmet)]
            case "dependentRequired":
                return (
                    {"type": "object", "required": [name], "properties": {needed: False}}
                    for name, names in value.items()
                    for needed in names
                )
            case "$ref":
                return self._document.follow(value, pointer, lambda part: negate(part, pointer))
        return _outside_bound(keyword, value, pointer)

    def _outside_values(self, values: list[Any], pointer: str) -> list[Any]:
        """Return schemas for everything but some values."""
        by_type: dict[str, list[Any]] = {type_name: [] for type_name in TYPES}
        for value in values:
            by_type["number" if type_of(value) == "integer" else type_of(value)].append(value)
        free = [type_name for type_name in TYPES if not by_type[type_name]]
        schemas: list[Any] = [{"type": free}] if free else []
        if len(set(by_type["boolean"])) == 1:
            schemas.append({"const": not by_type["boolean"][0]})
        if by_type["number"]:
            schemas += _between(sorted(set(by_type["number"])))
        if by_type["string"]:
            if sum(map(len, by_type["string"])) > MAX_WORD_CHARACTERS:
                raise UnsupportedKeywordError("enum", pointer, " here: its strings are too long")
            schemas.append({"type": "string", "pattern": f"^{_pattern_outside(set(by_type['string']))}$"})
        for type_name in ("array", "object"):
            if by_type[type_name]:
                outside = [any_of(self._outside_container(value, pointer)) for value in by_type[type_name]]
                schemas.append(all_of([{"type": type_name}, *outside]))
        return schemas

    def _outside_container(self, value: Any, pointer: str) -> list[Any]:
        if isinstance(value, list):
            items = [{"const": item} for item in value]
            as_schema = {"minItems": len(value), "maxItems": len(value), "prefixItems": items}
            return self.cases(as_schema, pointer)
        if not value:
            return [{"minProperties": 1}]
        properties = {name: {"const": inner} for name, inner in value.items()}
        return self.cases({"required": list(value), "properties": properties}, pointer)


def _outside_types(types: list[str]) -> list[Any]:
    """Return a schema of all other types. Non-integer numbers cannot be distinguished and are left out."""
    excluded = {"number" if type_name == "integer" else type_name for type_name in types}
    others = [type_name for type_name in TYPES if type_name not in excluded]
    return [{"type": others}] if others else []


def _outside_bound(keyword: str, value: Any, pointer: str) -> list[Any]:
    """Return a schema of the values beyond a bound. Raises UnsupportedKeywordError for all other keywords."""
    if keyword in _OPPOSITES and isinstance(value, int | float) and not isinstance(value, bool):
        type_name, opposite, step = _OPPOSITES[keyword]
        bound = value + step
        if type_name != "number" and bound < 0:
            return []
        if opposite != "minProperties" or bound <= 1:  # more than one could be repeated names
            return [{"type": type_name, opposite: bound}]
    raise UnsupportedKeywordError(keyword, pointer, " here")


def _with_item(index: int, schemas: list[Any]) -> list[Any]:
    if not schemas:
        return []
    prefix = [True] * index + [any_of(schemas)]
    return [{"type": "array", "prefixItems": prefix, "minItems": index + 1}]


def _between(numbers: list[float]) -> list[Any]:
    """Return schemas of the numbers below, between and above some numbers."""
    inner = [
        {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
        for low, high in itertools.pairwise(numbers)
    ]
    below = {"type": "number", "exclusiveMaximum": numbers[0]}
    return [below, *inner, {"type": "number", "exclusiveMinimum": numbers[-1]}]


def _outside_pattern(pattern: Any, pointer: str) -> list[Any]:
    match = _LITERAL_PATTERN.fullmatch(pattern) if isinstance(pattern, str) else None
    if match is None:
        raise UnsupportedKeywordError("pattern", pointer, " here, unless it is ^ and a literal")
    text = re.sub(r"\\(.)", r"\1", match[1])
    if len(text) > MAX_WORD_CHARACTERS:
        reason = f" here with a literal of {len(text)} characters: at most {MAX_WORD_CHARACTERS} are allowed"
        raise UnsupportedKeywordError("pattern", pointer, reason)
    if not text and not match[2]:
        return []
    outside = _pattern_outside({text}) if match[2] else _pattern_without_prefix(text)
    return [{"type": "string", "pattern": f"^{outside}$"}]


def _pattern_outside(words: set[str]) -> str:
    """Return a pattern for all texts except some words."""
    pairs = zip(min(words), max(words), strict=False)
    prefix = "".join(low for low, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    if prefix:
        rest = _pattern_outside({word.removeprefix(prefix) for word in words})
        return f"(?:{_pattern_without_prefix(prefix)}|{_literal(prefix)}{rest})"
    continuations: dict[str, set[str]] = {}
    for word in words - {""}:
        continuations.setdefault(word[0], set()).add(word[1:])
    others = f"[^{''.join(map(_literal, sorted(continuations)))}]" if continuations else "(?s:.)"
    ways = [f"{others}{_ANY_TEXT}"]
    ways += [
        f"{_literal(character)}{_pattern_outside(rest)}" for character, rest in sorted(continuations.items())
    ]
    return f"(?:{'|'.join(ways)}){'' if '' in words else '?'}"


def _pattern_without_prefix(prefix: str) -> str:
    """Return a pattern for all texts that do not begin with a prefix.

    It is split in halves: groups may not be nested as deeply as a prefix is long.
    """
    if len(prefix) == 1:
        return f"(?:[^{_literal(prefix)}]{_ANY_TEXT})?"
    middle = len(prefix) // 2
    begin, end = prefix[:middle], prefix[middle:]
    return f"(?:{_pattern_without_prefix(begin)}|{_literal(begin)}{_pattern_without_prefix(end)})"


def _literal(text: str) -> str:
    """Return a text as a part of a pattern or of a character class."""
    return re.sub(r"[-\\.+*?()|\[\]{}^$#&~/]", r"\\\g<0>", text)
