"""What bodies may say about the text of their answers."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from inflight.server.schemas.common import Body, GenerationBody, Items

GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


class JsonSchemaFormat(Body):
    name: str | None = Field(None, max_length=256)
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(
        None, alias="schema", description="Any object, if there is none."
    )
    strict: bool | None = Field(None, description="Answers match the schema in any case.")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: Items[dict[str, Any]] | None = Field(None, description="Of a structural tag.")
    triggers: Items[str] | None = Field(None, description="Of a structural tag.")


class ConstrainedBody(GenerationBody):
    """At most one of these. Those that begin with guided are older names."""

    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = Field(
        None, description="One of json, regex, choice, grammar, json_object and structural_tag."
    )
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: Items[str] | None = None
    guided_grammar: str | None = None
