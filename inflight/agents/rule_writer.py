"""Writes the grammar of an answer, in llguidance's Lark: what formats of calls and of reasoning share."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from inflight.constraints import AnswerRules, RuleSchema, literal
from inflight.text import Tokenizer

ANY_OBJECT = {"type": "object"}
_GAP = "GAP: /[ \\t\\r\\n]{0,8}/"  # some models would never stop to break lines


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that may be called, as a grammar needs to know it."""

    name: str
    schema: dict[str, Any]  # of its arguments, which are an object
    strict: bool
    param: str  # where a request has the schema


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """How a format writes calls: an opening, and what must follow it."""

    opening: str
    # What follows the opening, as an expression. It may hold several calls if asked to.
    write: Callable[[RuleWriter, Sequence[Tool], bool], str]
    repeats: bool = True  # whether every call has an opening of its own
    # The character that begins a call at the beginning of an answer, where it needs no opening.
    bare: str = ""
    # What else a reader would take for the beginning of a call; it is never written.
    never: tuple[str, ...] = ()
    names: re.Pattern[str] | None = None  # of functions that a reader understands, None for all


@dataclass(slots=True)
class RuleWriter:
    """The rules so far. Whoever adds some says what they stand for: an expression that others can use."""

    tokenizer: Tokenizer | None
    _rules: list[str] = field(default_factory=lambda: [_GAP])
    _tokens: dict[str, int] = field(default_factory=dict)
    _schemas: dict[str, RuleSchema] = field(default_factory=dict)
    _content: tuple[str, str] | None = None

    def answer(self, start: str) -> AnswerRules:
        """All rules, with the one that an answer is."""
        return AnswerRules((f"start: {start}", *self._rules), self._tokens, self._schemas, self._content)

    def rule(self, name: str, expression: str) -> str:
        self._rules.append(f"{name}: {expression}")
        return name.partition("[")[0]

    def is_special(self, marker: str) -> bool:
        """Whether a marker is a token that no text spells."""
        token_id = self.token_id(marker)
        return token_id is not None and self.tokenizer is not None and token_id in self.tokenizer.special_ids

    def token_id(self, marker: str) -> int | None:
        return self.tokenizer.token_id(marker) if self.tokenizer and marker else None

    def token(self, token_id: int) -> str:
        """One token and no other."""
        name = f"token_{token_id}"
        self._tokens[name] = token_id
        return name

    def marked(self, *parts: str) -> str:
        """Markers and texts, one after the other: those that are special tokens as tokens."""
        said = []
        for part in filter(None, parts):
            token_id = self.token_id(part)
            special = token_id is not None and self.is_special(part)
            said.append(self.token(token_id) if special and token_id is not None else literal(part))
        return " ".join(said)

    def schema(self, name: str, schema: RuleSchema) -> str:
        self._schemas[name] = schema
        return name

    def user_content(self, kind: str, text: str) -> str:
        """What a user asked for in a language of its own."""
        self._content = kind, text
        return "@content"

    def arguments(self, tools: Sequence[Tool]) -> list[tuple[Tool, str]]:
        """The tools, each with the JSON of its arguments."""
        return [
            (
                tool,
                self.schema(
                    f"arguments_{index}",
                    RuleSchema(tool.schema, tool.param, tool.strict, ANY_OBJECT),
                ),
            )
            for index, tool in enumerate(tools)
        ]

    def json_call(self, tools: Sequence[Tool], key: str) -> str:
        """`{"name": ..., key: {...}}`, for any of the tools."""
        ways = [
            self.schema(
                f"call_{index}",
                RuleSchema(tool.schema, tool.param, tool.strict, ANY_OBJECT, tool.name, key),
            )
            for index, tool in enumerate(tools)
        ]
        return self.rule("call", " | ".join(ways))

    def text(
        self, name: str, never: Sequence[str] = (), never_first: Sequence[str] = (), length: str = "*"
    ) -> str:
        """A terminal: free text without some texts in it, and without others at its beginning. `length` is how often a
        character comes, as expressions say it."""
        parts = [f"/(?s:.){length}/"]
        if inside := _spelled(self, never):
            parts.append(f"~/(?s:.*)({inside})(?s:.*)/")
        if first := _spelled(self, never_first):
            parts.append(f"~/[ \\t\\r\\n]*({first})(?s:.*)/")
        return self.rule(name, " & ".join(parts))


def regex(text: str) -> str:
    """A text as a part of a regular expression between slashes."""
    return re.sub(r"[\\.+*?()|\[\]{}^$/]", lambda found: "\\" + found[0], text)


def _spelled(writer: RuleWriter, texts: Sequence[str]) -> str:
    """As alternatives of an expression; special tokens never are text."""
    return "|".join(regex(text) for text in texts if text and not writer.is_special(text))
