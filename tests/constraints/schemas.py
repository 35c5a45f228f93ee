"""Random JSON schemas like those that users write."""

from __future__ import annotations

import random
from typing import Any

PATTERNS = ("^[a-c]+$", "^x\\d{2}$", "^(foo|bar)-\\w{1,4}$", "^a?b?$")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4")
CONSTANTS: tuple[Any, ...] = ("a", "b c", 1, None, True, 'é"\n', {"x": [1, {}]}, 2.5, [])
LEAVES = ("type", "enum", "const", "length", "range", "pattern", "format")
NODES = ("object", "object", "array", "tuple", "anyOf", "allOf", "oneOf", "named", "counted")


def schema(generator: random.Random, depth: int = 0) -> dict[str, Any]:
    kind = generator.choice(LEAVES if depth > 2 else LEAVES + NODES)
    made = _leaf(kind, generator) if kind in LEAVES else _node(kind, generator, depth + 1)
    if depth == 0 and generator.random() < 0.3:
        made = _tree(made)
    if generator.random() < 0.3:
        made |= {"title": "T", "description": 'of "it"', "default": None, "x-note": 1}
    return made


def _leaf(kind: str, generator: random.Random) -> dict[str, Any]:
    low, more = generator.randint(-20, 20), generator.randint(0, 30)
    match kind:
        case "type":
            return {
                "type": generator.choice(
                    ("string", "integer", "number", "boolean", "null", ["string", "null"])
                )
            }
        case "enum":
            return {"enum": generator.sample(CONSTANTS, 3)}
        case "const":
            return {"const": generator.choice(CONSTANTS)}
        case "length":
            return {"type": "string", "minLength": abs(low) // 4, "maxLength": abs(low) // 4 + more // 4}
        case "range":
            bounds = {"minimum": low, "exclusiveMaximum": low + more + 1}
            return {"type": generator.choice(("integer", "number")), **bounds}
        case "pattern":
            return {"type": "string", "pattern": generator.choice(PATTERNS)}
    return {"type": "string", "format": generator.choice(FORMATS)}


def _node(kind: str, generator: random.Random, depth: int) -> dict[str, Any]:
    def inner() -> dict[str, Any]:
        return schema(generator, depth)

    names = [f"{generator.choice('abcé_ ')}{i}" for i in range(generator.randint(0, 4))]
    match kind:
        case "object":
            rest = generator.choice((True, False, False, {"type": "integer"}))
            required = [name for name in names if generator.random() < 0.6]
            properties = {name: inner() for name in names}
            return {
                "type": "object",
                "properties": properties,
                "required": required,
                "additionalProperties": rest,
            }
        case "counted":
            return {"type": "object", "additionalProperties": inner(), "minProperties": 1, "maxProperties": 2}
        case "named":
            return {
                "type": "object",
                "patternProperties": {"^k[0-9]$": inner()},
                "additionalProperties": False,
            }
        case "array":
            few = generator.randint(0, 2)
            return {"type": "array", "items": inner(), "minItems": few, "maxItems": few + 2}
        case "tuple":
            return {"type": "array", "prefixItems": [inner(), inner()], "items": False, "minItems": 1}
        case "allOf":
            return {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}], "$comment": "both"}
        case "oneOf":
            tags = ({"type": "object", "properties": {"t": {"const": t}}, "required": ["t"]} for t in "ab")
            return {"oneOf": list(tags)}
    return {"anyOf": [inner(), inner()]}


def _tree(leaf: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that refers to itself."""
    children = {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}
    properties = {"value": leaf, "children": children}
    node = {"type": "object", "properties": properties, "required": ["value"], "additionalProperties": False}
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}


def logical_schema(generator: random.Random, depth: int = 0) -> Any:
    """Return a random schema with conditions and negations, over a few names and values that instances have too."""

    def inner() -> Any:
        return logical_schema(generator, depth + 1)

    if depth > 2 or generator.random() < 0.2:
        return _logical_leaf(generator)
    name, other = generator.sample("abc", 2)
    match generator.randrange(12):
        case 0:
            return {"not": inner()}
        case 1:
            made = {"if": inner(), "then": inner(), "else": inner()}
            del made[generator.choice(("then", "else"))]
            return made
        case 2:
            return {"type": "array", "contains": inner(), "minContains": generator.randint(0, 2)}
        case 3:
            return {"type": "array", "contains": _logical_leaf(generator), "maxContains": 1}
        case 4:
            values = generator.sample(SMALL_VALUES, 3)
            return {"type": "array", "items": {"enum": values}, "uniqueItems": True}
        case 5:
            return {"type": "object", "dependentRequired": {name: [other]}, "properties": {name: inner()}}
        case 6:
            return {"type": "object", "dependentSchemas": {name: inner()}, "properties": {other: inner()}}
        case 7:
            rule = generator.choice(({"pattern": "^[ab]"}, {"enum": ["a", "c"]}, {"maxLength": 1}, False))
            return {"type": "object", "propertyNames": rule, "properties": {"a": inner()}}
        case 8:
            branches = [{"properties": {name: inner()}, "required": [name]}, {"properties": {other: inner()}}]
            keyword = generator.choice(("allOf", "anyOf", "oneOf"))
            return {"type": "object", keyword: branches, "unevaluatedProperties": False}
        case 9:
            rest = generator.choice((False, {"type": "null"}))
            return {"type": "array", "anyOf": [{"prefixItems": [inner()]}, inner()], "unevaluatedItems": rest}
        case 10:
            return {generator.choice(("oneOf", "anyOf", "allOf")): [inner(), inner()]}
    return {"properties": {name: inner(), other: inner()}, "required": [name]}


SMALL_VALUES: tuple[Any, ...] = (None, True, False, 0, 1, 2.5, "", "a", "ab", [], [0], {}, {"a": 1})


def _logical_leaf(generator: random.Random) -> Any:
    match generator.randrange(7):
        case 0:
            return generator.choice((True, False, {}))
        case 1:
            return {"type": generator.choice(("string", "integer", "number", "boolean", "null", "array"))}
        case 2:
            return {"enum": generator.sample(SMALL_VALUES, 2)}
        case 3:
            return {"const": generator.choice(SMALL_VALUES)}
        case 4:
            return {generator.choice(("minimum", "exclusiveMaximum")): 1}
        case 5:
            return {generator.choice(("minLength", "maxLength", "minItems", "maxItems")): 1.0}
    return {"required": [generator.choice("abc")]}


def small_value(generator: random.Random, depth: int = 0) -> Any:
    """Return a random value of the kinds that logical schemas distinguish, with properties in alphabetical order."""
    kind = generator.random()
    if depth > 1 or kind < 0.4:
        return generator.choice(SMALL_VALUES)
    if kind < 0.65:
        return [small_value(generator, depth + 1) for _ in range(generator.randint(0, 3))]
    return {name: small_value(generator, depth + 1) for name in "abc" if generator.random() < 0.5}
