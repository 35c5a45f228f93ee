"""The keywords that a JSON schema may have here, and schemas that no finite value can satisfy.

By the standard unknown keywords are annotations, and llguidance ignores them. But a user who writes `nullable` or
`requried` expects an effect, so a keyword that has none here and is no known annotation is rejected by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

from inflight.errors import ParameterError
from inflight.structured_outputs import PARAM

_DATA_KEYWORDS = {"const", "enum", "default", "example", "examples"}
_PARTS_BY_NAME = ("/properties", "/patternProperties", "/$defs", "/definitions")  # in these, keys are names
MAX_PASSES = 32  # over a schema; what is not decided then is left to others


def endless_place(schema: Any) -> str | None:
    """A place in a schema for which there is no finite value; None if there is none, as far as can be told.

    A part is finite if what it must hold is; all are taken for endless until that is known.
    """
    parts = dict(_parts(schema, "#"))
    finite: set[str] = set()
    places = list(parts)
    for _ in range(MAX_PASSES):
        num_finite = len(finite)
        places.reverse()  # references lead both ways
        finite.update(place for place in places if _is_finite(parts[place], place, parts, finite))
        if len(finite) == num_finite:
            return next((place for place in parts if place not in finite), None)
    return None


def _is_finite(part: dict[str, Any], place: str, parts: dict[str, dict[str, Any]], finite: set[str]) -> bool:
    def holds(at: str) -> bool:
        return at not in parts or at in finite

    reference = part.get("$ref")
    if isinstance(reference, str) and reference.startswith("#") and not holds(unquote(reference)):
        return False
    if not all(holds(f"{place}/allOf/{index}") for index in range(_length(part.get("allOf")))):
        return False
    for keyword in ("anyOf", "oneOf"):
        num_ways = _length(part.get(keyword))
        if num_ways and not any(holds(f"{place}/{keyword}/{index}") for index in range(num_ways)):
            return False
    return all(map(holds, _needed(part, place)))


def _needed(part: dict[str, Any], place: str) -> Iterator[str]:
    """The places of what a value must have in it. If it may be of another type, it need not have anything."""
    if part.get("type") == "object" and isinstance(part.get("required"), list):
        for name in part["required"]:
            yield f"{place}/properties/{_escaped(str(name))}"
    least = part.get("minItems")
    if part.get("type") == "array" and isinstance(least, int):
        num_first = _length(part.get("prefixItems"))
        yield from (f"{place}/prefixItems/{index}" for index in range(min(least, num_first)))
        if least > num_first:
            yield f"{place}/items"


def _parts(schema: Any, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """All objects in a schema but for constants, by the pointer that a reference to them has."""
    if isinstance(schema, dict):
        yield place, schema
        for name, inner in schema.items():
            if name not in _DATA_KEYWORDS or place.endswith(_PARTS_BY_NAME):
                yield from _parts(inner, f"{place}/{_escaped(name)}")
    elif isinstance(schema, list):
        for index, inner in enumerate(schema):
            yield from _parts(inner, f"{place}/{index}")


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list) else 0


# The values of these are schemas, lists of schemas, or schemas by name.
_ONE = {"additionalItems", "additionalProperties", "items"}
_SEVERAL = {"allOf", "anyOf", "items", "oneOf", "prefixItems"}
_NAMED = {"$defs", "definitions", "patternProperties", "properties"}

_ASSERTIONS = {
    *("$ref", "const", "enum", "exclusiveMaximum", "exclusiveMinimum", "format", "maxItems", "maxLength"),
    *("maxProperties", "maximum", "minItems", "minLength", "minProperties", "minimum", "multipleOf"),
    *("pattern", "required", "type"),
}
_ANNOTATIONS = {
    *("$anchor", "$comment", "$id", "$schema", "contentEncoding", "contentMediaType", "contentSchema"),
    *("default", "deprecated", "description", "discriminator", "example", "examples", "externalDocs", "id"),
    *("readOnly", "strict", "title", "writeOnly", "xml"),
}
# These need an escape of the form \u0001 in JSON, which `grammars.py` does not allow.
_UNSPEAKABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_CONSTANTS = {"const", "enum", "default", "example", "examples", "x-guidance"}
# Bounds are counted in floats and in 64-bit integers, where those near the ends are inexact, or crash the process.
_LARGEST_EXACT, FAR = 1 << 53, 1 << 62
OUTWARD = {"minimum": -1, "exclusiveMinimum": -1, "maximum": 1, "exclusiveMaximum": 1}
# Patterns without intersections and the like in a class of characters, which not all readers of patterns know.
_CLASS = r"\[\^?\]?(?:\\.|&(?!&)|-(?!-)|~(?!~)|[^\\\]\[&~-])*+\]"
_PLAIN_PATTERN = re.compile(rf"(?:\\.|[^\\\[]|{_CLASS})*+", re.DOTALL)
OMIT = object()
MAX_OPTIONAL = (
    500  # properties of one object: every one of them may be next, and a grammar has to look at all
)
# Keywords that are not supported, but for the one value with which they say nothing.
_WITHOUT_EFFECT = {
    "uniqueItems": False,
    "nullable": False,
    "unevaluatedItems": True,
    "unevaluatedProperties": True,
}
_KEYWORDS = _ONE | _SEVERAL | _NAMED | _ASSERTIONS


def is_annotation(keyword: str) -> bool:
    """Whether a keyword says something about a value without forbidding any."""
    return keyword in _ANNOTATIONS or (keyword.startswith("x-") and keyword != "x-guidance")


def changes_nothing(keyword: str, value: Any) -> bool:
    """Whether a schema allows the same without this, though the keyword is not supported."""
    return isinstance(value, bool) and _WITHOUT_EFFECT.get(keyword) is value


def read_schema(text: str) -> Any:
    """The schema, all of whose keywords are known. Raises ParameterError that names one that is not."""
    name = f"{PARAM}.json"
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ParameterError(f"{name} is no JSON: {error}", param=PARAM) from None
    check_schema(schema, name)
    return schema


def check_schema(schema: Any, name: str, param: str = PARAM) -> None:
    """`name` is what a refusal calls the schema, `param` the parameter that it blames."""
    if not isinstance(schema, bool | dict):
        raise ParameterError(
            f"{name} is a {type(schema).__name__}: a JSON schema is an object, true or false", param=param
        )
    try:
        if any(map(_UNSPEAKABLE.search, _texts(schema))):
            raise ParameterError(
                f"{name} has a control character other than \\b, \\f, \\n, \\r and \\t in a text",
                param=param,
                code="invalid_constraint",
            )
        for keyword, path, owner in _keywords(schema, "#"):
            if changes_nothing(keyword, owner[keyword]):
                continue
            if keyword not in _KEYWORDS and not is_annotation(keyword):
                raise _unsupported(name, param, keyword, path)
            if keyword == "properties":
                _check_optional(owner, name, param, path)
            if keyword == "multipleOf" and not _is_positive(owner[keyword]):
                raise ParameterError(
                    f"{name}: multipleOf, at {path}, must be a number above 0",
                    param=param,
                    code="invalid_constraint",
                )
            if keyword == "minProperties" and _may_repeat_names(owner):
                reason = ": more than one property beyond the required ones"
                raise _unsupported(name, param, keyword, path, reason)
            if _is_inexact(keyword, owner[keyword]):
                raise ParameterError(
                    f"{name}: {keyword}, at {path}, has a number beyond 2^53, or is none, and cannot be kept exactly",
                    param=param,
                    code="invalid_constraint",
                )
            if not all(map(_PLAIN_PATTERN.fullmatch, _patterns(keyword, owner[keyword]))):
                raise ParameterError(
                    f"{name}: {keyword}, at {path}, has a class of characters that is not closed, or that has "
                    "[, &&, -- or ~~ in it: write these with \\",
                    param=param,
                    code="invalid_constraint",
                )
        endless = (
            endless_place(schema)
            if any(keyword == "$ref" for keyword, _, _ in _keywords(schema, "#"))
            else None
        )
    except RecursionError:
        raise ParameterError(f"{name} is nested too deeply", param=param) from None
    if endless is not None:
        raise ParameterError(
            f"{name}: {endless} leads back to itself for ever, so no value of it would ever be complete",
            param=param,
            code="invalid_constraint",
        )


def rewritten(schema: Any, change: Callable[[str, Any], Any]) -> Any:
    """A copy of a schema, in which every keyword has the value that `change` says, or is left out if that is OMIT.

    Names of properties are no keywords, and neither is what only looks like one in a constant.
    """
    if isinstance(schema, list):
        return [rewritten(item, change) for item in schema]
    if not isinstance(schema, dict):
        return schema
    copy = {}
    for keyword, value in schema.items():
        value = change(keyword, value)
        if keyword in _NAMED and isinstance(value, dict):
            value = {name: rewritten(inner, change) for name, inner in value.items()}
        elif keyword not in _CONSTANTS:
            value = rewritten(value, change)
        if value is not OMIT:
            copy[keyword] = value
    return copy


def without_annotations(schema: Any) -> Any:
    """A copy that allows the same: grammars have no use for descriptions."""
    kept = ("$id", "$anchor", "id")  # to which others may refer
    return rewritten(
        schema, lambda keyword, value: OMIT if is_annotation(keyword) and keyword not in kept else value
    )


def _texts(value: Any) -> Iterator[str]:
    """All texts in JSON data, names included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, dict):
        yield from value
        for item in value.values():
            yield from _texts(item)


def _unsupported(name: str, param: str, keyword: str, path: str, reason: str = "") -> ParameterError:
    return ParameterError(
        f"{name}: the keyword {keyword!r}, at {path}, is not supported{reason}",
        param=param,
        code="unsupported_keyword",
    )


def _check_optional(schema: dict[str, Any], name: str, param: str, path: str) -> None:
    properties, required = schema["properties"], schema.get("required")
    if not isinstance(properties, dict) or len(properties) <= MAX_OPTIONAL:
        return
    texts = (item for item in required if isinstance(item, str)) if isinstance(required, list) else ()
    num_optional = len(properties.keys() - set(texts))
    if num_optional > MAX_OPTIONAL:
        raise ParameterError(
            f"{name}: properties, at {path}, has {num_optional} that are not required: at most {MAX_OPTIONAL} can be "
            "followed",
            param=param,
            code="constraint_too_complex",
        )


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _is_inexact(keyword: str, value: Any) -> bool:
    if keyword in ("const", "enum"):
        return any(abs(number) > _LARGEST_EXACT for number in _integers(value))
    if keyword not in OUTWARD or not isinstance(value, int | float):
        return False
    is_far = value * OUTWARD[keyword] > FAR  # which `patterns.py` makes nearer
    return isinstance(value, bool) or (abs(value) > _LARGEST_EXACT and not is_far)


def _patterns(keyword: str, value: Any) -> list[str]:
    if keyword == "patternProperties" and isinstance(value, dict):
        return list(value)
    return [value] if keyword == "pattern" and isinstance(value, str) else []


def _integers(value: Any) -> Iterator[int]:
    if isinstance(value, int):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _integers(item)


def _may_repeat_names(schema: dict[str, Any]) -> bool:
    """Whether an object could seem to have enough properties because one name comes twice, which no grammar sees."""
    least, required = schema["minProperties"], schema.get("required")
    num_required = len(required) if isinstance(required, list) else 0
    return isinstance(least, int | float) and least > num_required + 1


def _keywords(schema: Any, path: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Every keyword of a schema and of those in it, with the place of the schema that has it, and that schema."""
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        yield keyword, path, schema
        place = f"{path}/{keyword}"
        if keyword in _NAMED and isinstance(value, dict):
            for name, inner in value.items():
                yield from _keywords(inner, f"{place}/{name}")
        elif keyword in _SEVERAL and isinstance(value, list):
            for index, inner in enumerate(value):
                yield from _keywords(inner, f"{place}/{index}")
        elif keyword in _ONE:
            yield from _keywords(value, place)
