"""Expresses `not`, `if`, `contains` and other keywords that llguidance lacks by keywords that it has.

A keyword is replaced by a schema in `allOf`, usually an `anyOf` of cases. The core is `_negations`, which returns
schemas that together match what a schema does not match. The result may match less than the original, but never more:
an array with `contains` has a matching item among its first `MAX_POSITIONS`, for example. A keyword that cannot be
expressed in a reasonable size raises UnsupportedKeywordError.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import comb
from typing import Any
from urllib.parse import unquote

from inflight.errors import clipped, shown

# Keywords whose values are one schema, a list of schemas, or schemas by name.
SCHEMA_KEYWORDS = {
    *("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames"),
    *("then", "unevaluatedItems", "unevaluatedProperties"),
}
SCHEMA_LISTS = {"allOf", "anyOf", "items", "oneOf", "prefixItems"}
NAMED_SCHEMAS = {
    *("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"),
}
DATA_KEYWORDS = {
    "const",
    "enum",
    "default",
    "example",
    "examples",
    "x-guidance",
}  # no schemas in their values
# Keywords that `expand` replaces.
REPLACED = {
    *("$dynamicRef", "contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "if"),
    *("maxContains", "minContains", "not", "propertyNames", "then", "unevaluatedItems"),
    *("unevaluatedProperties", "uniqueItems"),
}

MAX_COST = (
    10_000  # of the schemas that replacing keywords may create: one each, and more for those with long texts
)
MAX_POSITIONS = 8  # of an item that must be present
MAX_CASES = 64  # of one keyword
MAX_SEQUENCES = 400  # of the distinct items of one array
MAX_WORD_CHARACTERS = 500  # in the strings that one negation excludes
TYPES = ("null", "boolean", "number", "string", "array", "object")
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
# RFC 3339 with the days of every month. llguidance's own formats know neither leap years nor leap seconds, which are
# allowed in UTC only. The year 0000 is left out, as most parsers reject it.
_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_FRACTION = r"(?:\.[0-9]{1,9})?"
_TIME = f"(?:{_CLOCK}:[0-5][0-9]{_FRACTION}(?:[Zz]|[+-]{_CLOCK})|23:59:60{_FRACTION}(?:[Zz]|[+-]00:00))"
_FORMATS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}[Tt]{_TIME}$"}
_INTEGER_KEYWORDS = {
    *("maxContains", "maxItems", "maxLength", "maxProperties", "minContains", "minItems", "minLength"),
    "minProperties",
}
# A pattern that is a literal after ^, and perhaps before $.
_LITERAL_PATTERN = re.compile(r"\^((?:[\w /:@#=,;<>!'\"%&~-]|\\[-./^$*+?()\[\]{}|\\])*)(\$?)")


class UnsupportedKeywordError(Exception):
    """A keyword cannot be decided token by token."""

    def __init__(self, keyword: str, pointer: str, reason: str = "") -> None:
        super().__init__(keyword, pointer, reason)
        self.keyword, self.pointer, self.reason = keyword, pointer, reason


def expand(root: Any, is_annotation: Callable[[str], bool], one_of: bool = False) -> Any:
    """Return a copy of a schema without the keywords that llguidance lacks.

    With `one_of`, alternatives of oneOf that may overlap are made exclusive too, where that is possible. Raises
    UnsupportedKeywordError.
    """
    return _Expansion(root, is_annotation, one_of).expand(root, "#")


def has_no_effect(keyword: str, value: Any) -> bool:
    """Whether a keyword that llguidance lacks forbids nothing with this value."""
    if keyword in ("uniqueItems", "nullable"):
        return value is False
    return keyword in ("unevaluatedItems", "unevaluatedProperties", "propertyNames") and value in (True, {})


@dataclass(frozen=True, slots=True)
class _Evaluated:
    """The properties, or the items, that the other keywords of a schema evaluate if `conditions` hold."""

    conditions: tuple[Any, ...] = ()
    names: tuple[str, ...] = ()  # without duplicates, in the order of the schema
    patterns: frozenset[str] = frozenset()
    num_items: int = 0
    all: bool = False

    def and_(self, other: _Evaluated) -> _Evaluated:
        return _Evaluated(
            self.conditions + other.conditions,
            tuple(dict.fromkeys(self.names + other.names)),
            self.patterns | other.patterns,
            max(self.num_items, other.num_items),
            self.all or other.all,
        )


@dataclass(slots=True)
class _Expansion:
    root: Any
    is_annotation: Callable[[str], bool]
    one_of: bool
    _budget: int = field(init=False)  # what further schemas may cost
    _dynamic_anchors: Counter[str] = field(init=False)
    _has_inner_ids: bool = field(init=False)
    _keyword: str = ""  # being replaced
    _references: list[str] = field(default_factory=list)  # being followed

    def __post_init__(self) -> None:
        parts = list(_parts(self.root))
        self._budget = MAX_COST + sum(map(_cost, parts))
        self._dynamic_anchors = Counter(str(part.get("$dynamicAnchor")) for part in parts)
        self._has_inner_ids = any("$id" in part for part in parts if part is not self.root)

    def expand(self, schema: Any, pointer: str) -> Any:
        if not isinstance(schema, dict):
            return schema
        self._spend(_cost(schema), pointer)
        schema = {keyword: _integral(keyword, value) for keyword, value in schema.items()}
        additions = list(self._replacements(schema, pointer))
        kept = {keyword: value for keyword, value in schema.items() if not _is_replaced(keyword, value)}
        if "$dynamicAnchor" in kept:
            kept.setdefault("$anchor", kept.pop("$dynamicAnchor"))
        if self.one_of and isinstance(kept.get("oneOf"), list):
            exclusive = self._exclusive(kept["oneOf"], pointer)
            if exclusive is not None:
                del kept["oneOf"]
                additions.append(exclusive)
        if additions:
            if isinstance(kept.get("properties"), dict):  # llguidance takes their order from allOf first
                additions.insert(0, {"properties": dict.fromkeys(kept["properties"], True)})
            present = kept.get("allOf")
            kept["allOf"] = [*present, *additions] if isinstance(present, list) else additions
        return {keyword: self._expand_value(keyword, value, pointer) for keyword, value in kept.items()}

    def _expand_value(self, keyword: str, value: Any, pointer: str) -> Any:
        if keyword in NAMED_SCHEMAS and isinstance(value, dict):
            return {name: self.expand(inner, f"{pointer}/{keyword}/{name}") for name, inner in value.items()}
        if keyword in SCHEMA_LISTS and isinstance(value, list):
            return [self.expand(inner, f"{pointer}/{keyword}/{i}") for i, inner in enumerate(value)]
        return self.expand(value, f"{pointer}/{keyword}") if keyword in SCHEMA_KEYWORDS else value

    def _spend(self, cost: int, pointer: str) -> None:
        self._budget -= cost
        if self._budget < 0:
            raise UnsupportedKeywordError(
                self._keyword, clipped(pointer, 100), " here: it has too many cases"
            )

    # ---- one schema's keywords ----

    def _replacements(self, schema: dict[str, Any], pointer: str) -> Iterator[Any]:
        """Yield schemas that together allow what the replaced keywords of a schema allow."""
        for keyword, value in schema.items():
            if not _is_replaced(keyword, value) or has_no_effect(keyword, value):
                continue
            if keyword in ("minContains", "maxContains", "then", "else"):  # handled with contains and if
                continue
            self._keyword = keyword
            if keyword == "not":
                yield _any_of(self._negations(value, f"{pointer}/not"))
            elif keyword == "if":
                yield self._conditional(schema, pointer)
            elif keyword == "contains":
                yield from self._contains(schema, pointer)
            elif keyword == "uniqueItems":
                yield from self._unique_items(schema, pointer)
            elif keyword == "propertyNames":
                yield from self._property_names(value, f"{pointer}/propertyNames")
            elif keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
                yield from self._dependent(keyword, value, pointer)
            elif keyword in ("unevaluatedItems", "unevaluatedProperties"):
                yield self._unevaluated(keyword, schema, pointer)
            elif keyword == "$dynamicRef":
                yield self._dynamic_reference(value, pointer)
            elif keyword == "format":
                yield {"pattern": _FORMATS[value]}

    def _conditional(self, schema: dict[str, Any], pointer: str) -> Any:
        condition = schema["if"]
        return _any_of(
            [
                _all_of([condition, schema.get("then", True)]),
                _all_of([_any_of(self._negations(condition, f"{pointer}/if")), schema.get("else", True)]),
            ]
        )

    def _dependent(self, keyword: str, value: Any, pointer: str) -> Iterator[Any]:
        if not isinstance(value, dict):
            raise UnsupportedKeywordError(keyword, pointer, ": it must be an object")
        for name, needed in value.items():
            schema = {"required": needed} if isinstance(needed, list) else needed
            if schema not in (True, {}, {"required": []}):
                yield _any_of([{"properties": {name: False}}, _all_of([{"required": [name]}, schema])])

    def _contains(self, schema: dict[str, Any], pointer: str) -> Iterator[Any]:
        item, least, most = schema["contains"], schema.get("minContains", 1), schema.get("maxContains")
        if not isinstance(least, int) or not isinstance(most, int | None):
            raise UnsupportedKeywordError(
                "contains", pointer, ": minContains and maxContains must be integers"
            )
        if item in (True, {}):
            yield {"minItems": least} if most is None else {"minItems": least, "maxItems": most}
            return
        if most is None and least <= 0:
            return
        other: Any = True
        if most is not None:
            other = _any_of(self._negations(item, f"{pointer}/contains"))
        largest = least if most is None else most
        if max(least, largest) > MAX_POSITIONS:
            raise UnsupportedKeywordError("contains", pointer, f" for more than {MAX_POSITIONS} items")
        counts = range(least, largest + 1)
        num_positions = MAX_POSITIONS
        while sum(comb(num_positions, count) for count in counts) > MAX_CASES and num_positions > largest:
            num_positions -= 1
        arrays: list[Any] = []
        for count in counts:
            for positions in itertools.combinations(range(num_positions), count):
                length = max(positions, default=-1) + 1
                prefix = [item if index in positions else other for index in range(length)]
                array = {"type": "array", "prefixItems": prefix, "minItems": length}
                arrays.append({**array, "items": other} if most is not None else array)
        yield _any_of([_other_types("array"), *arrays])

    def _unique_items(self, schema: dict[str, Any], pointer: str) -> Iterator[Any]:
        most, least = schema.get("maxItems"), schema.get("minItems", 0)
        if isinstance(most, int) and most <= 1:
            return
        values = None if "prefixItems" in schema else self._finite_values(schema.get("items"))
        if values is None or not isinstance(least, int):
            reason = " unless the items have an enum, or maxItems is 1"
            raise UnsupportedKeywordError("uniqueItems", pointer, reason)
        longest = min(most, len(values)) if isinstance(most, int) else len(values)
        lengths = range(max(least, 0), longest + 1)
        for choose in (itertools.permutations, itertools.combinations):  # the latter in the order of the enum
            sequences = [
                list(sequence)
                for sequence in itertools.islice(
                    itertools.chain.from_iterable(choose(values, length) for length in lengths),
                    MAX_SEQUENCES + 1,
                )
            ]
            if len(sequences) <= MAX_SEQUENCES:
                self._spend(len(sequences), pointer)
                arrays = [{"enum": sequences}] if sequences else []
                yield _any_of([_other_types("array"), *arrays])
                return
        raise UnsupportedKeywordError("uniqueItems", pointer, ": the items' enum has too many values")

    def _finite_values(self, schema: Any) -> list[Any] | None:
        """Return the distinct values of a schema that lists them, or None."""
        if not isinstance(schema, dict):
            return None
        if "$ref" in schema and len(schema) == 1:
            values: list[Any] | None = self._following(schema["$ref"], "", self._finite_values)
            return values
        keywords = {keyword for keyword in schema if not self.is_annotation(keyword)}
        if keywords == {"const"}:
            return [schema["const"]]
        if keywords == {"type"} and schema["type"] == "boolean":
            return [True, False]
        listed = schema.get("enum")
        if not isinstance(listed, list) or keywords - {"enum", "type"}:
            return None
        kind = schema.get("type")
        if kind is not None and not all(_type_of(value) == kind for value in listed):
            return None
        return list({_canonical(value): value for value in listed}.values())

    def _property_names(self, names: Any, pointer: str) -> Iterator[Any]:
        """Yield object schemas that allow only properties whose names match a schema."""
        if names is False:
            yield {"additionalProperties": False}
            return
        if not isinstance(names, dict):
            raise UnsupportedKeywordError("propertyNames", pointer, ": it must be a schema")
        if "$ref" in names:
            yield from self._following(
                names["$ref"], pointer, lambda part: list(self._property_names(part, pointer))
            )
        if "minLength" in names or "maxLength" in names:
            least, most = (
                _integral(keyword, names.get(keyword, default))
                for keyword, default in (("minLength", 0), ("maxLength", ""))
            )
            if not isinstance(least, int) or not isinstance(most, int | str):
                raise UnsupportedKeywordError("propertyNames", pointer, ": lengths must be integers")
            yield _only_names_like(f"^(?s:.){{{least},{most}}}$")
        for keyword, value in names.items():
            if keyword == "pattern" and isinstance(value, str):
                yield _only_names_like(value)
            elif keyword == "const" or (keyword == "enum" and isinstance(value, list)):
                texts = [text for text in ([value] if keyword == "const" else value) if isinstance(text, str)]
                yield {"properties": dict.fromkeys(texts, True), "additionalProperties": False}
            elif keyword == "type" and "string" not in ([value] if isinstance(value, str) else value):
                yield {"additionalProperties": False}
            elif keyword == "not" and isinstance(value, dict) and value.keys() in ({"const"}, {"enum"}):
                texts = [value["const"]] if "const" in value else value["enum"]
                yield {"properties": {text: False for text in texts if isinstance(text, str)}}
            elif keyword not in ("minLength", "maxLength", "type", "$ref") and not self.is_annotation(
                keyword
            ):
                raise UnsupportedKeywordError("propertyNames", pointer, f" with {keyword!r}")

    def _exclusive(self, branches: list[Any], pointer: str) -> Any:
        """Return a schema that exactly one of the branches matches, or None if that cannot be expressed."""
        try:
            negated = [_any_of(self._negations(branch, pointer)) for branch in branches]
        except UnsupportedKeywordError:
            return None
        return _any_of(
            [
                _all_of([branch, *negated[:index], *negated[index + 1 :]])
                for index, branch in enumerate(branches)
            ]
        )

    # ---- references ----

    def _resolve(self, reference: Any, pointer: str) -> Any:
        """Return the part of the document that a reference points to."""
        part = self.root
        if self._has_inner_ids:
            raise UnsupportedKeywordError("$ref", pointer, " here, in a schema with several $id")
        if (
            not isinstance(reference, str)
            or not reference.startswith(("#/", "#"))
            or reference[1:2] not in "/"
        ):
            raise UnsupportedKeywordError("$ref", pointer, f" here: {shown(reference)} is not a JSON pointer")
        for name in unquote(reference).split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            try:
                part = part[int(name)] if isinstance(part, list) else part[name]
            except (KeyError, IndexError, ValueError, TypeError):
                raise UnsupportedKeywordError(
                    "$ref", pointer, f": {shown(reference)} does not exist"
                ) from None
        return part

    def _following(self, reference: Any, pointer: str, use: Callable[[Any], Any]) -> Any:
        """Call `use` with the part that a reference points to, which must not lead back to itself."""
        part = self._resolve(reference, pointer)
        if reference in self._references:
            raise UnsupportedKeywordError("$ref", pointer, f" here: {shown(reference)} refers back to itself")
        self._references.append(reference)
        try:
            return use(part)
        finally:
            self._references.pop()

    def _dynamic_reference(self, reference: Any, pointer: str) -> Any:
        """Return a plain reference, which means the same if no two parts have that dynamic anchor."""
        anchor = str(reference).rpartition("#")[2]
        if self._dynamic_anchors[anchor] > 1:
            raise UnsupportedKeywordError("$dynamicRef", pointer, ": several parts have its anchor")
        return {"$ref": reference}

    # ---- unevaluated properties and items ----

    def _unevaluated(self, keyword: str, schema: dict[str, Any], pointer: str) -> Any:
        is_items = keyword == "unevaluatedItems"
        others = {name: value for name, value in schema.items() if name != keyword}
        cases = self._evaluated(others, is_items, pointer)
        closed = []
        for case in cases:
            closure: Any = True
            if is_items and not case.all:
                closure = {"prefixItems": [True] * case.num_items, "items": schema[keyword]}
            elif not case.all:
                closure = {
                    "properties": dict.fromkeys(case.names, True),
                    "patternProperties": dict.fromkeys(sorted(case.patterns), True),
                    "additionalProperties": schema[keyword],
                }
            closed.append(_all_of([*case.conditions, closure]))
        return _any_of(closed)

    def _evaluated(self, schema: Any, is_items: bool, pointer: str) -> list[_Evaluated]:
        """Return what a schema evaluates in each of the cases that its conditions distinguish."""
        self._spend(1, pointer)
        if not isinstance(schema, dict):
            return [_Evaluated()]
        keyword = "unevaluatedItems" if is_items else "unevaluatedProperties"
        if is_items:
            if "contains" in schema:
                raise UnsupportedKeywordError(keyword, pointer, " beside contains")
            is_all = "items" in schema or keyword in schema
            own = _Evaluated(num_items=len(schema.get("prefixItems", ())), all=is_all)
        else:
            is_all = "additionalProperties" in schema or keyword in schema
            names, patterns = schema.get("properties", ()), schema.get("patternProperties", ())
            own = _Evaluated(names=tuple(names), patterns=frozenset(patterns), all=is_all)
        cases = [own]

        def product(cases: list[_Evaluated], others: Iterable[_Evaluated]) -> list[_Evaluated]:
            others = list(others)
            if len(cases) * len(others) > MAX_CASES:
                raise UnsupportedKeywordError(keyword, pointer, ": its schema has too many cases")
            return [case.and_(other) for case in cases for other in others]

        def combine(alternatives: Iterable[_Evaluated]) -> None:
            cases[:] = product(cases, alternatives)

        def under(conditions: list[Any], schemas: list[Any]) -> list[_Evaluated]:
            """Return the cases of schemas that all hold, under further conditions."""
            joint = [_Evaluated(tuple(conditions))]
            for inner in schemas:
                joint = product(joint, self._evaluated(inner, is_items, pointer))
            return joint

        if "$ref" in schema:
            combine(self._following(schema["$ref"], pointer, lambda part: under([], [part])))
        if "$dynamicRef" in schema:
            raise UnsupportedKeywordError(keyword, pointer, " beside $dynamicRef")
        combine(under([], schema.get("allOf", [])))
        if "anyOf" in schema:
            branches = schema["anyOf"]
            if len(branches) > 4:
                raise UnsupportedKeywordError(keyword, pointer, ": anyOf beside it has too many branches")
            subsets = (
                list(subset)
                for size in range(1, len(branches) + 1)
                for subset in itertools.combinations(branches, size)
            )
            combine(case for subset in subsets for case in under(subset, subset))
        if "oneOf" in schema:
            combine(case for branch in schema["oneOf"] for case in under([branch], [branch]))
        if "if" in schema:
            condition, then, otherwise = schema["if"], schema.get("then", True), schema.get("else", True)
            negated = _any_of(self._negations(condition, f"{pointer}/if"))
            combine([*under([condition, then], [condition, then]), *under([negated, otherwise], [otherwise])])
        for name, inner in schema.get("dependentSchemas", {}).items():
            absent = _Evaluated(({"properties": {name: False}},))
            combine([absent, *under([{"required": [name]}, inner], [inner])])
        return cases

    # ---- negation ----

    def _negations(self, schema: Any, pointer: str) -> list[Any]:
        """Return schemas that together match the values that a schema does not match."""
        self._spend(1, pointer)
        if isinstance(schema, bool):
            return [] if schema else [True]
        if not isinstance(schema, dict):
            raise UnsupportedKeywordError("not", pointer, ": it must be a schema")
        negations: list[Any] = []
        for keyword, value in schema.items():
            negations += self._negations_of(keyword, _integral(keyword, value), schema, pointer)
        if len(negations) > MAX_CASES:
            raise UnsupportedKeywordError("not", pointer, ": it has too many cases")
        return negations

    def _negations_of(self, keyword: str, value: Any, schema: dict[str, Any], pointer: str) -> list[Any]:
        """Return the negations of one keyword. Values that other keywords exclude may be missing."""
        negate = self._negations
        if (
            self.is_annotation(keyword)
            or keyword in ("$defs", "definitions")
            or has_no_effect(keyword, value)
        ):
            return []
        match keyword:
            case "type":
                return _outside_types([value] if isinstance(value, str) else value)
            case "const":
                return self._outside_values([value], pointer)
            case "enum":
                return self._outside_values(value, pointer)
            case "pattern":
                return _outside_pattern(value, pointer)
            case "required":
                return [{"type": "object", "properties": {name: False}} for name in value]
            case "properties":
                return [
                    {"type": "object", "properties": {name: _any_of(negated)}, "required": [name]}
                    for name, inner in value.items()
                    if (negated := negate(inner, pointer))
                ]
            case "prefixItems":
                return [
                    item for i, inner in enumerate(value) for item in _with_item(i, negate(inner, pointer))
                ]
            case "items" if not isinstance(value, list):
                first = len(schema.get("prefixItems", ()))
                if value is False:
                    return [{"type": "array", "minItems": first + 1}]
                negated = negate(value, pointer)
                return [item for i in range(MAX_POSITIONS) for item in _with_item(first + i, negated)]
            case "contains":
                if schema.get("minContains", 1) != 1 or "maxContains" in schema:
                    raise UnsupportedKeywordError(
                        "contains", pointer, " with minContains or maxContains here"
                    )
                return [{"type": "array", "items": _any_of(negate(value, pointer))}]
            case "allOf":
                return [each for inner in value for each in negate(inner, pointer)]
            case "anyOf":
                return [_all_of([_any_of(negate(inner, pointer)) for inner in value])]
            case "oneOf":
                none = _all_of([_any_of(negate(inner, pointer)) for inner in value])
                return [none, *(_all_of(list(pair)) for pair in itertools.combinations(value, 2))]
            case "not":
                return [value]
            case "if":
                met = [value, _any_of(negate(schema.get("then", True), pointer))]
                unmet = [
                    _any_of(negate(value, pointer)),
                    _any_of(negate(schema.get("else", True), pointer)),
                ]
                return [_all_of(met), _all_of(unmet)]
            case "dependentRequired":
                return [
                    {"type": "object", "required": [name], "properties": {needed: False}}
                    for name, names in value.items()
                    for needed in names
                ]
            case "$ref":
                negations: list[Any] = self._following(value, pointer, lambda part: negate(part, pointer))
                return negations
            case "additionalProperties" | "unevaluatedProperties" | "unevaluatedItems" | "items" if value in (
                True,
                {},
            ):
                return []
            case "minContains" | "maxContains" | "then" | "else":
                return []
        if keyword in _OPPOSITES and isinstance(value, int | float) and not isinstance(value, bool):
            kind, opposite, step = _OPPOSITES[keyword]
            bound = value + step
            if kind != "number" and bound < 0:
                return []
            if opposite != "minProperties" or bound <= 1:  # more than one could be repeated names
                return [{"type": kind, opposite: bound}]
        raise UnsupportedKeywordError(keyword, pointer, " here")

    def _outside_values(self, values: list[Any], pointer: str) -> list[Any]:
        """Return schemas for everything but some values."""
        by_type: dict[str, list[Any]] = {kind: [] for kind in TYPES}
        for value in values:
            by_type["number" if _type_of(value) == "integer" else _type_of(value)].append(value)
        free = [kind for kind in TYPES if not by_type[kind]]
        schemas: list[Any] = [{"type": free}] if free else []
        if len(set(by_type["boolean"])) == 1:
            schemas.append({"const": not by_type["boolean"][0]})
        if by_type["number"]:
            schemas += _between(sorted(set(by_type["number"])))
        if by_type["string"]:
            if sum(map(len, by_type["string"])) > MAX_WORD_CHARACTERS:
                raise UnsupportedKeywordError("enum", pointer, " here: its strings are too long")
            schemas.append({"type": "string", "pattern": f"^{_pattern_outside(set(by_type['string']))}$"})
        for kind in ("array", "object"):
            if by_type[kind]:
                outside = [_any_of(self._outside_container(value, pointer)) for value in by_type[kind]]
                schemas.append(_all_of([{"type": kind}, *outside]))
        return schemas

    def _outside_container(self, value: Any, pointer: str) -> list[Any]:
        if isinstance(value, list):
            items = [{"const": item} for item in value]
            as_schema = {"minItems": len(value), "maxItems": len(value), "prefixItems": items}
            return self._negations(as_schema, pointer)
        if not value:
            return [{"minProperties": 1}]
        properties = {name: {"const": inner} for name, inner in value.items()}
        return self._negations({"required": list(value), "properties": properties}, pointer)


def _cost(schema: dict[str, Any]) -> int:
    """Return the cost of a copy of a schema without those in it."""
    size = 0
    for keyword, value in schema.items():
        if keyword in NAMED_SCHEMAS and isinstance(value, dict):
            size += sum(map(len, value))
        elif keyword not in SCHEMA_LISTS | SCHEMA_KEYWORDS:
            size += len(value) if isinstance(value, str) else len(repr(value))
    return 1 + size // 64


def _is_replaced(keyword: str, value: Any) -> bool:
    return keyword in REPLACED or (keyword == "format" and isinstance(value, str) and value in _FORMATS)


def _integral(keyword: str, value: Any) -> Any:
    """Return a number such as 2.0 as an integer where the keyword needs one."""
    is_integral = keyword in _INTEGER_KEYWORDS and isinstance(value, float) and value.is_integer()
    return int(value) if is_integral else value


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


def _any_of(schemas: list[Any]) -> Any:
    schemas = [schema for schema in schemas if schema is not False]
    if True in schemas or {} in schemas:
        return True
    if not schemas:
        return False
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _all_of(schemas: list[Any]) -> Any:
    schemas = [schema for schema in schemas if schema is not True and schema != {}]
    if False in schemas:
        return False
    if not schemas:
        return True
    return schemas[0] if len(schemas) == 1 else {"allOf": schemas}


def _other_types(kind: str) -> dict[str, Any]:
    return {"type": [other for other in TYPES if other != kind]}


def _outside_types(types: list[str]) -> list[Any]:
    """Return a schema of all other types. Numbers that are no integers cannot be told apart, and are left out."""
    excluded = {"number" if kind == "integer" else kind for kind in types}
    others = [kind for kind in TYPES if kind not in excluded]
    return [{"type": others}] if others else []


def _only_names_like(pattern: str) -> dict[str, Any]:
    return {"patternProperties": {pattern: True}, "additionalProperties": False}


def _with_item(index: int, schemas: list[Any]) -> list[Any]:
    if not schemas:
        return []
    prefix = [True] * index + [_any_of(schemas)]
    return [{"type": "array", "prefixItems": prefix, "minItems": index + 1}]


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    kinds: dict[type, str] = {float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def _canonical(value: Any) -> str:
    """Return the same text for values that JSON Schema considers equal."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return f"[{','.join(map(_canonical, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{json.dumps(name)}:{_canonical(value[name])}' for name in sorted(value))}}}"
    return json.dumps(value)


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
    if not text and not match[2]:
        return []
    outside = _pattern_outside({text}) if match[2] else _pattern_without_prefix(text)
    return [{"type": "string", "pattern": f"^{outside}$"}]


def _pattern_outside(words: set[str]) -> str:
    """Return a pattern for all texts except some words."""
    continuations: dict[str, set[str]] = {}
    for word in words - {""}:
        continuations.setdefault(word[0], set()).add(word[1:])
    others = f"[^{''.join(map(_escaped, sorted(continuations)))}]" if continuations else "(?s:.)"
    ways = [f"{others}{_ANY_TEXT}"]
    ways += [
        f"{_escaped(character)}{_pattern_outside(rest)}" for character, rest in sorted(continuations.items())
    ]
    return f"(?:{'|'.join(ways)}){'' if '' in words else '?'}"


def _pattern_without_prefix(prefix: str) -> str:
    """Return a pattern for all texts that do not begin with a prefix."""
    pattern = ""
    for character in reversed(prefix):
        rest = f"|{_escaped(character)}{pattern}" if pattern else ""
        pattern = f"(?:[^{_escaped(character)}]{_ANY_TEXT}{rest})?"
    return pattern


def _escaped(character: str) -> str:
    return f"\\{character}" if character in r"\.+*?()|[]{}^$#&-~/" else character
