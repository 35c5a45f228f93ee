"""Which keywords a JSON schema may have here.

Unknown keywords are annotations by the book, and llguidance passes over them. But whoever writes `nullable` or
`requried` expects something of it: what has no effect here, and is no known annotation, is refused by its name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from inflight.errors import ParameterError
from inflight.structured_outputs import PARAM

# The values of these are schemas, lists of schemas, or schemas by name.
_ONE = {"additionalItems", "additionalProperties", "items"}
_SEVERAL = {"allOf", "anyOf", "items", "oneOf", "prefixItems"}
_NAMED = {"$defs", "definitions", "patternProperties", "properties"}

_ASSERTIONS = {
    *("$ref", "const", "enum", "exclusiveMaximum", "exclusiveMinimum", "format", "maxItems", "maxLength"),
    *("maxProperties", "maximum", "minItems", "minLength", "minProperties", "minimum", "multipleOf"),
    *("pattern", "required", "type"),
}
# What says something about a value without forbidding any.
_ANNOTATIONS = {
    *("$anchor", "$comment", "$id", "$schema", "contentEncoding", "contentMediaType", "contentSchema"),
    *("default", "deprecated", "description", "discriminator", "example", "examples", "externalDocs", "id"),
    *("readOnly", "strict", "title", "writeOnly", "xml"),
}
_KNOWN = _ONE | _SEVERAL | _NAMED | _ASSERTIONS | _ANNOTATIONS


def read_schema(text: str, where: str = "json") -> Any:
    """The schema, all of whose keywords are known. Raises ParameterError that names one that is not."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ParameterError(f"{PARAM}.{where} is no JSON: {error}", param=PARAM) from None
    check_schema(schema, where)
    return schema


def check_schema(schema: Any, where: str = "json") -> None:
    if not isinstance(schema, bool | dict):
        raise ParameterError(
            f"{PARAM}.{where} is a {type(schema).__name__}: a JSON schema is an object, true or false",
            param=PARAM,
        )
    try:
        for keyword, path in _keywords(schema, "#"):
            if keyword not in _KNOWN and (keyword == "x-guidance" or not keyword.startswith("x-")):
                raise ParameterError(
                    f"{PARAM}.{where}: the keyword {keyword!r}, at {path}, is not supported",
                    param=PARAM,
                    code="unsupported_keyword",
                )
    except RecursionError:
        raise ParameterError(f"{PARAM}.{where} is nested too deeply", param=PARAM) from None


def _keywords(schema: Any, path: str) -> Iterator[tuple[str, str]]:
    """Every keyword of a schema and of those in it, with the place of the schema that has it."""
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        yield keyword, path
        place = f"{path}/{keyword}"
        if keyword in _NAMED and isinstance(value, dict):
            for name, inner in value.items():
                yield from _keywords(inner, f"{place}/{name}")
        elif keyword in _SEVERAL and isinstance(value, list):
            for index, inner in enumerate(value):
                yield from _keywords(inner, f"{place}/{index}")
        elif keyword in _ONE:
            yield from _keywords(value, place)
