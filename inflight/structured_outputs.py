"""`StructuredOutputs`: constraints on the text of an answer, with all checks that need no model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inflight.errors import ParameterError, shown

MAX_CONSTRAINT_LENGTH = 1 << 17  # characters
MAX_CHOICES = 4096
PARAM = "structured_outputs"
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")  # for users
_ALL_KINDS = (*KINDS, "answer")


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """A constraint that the whole text of an answer matches. Exactly one field is set."""

    json: str | bool | Mapping[str, Any] | None = None  # a JSON schema
    regex: str | None = None
    choice: Sequence[str] | None = None  # the answer is one of these texts
    grammar: str | None = None  # in Lark or GBNF syntax
    json_object: bool | None = None  # any JSON object
    structural_tag: str | Mapping[str, Any] | None = None  # {"structures": [...], "triggers": [...]}
    # A whole answer with reasoning and calls, serialized by `constraints/answer_rules.py`. Not for users.
    answer: str | None = None

    def __post_init__(self) -> None:
        if self.json_object is False:  # the same as None
            object.__setattr__(self, "json_object", None)
        kinds = [name for name in _ALL_KINDS if getattr(self, name) is not None]
        if len(kinds) != 1:
            raise _error(
                f"{PARAM} has {', '.join(kinds) or 'nothing'}: give exactly one of {', '.join(KINDS)}"
            )
        if self.json_object not in (None, True):
            raise _error(f"{PARAM}.json_object is {shown(self.json_object)}: it must be true or false")
        for name in ("regex", "grammar"):
            text = getattr(self, name)
            if text is not None and (not isinstance(text, str) or not text):
                raise _error(f"{PARAM}.{name} is {shown(text)}: it must be a non-empty string")
        self._normalise_choice()
        for name in ("json", "structural_tag"):
            self._normalise_json(name)
        size = len(self.text)
        if size > MAX_CONSTRAINT_LENGTH:
            raise ParameterError(
                f"{PARAM}.{self.kind} has {size} characters: at most {MAX_CONSTRAINT_LENGTH} are allowed",
                param=PARAM,
                code="constraint_too_complex",
            )
        if not self.text.isascii():
            try:
                self.text.encode()
            except UnicodeEncodeError:
                raise _error(f"{PARAM}.{self.kind} has a lone surrogate: it must be valid Unicode") from None

    def _normalise_choice(self) -> None:
        if self.choice is None:
            return
        if isinstance(self.choice, str | bytes | Mapping) or not isinstance(self.choice, Sequence):
            raise _error(f"{PARAM}.choice is {shown(self.choice)}: it must be a list of texts")
        if not 0 < len(self.choice) <= MAX_CHOICES:
            raise _error(f"{PARAM}.choice has {len(self.choice)} texts: it must have 1 to {MAX_CHOICES}")
        for text in self.choice:
            if not isinstance(text, str) or not text:
                raise _error(f"{PARAM}.choice has {shown(text)}: it must be a list of non-empty texts")
        object.__setattr__(self, "choice", tuple(self.choice))

    def _normalise_json(self, name: str) -> None:
        """Store JSON data as text, which can be sent and compared."""
        value = getattr(self, name)
        if value is None or isinstance(value, str):
            return
        if not isinstance(value, bool | Mapping) or (name != "json" and isinstance(value, bool)):
            raise _error(f"{PARAM}.{name} is {shown(value)}: it must be an object, or one as JSON text")
        try:
            text = json.dumps(value if isinstance(value, bool) else dict(value), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise _error(f"{PARAM}.{name} is not JSON data: {error}") from None
        object.__setattr__(self, name, text)

    @property
    def kind(self) -> str:
        return next(name for name in _ALL_KINDS if getattr(self, name) is not None)

    @property
    def text(self) -> str:
        """The constraint as text. Kind and text together are the key of a compiled grammar."""
        if self.choice is not None:
            return json.dumps(self.choice, ensure_ascii=False)
        value = getattr(self, self.kind)
        return value if isinstance(value, str) else ""


def _error(message: str) -> ParameterError:
    return ParameterError(message, param=PARAM)
