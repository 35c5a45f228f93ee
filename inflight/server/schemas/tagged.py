"""Items of several kinds in one list, told apart by their `type`."""

from __future__ import annotations

from typing import Any

from pydantic import Discriminator, model_validator

from inflight.server.schemas.common import Body


class ReturnedPart(Body):
    """A part of a conversation. What a client got in an answer it may send back as it was: null is nothing."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}


def by_type(allowed: str, default: str | None = None) -> Discriminator:
    """Tells the members of a union apart, each of which is tagged with its type in angle brackets: no parameter is
    named so, and messages leave them out. `default` is the type of a part that does not say."""

    def tag(given: Any) -> str:
        kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
        return f"<{kind or default}>"

    return Discriminator(tag, custom_error_type="unsupported_type", custom_error_message=allowed)
