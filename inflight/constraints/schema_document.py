"""A JSON schema as a document: its keywords, the parts that references lead to, and a budget for rewriting it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from urllib.parse import unquote

from inflight.errors import clipped, shown

T = TypeVar("T")

# Keywords whose values are one schema, a list of schemas, or schemas by name.
SCHEMA_KEYWORDS = {
    *("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames"),
    *("then", "unevaluatedItems", "unevaluatedProperties"),
}
SCHEMA_LISTS = {"allOf", "anyOf", "items", "oneOf", "prefixItems"}
NAMED_SCHEMAS = {
    *("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties")
}
# Keywords without schemas in their values.
DATA_KEYWORDS = {"const", "enum", "default", "example", "examples", "x-guidance"}

# Limits on the schemas that replacing keywords may create: one each, and more for those with long texts.
MAX_COST = 10_000
_ANNOTATIONS = {
    *("$anchor", "$comment", "$dynamicAnchor", "$id", "$schema", "contentEncoding", "contentMediaType"),
    *("contentSchema", "default", "deprecated", "description", "discriminator", "example", "examples"),
    *("externalDocs", "id", "readOnly", "strict", "title", "writeOnly", "xml"),
}
TYPES = ("null", "boolean", "number", "string", "array", "object")
_INTEGER_KEYWORDS = {
    *("maxContains", "maxItems", "maxLength", "maxProperties", "minContains", "minItems", "minLength"),
    "minProperties",
}

OMIT = object()  # instead of the value of a keyword


class UnsupportedKeywordError(Exception):
    """A keyword cannot be decided token by token."""

    def __init__(self, keyword: str, pointer: str, reason: str = "") -> None:
        super().__init__(keyword, pointer, reason)
        self.keyword, self.pointer, self.reason = keyword, pointer, reason


def is_annotation(keyword: str) -> bool:
    """Whether a keyword describes values without forbidding any."""
    return keyword in _ANNOTATIONS or (keyword.startswith("x-") and keyword != "x-guidance")


def has_no_effect(keyword: str, value: Any) -> bool:
    """Whether a keyword that llguidance lacks forbids nothing with this value."""
    if keyword in ("uniqueItems", "nullable"):
        return value is False
    return keyword in ("unevaluatedItems", "unevaluatedProperties", "propertyNames") and value in (True, {})


class SchemaDocument:
    """A schema whose keywords are being replaced by others."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.keyword = ""  # being replaced
        self.parts = list(_parts(root))
        self._budget = MAX_COST + sum(map(cost_of, self.parts))
        self._has_inner_ids = any("$id" in part for part in self.parts if part is not root)
        self._references: list[str] = []  # being followed

    def spend(self, cost: int, pointer: str) -> None:
        """Raise UnsupportedKeywordError if the schemas created so far cost more than the document may."""
        self._budget -= cost
        if self._budget < 0:
            raise UnsupportedKeywordError(self.keyword, clipped(pointer, 100), " here: it has too many cases")

    def _resolve(self, reference: Any, pointer: str) -> Any:
        """Return the part of the document that a reference points to."""
        if self._has_inner_ids:
            raise UnsupportedKeywordError("$ref", pointer, " here, in a schema with several $id")
        if not isinstance(reference, str) or (reference != "#" and not reference.startswith("#/")):
            raise UnsupportedKeywordError("$ref", pointer, f" here: {shown(reference)} is not a JSON pointer")
        try:
            return part_at(self.root, reference)
        except LookupError:
            raise UnsupportedKeywordError("$ref", pointer, f": {shown(reference)} does not exist") from None

    def follow(self, reference: Any, pointer: str, use: Callable[[Any], T]) -> T:
        """Call `use` with the part that a reference points to, which must not lead back to itself."""
        part = self._resolve(reference, pointer)
        if reference in self._references:
            raise UnsupportedKeywordError("$ref", pointer, f" here: {shown(reference)} refers back to itself")
        self._references.append(reference)
        try:
            return use(part)
        finally:
            self._references.pop()


def part_at(root: Any, reference: str) -> Any:
    """Return the part of a schema that a JSON pointer such as "#/$defs/name" leads to. Raises LookupError."""
    part = root
    for name in unquote(reference).split("/")[1:]:
        try:
            part = part[int(name) if isinstance(part, list) else name.replace("~1", "/").replace("~0", "~")]
        except (LookupError, ValueError, TypeError):
            raise LookupError(reference) from None
    return part


def cost_of(schema: dict[str, Any]) -> int:
    """Return the cost of a copy of a schema without those in it."""
    size = 0
    for keyword, value in schema.items():
        if keyword in NAMED_SCHEMAS and isinstance(value, dict):
            size += sum(map(len, value))
        elif keyword not in SCHEMA_LISTS | SCHEMA_KEYWORDS:
            size += len(value) if isinstance(value, str) else len(repr(value))
    return 1 + size // 64


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and everything in it that may be a schema."""
    if isinstance(schema, dict):
        yield schema
        for keyword, value in schema.items():
            if keyword not in DATA_KEYWORDS:
                yield from _parts(value)
    elif isinstance(schema, list):
        for item in schema:
            yield from _parts(item)


def rewritten(schema: Any, change: Callable[[str, Any], Any]) -> Any:
    """Return a copy of a schema with the value that `change` returns for every keyword, without it for OMIT.

    Names of properties and the contents of constants are not keywords.
    """
    if isinstance(schema, list):
        return [rewritten(item, change) for item in schema]
    if not isinstance(schema, dict):
        return schema
    copy = {}
    for keyword, value in schema.items():
        value = change(keyword, value)
        if keyword in NAMED_SCHEMAS and isinstance(value, dict):
            value = {name: rewritten(inner, change) for name, inner in value.items()}
        elif keyword not in DATA_KEYWORDS:
            value = rewritten(value, change)
        if value is not OMIT:
            copy[keyword] = value
    return copy


def without_annotations(schema: Any) -> Any:
    """Return an equivalent copy without descriptions and the like, which grammars do not use."""
    kept = ("$id", "$anchor", "$dynamicAnchor", "id")  # references may name them
    return rewritten(
        schema, lambda keyword, value: OMIT if is_annotation(keyword) and keyword not in kept else value
    )


def any_of(schemas: list[Any]) -> Any:
    """Return a schema that matches what any of these matches."""
    schemas = [schema for schema in schemas if schema is not False]
    if True in schemas or {} in schemas:
        return True
    if not schemas:
        return False
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def all_of(schemas: list[Any]) -> Any:
    """Return a schema that matches what all of these match."""
    schemas = [schema for schema in schemas if schema is not True and schema != {}]
    if False in schemas:
        return False
    if not schemas:
        return True
    return schemas[0] if len(schemas) == 1 else {"allOf": schemas}


def other_types(type_name: str) -> dict[str, Any]:
    return {"type": [other for other in TYPES if other != type_name]}


def type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    kinds: dict[type, str] = {float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def integral(keyword: str, value: Any) -> Any:
    """Return a number such as 2.0 as an integer where the keyword needs one."""
    is_integral = keyword in _INTEGER_KEYWORDS and isinstance(value, float) and value.is_integer()
    return int(value) if is_integral else value
