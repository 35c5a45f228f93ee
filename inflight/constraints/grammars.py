"""Translates structured output constraints to one grammar in llguidance's Lark.

Patterns of JSON schemas are made safe to quote. In JSON a string's `"` is written `\\"`. llguidance rewrites a pattern
so that it matches the written form, and if a character class holds many control characters it takes all escapes for
members: `[^"]` would let `\\"` through. Without the control characters, which cannot be written here anyway, the
rewriting is exact, so they are removed from every class.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from inflight.constraints.answer_rules import CONTENT, AnswerRules
from inflight.constraints.schema import (
    FAR,
    OMIT,
    OUTWARD,
    changes_nothing,
    check_schema,
    read_schema,
    rewritten,
)
from inflight.errors import ParameterError
from inflight.structured_outputs import PARAM, StructuredOutputs

# Those without an escape of their own (\b, \t, \n, \f, \r).
_OUT = r"&&[^\x00-\x07\x0b\x0e-\x1f\x7f]"
_TINY, _SMALL = 1e-9, 1 << 20  # whose sum is exact enough
_PROPERTY = re.compile(r"\\[pP](?:\{[^}]{0,64}\}|[A-Za-z])")  # no name is longer
# What `safe_pattern` makes of a class, also where a message has quoted it.
_MADE_SAFE = re.compile(
    rf"\[(\[\^?\]?(?:\\.|[^\]\\])*\]|{_PROPERTY.pattern})" + re.escape(_OUT).replace(r"\\", r"\\+") + r"\]"
)


def safe_pattern(pattern: str) -> str:
    """The same but for control characters. What is no expression stays none."""
    parts, at = [], 0
    while at < len(pattern):
        end = at + 1
        if pattern[at] == "[":
            end = _end_of_class(pattern, at)
        elif pattern[at] == "\\":
            found = _PROPERTY.match(pattern, at)
            end = found.end() if found else at + 2
        is_class = end > at + 2
        parts.append(f"[{pattern[at:end]}{_OUT}]" if is_class else pattern[at:end])
        at = end
    return "".join(parts)


def as_written(text: str) -> str:
    """A text in which patterns are again what they were before they were made safe."""
    return _MADE_SAFE.sub(r"\1", text)


def _end_of_class(pattern: str, start: int) -> int:
    """Behind the bracket that closes the one at `start`; classes may hold others. If there is none: start + 1."""
    depth, at = 0, start
    while at < len(pattern):
        character = pattern[at]
        if character == "\\":
            at += 1
        elif character == "[":
            depth += 1
            at += pattern.startswith("^", at + 1)
            at += pattern.startswith("]", at + 1)  # which stands for itself there
        elif character == "]":
            depth -= 1
            if depth == 0:
                return at + 1
        at += 1
    return start + 1


def with_safe_patterns(schema: Any) -> Any:
    """A copy of a schema, wherever its patterns are. Bounds that are far away are nearer, and what changes nothing is
    left out."""
    return rewritten(schema, _safe)


def _safe(keyword: str, value: Any) -> Any:
    if changes_nothing(keyword, value):
        return OMIT
    if keyword == "pattern" and isinstance(value, str):
        return safe_pattern(value)
    if keyword == "patternProperties" and isinstance(value, dict):
        return {safe_pattern(name): inner for name, inner in value.items()}
    if keyword in OUTWARD and isinstance(value, int | float) and value * OUTWARD[keyword] > FAR:
        return FAR * OUTWARD[keyword]  # as far as numbers are written at all
    if keyword.startswith("exclusiveM") and isinstance(value, int | float) and abs(value) < _SMALL:
        # Between bounds that are less than 1 apart, llguidance takes an exclusive integer for an inclusive one.
        return value - OUTWARD[keyword] * _TINY if value == int(value) else value
    return value


# Any token that fits may come, rather than the one way in which a tokenizer would spell what must follow: models know
# best how they spell, and nothing need be tokenized to compute a mask.
_OPTIONS = '%llguidance {"no_forcing": true}\n'
# As much as it takes to write JSON over several lines. Some models would never stop to indent.
_WHITESPACE = r"[\x20\x09]{1,2}|\x0D?\x0A[\x20\x09]{0,40}"
_SPACE = r"\x20"  # in calls, which nobody writes over several lines
_JSON_OPTIONS = {
    "whitespace_flexible": True,
    "lenient": False,
    # No \u0061: a key that is spelled so would not be known for the property that it is.
    "json_allowed_escapes": '"\\bfnrt',
    "json_allow_general_unicode_escapes": False,
}
_LAYOUT = {"item_separator", "key_separator", "whitespace_flexible", "whitespace_pattern"}
# Where a grammar has a schema, and where it only seems to: in texts, expressions and comments. None is read twice, also
# where one has no end.
_LARK_TOKEN = re.compile(
    r'"(?:\\.|[^"\\\n])*+(?:"|(?P<open_text>))|//[^\n]*|/(?:\\(?s:.)|[^/\\])*+(?:/|(?P<open_regex>))'
    r"|\#[^\n]*|(?P<json>%json\b\s*)"
)
# As llguidance tells it from GBNF, but in a time that does not grow with the square of the blank lines.
_LARK = re.compile(r"(?m)^[^\S\n]*+(?:%llguidance\b|start\s*+:)")
_JSON = json.JSONDecoder()
# Rules times characters. GBNF is read in a time that grows with both, in Python: a third of a second for so much.
MAX_GBNF = 8_000_000
_TAG_KEYS = {"begin", "schema", "end"}


def lark_grammar(asked: StructuredOutputs, special_tokens: Collection[str]) -> str:
    """Raises ParameterError where it is no grammar at all; most mistakes are found when it is compiled."""
    makers: dict[str, Callable[[str], str]] = {
        "json": lambda text: f"start: {json_rule(read_schema(text))}",
        "json_object": lambda _: f"start: {json_rule({'type': 'object'})}",
        "regex": lambda text: f"start: {_regex(text)}",
        # As one terminal: a parser could not follow thousands of rules at a time.
        "choice": lambda text: "start: CHOICE\nCHOICE: " + " | ".join(map(literal, json.loads(text))),
        "grammar": _user_grammar,
        "structural_tag": lambda text: _structural_tag(text, special_tokens),
    }
    return f"{makers[asked.kind](asked.text)}\n{_OPTIONS}"


def answer_lark(answer: AnswerRules, loosened: Collection[str], special_tokens: Collection[str]) -> str:
    """Return the grammar of a whole answer."""
    rules = [*answer.rules, *answer.token_rules()]
    for name, schema in answer.whole_schemas(loosened).items():
        rules.append(f"{name}: {json_rule(schema, _WHITESPACE if name == CONTENT else _SPACE)}")
    grammar = "\n".join([*rules, _OPTIONS])
    asked = answer.user_content
    if asked is None:
        return grammar
    content = lark_grammar(asked, special_tokens)
    return json.dumps({"grammars": [{"lark_grammar": grammar}, {"name": CONTENT, "lark_grammar": content}]})


def json_rule(schema: Any, whitespace: str = _WHITESPACE, layout: Mapping[str, Any] | None = None) -> str:
    options = {**_JSON_OPTIONS, **(layout or {})}
    if options["whitespace_flexible"]:
        options.setdefault("whitespace_pattern", whitespace)
    if isinstance(schema, dict):
        schema = {"x-guidance": options, **with_safe_patterns(schema)}
    elif schema:
        schema = {"x-guidance": options}
    return "%json " + json.dumps(schema)


def _regex(text: str) -> str:
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(text, '')}/"


def literal(text: str) -> str:
    """A text in Lark's quotes."""
    return json.dumps(text, ensure_ascii=False)


def _user_grammar(text: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    num_rules = text.count("::=")
    if num_rules * len(text) > MAX_GBNF:
        raise ParameterError(
            f"{PARAM}.grammar has {num_rules} rules of GBNF in {len(text)} characters, which takes too long to read: "
            "write it in Lark",
            param=PARAM,
            code="constraint_too_complex",
        )
    try:
        grammar = text if _LARK.search(text) else gbnf_to_lark(text)
    except (Exception, RecursionError) as error:  # the package raises bare ones
        reason = " ".join(str(error).split())[:300]
        raise ParameterError(
            f"{PARAM}.grammar is neither Lark nor GBNF: {reason}", param=PARAM, code="invalid_constraint"
        ) from None
    return _with_checked_schemas(grammar) if "%json" in grammar else grammar


def _with_checked_schemas(grammar: str) -> str:
    """Schemas in a grammar are schemas like any other."""
    parts, at = [], 0
    for found in _LARK_TOKEN.finditer(grammar):
        if found.start() < at:
            continue
        if found["open_text"] is not None or found["open_regex"] is not None:
            raise ParameterError(
                f"{PARAM}.grammar has a text or an expression without an end: {found[0]:.100}",
                param=PARAM,
                code="invalid_constraint",
            )
        if found["json"] is None:
            continue
        parts.append(grammar[at : found.start()])
        try:
            schema, at = _JSON.raw_decode(grammar, found.end())
        except (ValueError, RecursionError) as error:
            raise ParameterError(
                f"{PARAM}.grammar: what follows %json is no JSON: {error}",
                param=PARAM,
                code="invalid_constraint",
            ) from None
        parts.append(_checked_rule(schema))
    return "".join([*parts, grammar[at:]])


def _checked_rule(schema: Any) -> str:
    """Return the rule of a schema in a user's grammar, which may also set the layout of the JSON."""
    layout: Any = {}
    if isinstance(schema, dict):
        schema = dict(schema)
        layout = schema.pop("x-guidance", {})
    if not isinstance(layout, dict) or not layout.keys() <= _LAYOUT:
        raise ParameterError(
            f"{PARAM}.grammar: x-guidance behind %json may have {', '.join(sorted(_LAYOUT))} and nothing else",
            param=PARAM,
            code="invalid_constraint",
        )
    check_schema(schema, f"{PARAM}.grammar, behind %json")
    return json_rule(schema, layout=layout)


def _structural_tag(text: str, special_tokens: Collection[str]) -> str:
    """Free text in which whatever begins with a trigger goes on as one of the structures."""
    try:
        tags = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ParameterError(f"{PARAM}.structural_tag is no JSON: {error}", param=PARAM) from None
    given = tags if isinstance(tags, dict) else {}
    structures: Any = given.get("structures")
    triggers: Any = given.get("triggers")
    if not _are_structures(structures) or not _are_texts(triggers):
        raise ParameterError(
            f'{PARAM}.structural_tag must be {{"structures": [{{"begin", "schema", "end"}}, ...], '
            '"triggers": [text, ...]}',
            param=PARAM,
        )
    rules = [
        f"start: ({' | '.join(f'tag_{i}' for i in range(len(triggers)))})* rest",
        "rest: TEXT",
        r"TEXT: /(.|\n)*/",
    ]
    ways: list[list[str]] = [[] for _ in triggers]
    for structure in structures:
        begin = structure["begin"]
        index = next((i for i, trigger in enumerate(triggers) if begin.startswith(trigger)), None)
        if index is None:
            raise ParameterError(
                f"{PARAM}.structural_tag: no trigger begins the structure {begin!r}", param=PARAM
            )
        check_schema(structure["schema"], f"{PARAM}.structural_tag")
        parts = (begin[len(triggers[index]) :], structure["end"])
        before, after = (literal(part) if part else "" for part in parts)
        ways[index].append(f"{before} {json_rule(structure['schema'])} {after}")
    for index, (trigger, bodies) in enumerate(zip(triggers, ways, strict=True)):
        if not bodies:
            raise ParameterError(
                f"{PARAM}.structural_tag: no structure begins with the trigger {trigger!r}", param=PARAM
            )
        if trigger in special_tokens:
            rules.append(f"tag_{index}: TEXT {trigger} body_{index}")
        else:
            rules += [
                f"head_{index}[lazy]: TEXT {literal(trigger)}",
                f"tag_{index}: head_{index} body_{index}",
            ]
        rules.append(f"body_{index}: " + " | ".join(bodies))
    return "\n".join(rules)


def _are_texts(given: Any) -> bool:
    return isinstance(given, list) and bool(given) and all(isinstance(text, str) and text for text in given)


def _are_structures(given: Any) -> bool:
    return (
        isinstance(given, list)
        and bool(given)
        and all(isinstance(item, dict) and set(item) == _TAG_KEYS for item in given)
        and all(isinstance(item["begin"], str) and isinstance(item["end"], str) for item in given)
    )
