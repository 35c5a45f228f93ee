"""The grammar of a whole answer: Lark rules for its format, and the users' schemas within it.

Schemas are kept apart from the rules, so each can be checked like any other and an unusable one can be identified. A
strict schema that cannot be used is rejected by name; any other is loosened, and the model is trusted to follow it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from inflight.constraints.schema import check_schema
from inflight.constraints.schema_document import rewritten
from inflight.errors import ParameterError
from inflight.structured_outputs import PARAM

CONTENT = "content"  # the rule of the text outside of calls and reasoning, if that is constrained


@dataclass(frozen=True, slots=True)
class RuleSchema:
    """The schema of a rule that is JSON. With a `key`, the JSON is a call: `{"name": function, key: arguments}`."""

    schema: Any
    param: str  # the request's parameter that it comes from
    strict: bool = True
    loose: Any = True  # replaces a schema that cannot be used
    function: str = ""
    key: str = ""

    def whole(self, loosened: bool) -> Any:
        """Return the schema of all the JSON, including the call around the arguments."""
        schema = self.loose if loosened else self.schema
        if not self.key:
            return schema
        members = {"name": {"const": self.function}, self.key: _moved(schema, f"#/properties/{self.key}")}
        return {
            "type": "object",
            "properties": members,
            "required": list(members),
            "additionalProperties": False,
        }


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """The rules of an answer. One of them is `start`."""

    rules: tuple[str, ...]
    tokens: Mapping[str, int] = field(default_factory=dict)  # rules that are one token each
    schemas: Mapping[str, RuleSchema] = field(default_factory=dict)
    # Kind and text of a user's constraint in another language, which the rules refer to as @content.
    content: tuple[str, str] | None = None
    # Users' grammars in Lark, by the name that the rules refer to, each with the parameter that it comes from.
    grammars: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def param(self) -> str:
        """The parameter to blame if every schema is usable but the whole is not."""
        params = [schema.param for schema in self.schemas.values()]
        params += [param for param, _ in self.grammars.values()]
        return params[0].partition("[")[0] if params else PARAM

    @property
    def name(self) -> str:
        return f"{self.param}, together with the other constraints on the answer,"

    def text(self) -> str:
        """Serialize the rules for `StructuredOutputs.answer`."""
        names = [field.name for field in fields(RuleSchema)]
        schemas = {key: [getattr(schema, name) for name in names] for key, schema in self.schemas.items()}
        data = {"rules": self.rules, "tokens": self.tokens, "schemas": schemas, "content": self.content}
        return json.dumps({**data, "grammars": self.grammars}, separators=(",", ":"))

    @classmethod
    def read(cls, text: str) -> AnswerRules:
        data = json.loads(text)
        schemas = {name: RuleSchema(*schema) for name, schema in data["schemas"].items()}
        content = data["content"] and tuple(data["content"])
        grammars = {name: (param, lark) for name, (param, lark) in data["grammars"].items()}
        return cls(tuple(data["rules"]), data["tokens"], schemas, content, grammars)

    def unsupported(self) -> frozenset[str]:
        """Return the names of the schemas to loosen. Raises ParameterError if one of these is strict."""
        names = set()
        for name, schema in self.schemas.items():
            try:
                check_schema(schema.schema, schema.param, schema.param)
            except ParameterError:
                if schema.strict:
                    raise
                names.add(name)
        return frozenset(names)


def _moved(schema: Any, pointer: str) -> Any:
    """Return a copy of a schema for use at `pointer` in another, with its references to its own parts adjusted."""

    def change(keyword: str, value: Any) -> Any:
        is_pointer = isinstance(value, str) and (value == "#" or value.startswith("#/"))
        return pointer + value[1:] if is_pointer and keyword in ("$ref", "$dynamicRef") else value

    has_id = isinstance(schema, dict) and "$id" in schema  # then references are relative to it
    return schema if has_id else rewritten(schema, change)
