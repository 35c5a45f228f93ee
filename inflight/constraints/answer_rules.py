"""The grammar of a whole answer: rules in Lark that a writer of formats made, and the users' schemas in them.

A schema stands apart from the rules, so that it can be checked like any other, and so that one that cannot be used is
found. A strict one is then refused by its name; one that is not is loosened, and the model is trusted with the rest.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import astuple, dataclass, field
from typing import Any

from inflight.constraints.schema import check_schema, rewritten
from inflight.errors import ParameterError
from inflight.structured_outputs import PARAM, StructuredOutputs

CONTENT = "content"  # the rule of what is no call and no thought, where that has a shape


@dataclass(frozen=True, slots=True)
class RuleSchema:
    """A rule that is JSON. With a `key` it is a call, `{"name": function, key: what the schema allows}`."""

    schema: Any
    param: str  # where a request has it
    strict: bool = True
    loose: Any = True  # the schema that stands in for one that cannot be used
    function: str = ""
    key: str = ""

    def check(self) -> None:
        """Raises ParameterError that names a keyword that is not supported."""
        check_schema(self.schema, self.param, self.param)

    def whole(self, loosened: bool) -> Any:
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
    """`start` is among the rules."""

    rules: tuple[str, ...]
    tokens: Mapping[str, int] = field(default_factory=dict)  # rules that are one token each
    schemas: Mapping[str, RuleSchema] = field(default_factory=dict)
    # What a user asked for in a language of its own, as kind and text: the rules refer to it as @content.
    content: tuple[str, str] | None = None

    @property
    def param(self) -> str:
        """The parameter to name in an error if every schema is usable but the whole is not."""
        return next((schema.param.partition("[")[0] for schema in self.schemas.values()), PARAM)

    @property
    def name(self) -> str:
        return f"{self.param}, with all else that shapes the answer,"

    def text(self) -> str:
        """For `StructuredOutputs.answer`."""
        schemas = {name: astuple(schema) for name, schema in self.schemas.items()}
        data = {"rules": self.rules, "tokens": self.tokens, "schemas": schemas, "content": self.content}
        return json.dumps(data, separators=(",", ":"))

    @classmethod
    def read(cls, text: str) -> AnswerRules:
        data = json.loads(text)
        schemas = {name: RuleSchema(*schema) for name, schema in data["schemas"].items()}
        content = data["content"] and tuple(data["content"])
        return cls(tuple(data["rules"]), data["tokens"], schemas, content)

    def unsupported(self) -> frozenset[str]:
        """Schemas to loosen. Raises ParameterError if one of these is strict."""
        found = set()
        for name, schema in self.schemas.items():
            try:
                schema.check()
            except ParameterError:
                if schema.strict:
                    raise
                found.add(name)
        return frozenset(found)

    def token_rules(self) -> list[str]:
        return [f"{name}: <[{token_id}]>" for name, token_id in self.tokens.items()]

    def whole_schemas(self, loosened: Collection[str]) -> dict[str, Any]:
        return {name: schema.whole(name in loosened) for name, schema in self.schemas.items()}

    @property
    def user_content(self) -> StructuredOutputs | None:
        if self.content is None:
            return None
        kind, text = self.content
        asked: Any = {kind: text}
        return StructuredOutputs(**asked)


def _moved(schema: Any, place: str) -> Any:
    """A copy of a schema that stands at a place in another, with references to its own parts."""

    def change(keyword: str, value: Any) -> Any:
        is_own = keyword == "$ref" and isinstance(value, str) and value.startswith("#")
        return place + value[1:] if is_own else value

    return rewritten(schema, change)
