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
