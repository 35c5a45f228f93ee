"""Expresses `not`, `if`, `contains` and other keywords that llguidance lacks by keywords that it has.

A keyword is replaced by a schema in `allOf`, usually an `anyOf` of cases, most of which need a schema's negation
(`schema_negation.py`). The result may match less than the original, but never more: an array with `contains` has a
matching item among its first `MAX_POSITIONS`, for example. A keyword that cannot be expressed in a reasonable size
raises UnsupportedKeywordError.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import comb
from typing import Any

from inflight.constraints.schema_document import (
    MAX_COST,
    NAMED_SCHEMAS,
    SCHEMA_KEYWORDS,
    SCHEMA_LISTS,
    SchemaDocument,
    UnsupportedKeywordError,
    all_of,
    any_of,
    cost_of,
    has_no_effect,
    integral,
    is_annotation,
    other_types,
    type_of,
)
from inflight.constraints.schema_negation import MAX_CASES, MAX_POSITIONS, Negation
from inflight.errors import clipped

# Keywords that `expand` replaces.
REPLACED = {
    *("$dynamicRef", "contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "if"),
    *("maxContains", "minContains", "not", "propertyNames", "then", "unevaluatedItems"),
    *("unevaluatedProperties", "uniqueItems"),
}

_NAME_KEYWORDS = ("minLength", "maxLength", "type", "$ref")  # in propertyNames, beside those that need cases
MAX_SEQUENCES = 400  # of the distinct items of one array
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


def expand(root: Any, one_of: bool = False) -> Any:
    """Return an equivalent copy of a schema without the keywords that llguidance lacks.

    With `one_of`, alternatives of oneOf that may overlap are made exclusive too, where that is possible. Raises
    UnsupportedKeywordError.
    """
    return _Expansion(SchemaDocument(root), one_of).expand(root, "#")


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


class _Expansion:
    """Replaces the keywords of one document."""

    def __init__(self, document: SchemaDocument, one_of: bool) -> None:
        self._document = document
        self._negation = Negation(document)
        self._one_of = one_of
        self._dynamic_anchors = Counter(str(part.get("$dynamicAnchor")) for part in document.parts)

    def expand(self, schema: Any, pointer: str) -> Any:
        if not isinstance(schema, dict):
            return schema
        self._document.spend(cost_of(schema), pointer)
        schema = {keyword: integral(keyword, value) for keyword, value in schema.items()}
        additions = list(self._replacements(schema, pointer))
        kept = {keyword: value for keyword, value in schema.items() if not _is_replaced(keyword, value)}
        if "$dynamicAnchor" in kept:
            kept.setdefault("$anchor", kept.pop("$dynamicAnchor"))
        if self._one_of and isinstance(kept.get("oneOf"), list):
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
            return {
                name: self.expand(inner, f"{pointer}/{keyword}/{clipped(name, 100)}")
                for name, inner in value.items()
            }
        if keyword in SCHEMA_LISTS and isinstance(value, list):
            return [self.expand(inner, f"{pointer}/{keyword}/{i}") for i, inner in enumerate(value)]
        return self.expand(value, f"{pointer}/{keyword}") if keyword in SCHEMA_KEYWORDS else value

    # ---- one schema's keywords ----

    def _replacements(self, schema: dict[str, Any], pointer: str) -> Iterator[Any]:
        """Yield schemas that together allow what the replaced keywords of a schema allow."""
        for keyword, value in schema.items():
            if not _is_replaced(keyword, value) or has_no_effect(keyword, value):
                continue
            if keyword in ("minContains", "maxContains", "then", "else"):  # handled with contains and if
                continue
            self._document.keyword = keyword
            if keyword == "not":
                yield self._negation.negated(value, f"{pointer}/not")
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
        return any_of(
            [
                all_of([condition, schema.get("then", True)]),
                all_of([self._negation.negated(condition, f"{pointer}/if"), schema.get("else", True)]),
            ]
        )

    def _dependent(self, keyword: str, value: Any, pointer: str) -> Iterator[Any]:
        if not isinstance(value, dict):
            raise UnsupportedKeywordError(keyword, pointer, ": it must be an object")
        for name, needed in value.items():
            schema = {"required": needed} if isinstance(needed, list) else needed
            if schema not in (True, {}, {"required": []}):
                yield any_of([{"properties": {name: False}}, all_of([{"required": [name]}, schema])])

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
            other = self._negation.negated(item, f"{pointer}/contains")
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
        yield any_of([other_types("array"), *arrays])

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
                self._document.spend(len(sequences), pointer)
                arrays = [{"enum": sequences}] if sequences else []
                yield any_of([other_types("array"), *arrays])
                return
        raise UnsupportedKeywordError("uniqueItems", pointer, ": the items' enum has too many values")

    def _finite_values(self, schema: Any) -> list[Any] | None:
        """Return the distinct values of a schema that lists them, or None."""
        if not isinstance(schema, dict):
            return None
        if "$ref" in schema and len(schema) == 1:
            return self._document.follow(schema["$ref"], "", self._finite_values)
        keywords = {keyword for keyword in schema if not is_annotation(keyword)}
        if keywords == {"const"}:
            return [schema["const"]]
        if keywords == {"type"} and schema["type"] == "boolean":
            return [True, False]
        listed = schema.get("enum")
        if not isinstance(listed, list) or keywords - {"enum", "type"}:
            return None
        type_name = schema.get("type")
        if type_name is not None and not all(type_of(value) == type_name for value in listed):
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
            yield from self._document.follow(
                names["$ref"], pointer, lambda part: list(self._property_names(part, pointer))
            )
        if "minLength" in names or "maxLength" in names:
            least, most = (
                integral(keyword, names.get(keyword, default))
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
            elif keyword not in _NAME_KEYWORDS and not is_annotation(keyword):
                raise UnsupportedKeywordError("propertyNames", pointer, f" with {keyword!r}")

    def _exclusive(self, branches: list[Any], pointer: str) -> Any:
        """Return a schema that exactly one of the branches matches, or None if that cannot be expressed."""
        if len(branches) ** 2 > MAX_COST:  # each branch stands beside the negations of all others
            return None
        try:
            negated = [self._negation.negated(branch, pointer) for branch in branches]
        except UnsupportedKeywordError:
            return None
        return any_of(
            [
                all_of([branch, *negated[:index], *negated[index + 1 :]])
                for index, branch in enumerate(branches)
            ]
        )

    # ---- references ----

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
            closed.append(all_of([*case.conditions, closure]))
        return any_of(closed)

    def _evaluated(self, schema: Any, is_items: bool, pointer: str) -> list[_Evaluated]:
        """Return what a schema evaluates in each of the cases that its conditions distinguish."""
        self._document.spend(1, pointer)
        if not isinstance(schema, dict):
            return [_Evaluated()]
        keyword = "unevaluatedItems" if is_items else "unevaluatedProperties"
        if is_items:
            if "contains" in schema:
                raise UnsupportedKeywordError(keyword, pointer, " beside contains")
            is_all = "items" in schema or keyword in schema
            evaluated = _Evaluated(num_items=len(schema.get("prefixItems", ())), all=is_all)
        else:
            is_all = "additionalProperties" in schema or keyword in schema
            names, patterns = schema.get("properties", ()), schema.get("patternProperties", ())
            evaluated = _Evaluated(names=tuple(names), patterns=frozenset(patterns), all=is_all)
        cases = [evaluated]

        def product(cases: list[_Evaluated], others: Iterable[_Evaluated]) -> list[_Evaluated]:
            others = list(others)
            if len(cases) * len(others) > MAX_CASES:
                raise UnsupportedKeywordError(keyword, pointer, ": its schema has too many cases")
            self._document.spend(sum(len(case.names) for case in cases) // 64, pointer)  # they are copied
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
            combine(self._document.follow(schema["$ref"], pointer, lambda part: under([], [part])))
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
            negated = self._negation.negated(condition, f"{pointer}/if")
            combine([*under([condition, then], [condition, then]), *under([negated, otherwise], [otherwise])])
        for name, inner in schema.get("dependentSchemas", {}).items():
            absent = _Evaluated(({"properties": {name: False}},))
            combine([absent, *under([{"required": [name]}, inner], [inner])])
        return cases


def _is_replaced(keyword: str, value: Any) -> bool:
    return keyword in REPLACED or (keyword == "format" and isinstance(value, str) and value in _FORMATS)


def _canonical(value: Any) -> str:
    """Return the same text for values that JSON Schema considers equal."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return f"[{','.join(map(_canonical, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{json.dumps(name)}:{_canonical(value[name])}' for name in sorted(value))}}}"
    return json.dumps(value)


def _only_names_like(pattern: str) -> dict[str, Any]:
    return {"patternProperties": {pattern: True}, "additionalProperties": False}
