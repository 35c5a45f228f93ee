"""What a body says about the text of its answers, under whichever of its names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from inflight.errors import ParameterError
from inflight.sampling_params import SamplingParams
from inflight.server.errors import ApiError
from inflight.server.schemas.constraints import GUIDED, ConstrainedBody, ResponseFormat
from inflight.structured_outputs import PARAM, StructuredOutputs


@dataclass(frozen=True, slots=True)
class ContentConstraint:
    """A constraint, and where the client has written it."""

    kind: str  # of `StructuredOutputs`; empty if the value has all of them
    value: Any
    param: str
    place: str  # in the parameter, down to the value

    def structured_outputs(self) -> StructuredOutputs | None:
        with self.blamed():
            given: Any = {self.kind: self.value} if self.kind else self.value
            return SamplingParams(structured_outputs=given).structured_outputs

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Refusals name what the client has written, not what became of it."""
        try:
            yield
        except ParameterError as error:
            if error.param != PARAM:
                raise
            message = str(error)
            if self.kind:
                message = message.replace(f"{PARAM}.{self.kind}", self.place).replace(PARAM, self.param)
            raise ParameterError(message, param=self.param, code=error.code) from None


def read_constraint(body: ConstrainedBody) -> ContentConstraint | None:
    """The one constraint of a body. Raises ApiError if it has several."""
    found = [*_guided(body)]
    if body.structured_outputs is not None:
        found.append(ContentConstraint("", body.structured_outputs, PARAM, PARAM))
    if body.response_format is not None:
        found += of_format(body.response_format)
    if len(found) > 1:
        first, second = found[0].param, found[1].param
        message = f"{first} and {second} are both given: there can be one constraint"
        raise ApiError(400, message, code="invalid_value", param=second)
    return found[0] if found else None


def of_format(given: ResponseFormat) -> list[ContentConstraint]:
    """Nothing, or one."""
    name = "response_format"
    if given.type == "json_object":
        return [ContentConstraint("json_object", True, name, name)]
    if given.type == "json_schema":
        asked = given.json_schema
        if asked is None:
            message = "response_format.json_schema is missing: it has the schema"
            raise ApiError(400, message, code="missing_parameter", param="response_format.json_schema")
        if asked.schema_ is None:
            return [ContentConstraint("json_object", True, name, name)]
        return [ContentConstraint("json", asked.schema_, name, f"{name}.json_schema.schema")]
    if given.type == "structural_tag":
        tag = given.model_dump(include={"structures", "triggers"}, exclude_none=True)
        return [ContentConstraint("structural_tag", tag, name, name)]
    return []


def _guided(body: ConstrainedBody) -> Iterator[ContentConstraint]:
    for name in GUIDED:
        value = getattr(body, name)
        if value is not None:
            yield ContentConstraint(name.removeprefix("guided_"), value, name, name)
