"""Translates constraints to grammars in llguidance's Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeGuard

from inflight.constraints.answer_rules import CONTENT, AnswerRules
from inflight.constraints.schema import check_schema, invalid, read_schema
from inflight.constraints.schema_rewriting import exact_schema
from inflight.errors import ParameterError, clipped
from inflight.structured_outputs import PARAM

# Allow any token that fits, instead of only the tokenizer's own spelling of a text that must follow: the model knows
# best how it spells, and computing a mask need not tokenize.
_OPTIONS = '%llguidance {"no_forcing": true}\n'
# Enough for JSON over several lines. Without a limit some models would indent forever.
_WHITESPACE = r"[\x20\x09]{1,2}|\x0D?\x0A[\x20\x09]{0,40}"
_SPACE = r"\x20"  # in calls, which models write on one line
_JSON_OPTIONS = {
    "whitespace_flexible": True,
    "lenient": False,
    # No \u0061: the grammar would not recognize a property whose name is spelled like this.
    "json_allowed_escapes": '"\\bfnrt',
    "json_allow_general_unicode_escapes": False,
}
_LAYOUT = {"item_separator", "key_separator", "whitespace_flexible", "whitespace_pattern"}
# A schema in a grammar, or a string, regex or comment that may contain what looks like one. The quantifiers are
# possessive so that an unclosed one is not read twice.
_LARK_TOKEN = re.compile(
    r'"(?:\\.|[^"\\\n])*+(?:"|(?P<open_string>))|//[^\n]*|/(?:\\(?s:.)|[^/\\])*+(?:/|(?P<open_regex>))'
    r"|\#[^\n]*|(?P<json>%json\b\s*)"
)
# Distinguishes Lark from GBNF as llguidance does, but not in time quadratic in the number of blank lines.
_LARK = re.compile(r"(?m)^[^\S\n]*+(?:%llguidance\b|start\s*+:)")
_JSON = json.JSONDecoder()
# Rules times characters. The GBNF parser is in Python and its time grows with both: a third of a second for this many.
MAX_GBNF = 8_000_000
_TAG_KEYS = {"begin", "schema", "end"}


def lark_grammar(syntax: str, text: str, special_tokens: Collection[str], one_of: bool = False) -> str:
    """Return the grammar of a constraint. `one_of`: make the alternatives of oneOf exclusive.

    Raises ParameterError; most mistakes surface when the grammar is compiled.
    """
    makers: dict[str, Callable[[str], str]] = {
        "json": lambda text: f"start: {json_rule(read_schema(text), one_of=one_of)}",
        "json_object": lambda _: f"start: {json_rule({'type': 'object'})}",
        "regex": lambda text: f"start: {_regex(text)}",
        # As one terminal: the parser cannot follow thousands of rules at once.
        "choice": lambda text: "start: CHOICE\nCHOICE: " + " | ".join(map(literal, json.loads(text))),
        "grammar": lambda text: _user_grammar(text, one_of),
        "structural_tag": lambda text: _structural_tag(text, special_tokens, one_of),
    }
    return with_options(makers[syntax](text))


def answer_lark(
    answer: AnswerRules, loosened: Collection[str], special_tokens: Collection[str], one_of: bool = False
) -> str:
    """Return the grammar of a whole answer."""
    rules = [*answer.rules, *(f"{name}: <[{token_id}]>" for name, token_id in answer.tokens.items())]
    for name, schema in answer.schemas.items():
        whitespace = _WHITESPACE if name == CONTENT else _SPACE
        rules.append(f"{name}: {json_rule(schema.whole(name in loosened), whitespace, one_of=one_of)}")
    grammar = "\n".join([*rules, _OPTIONS])
    parts = {name: with_options(lark) for name, (_, lark) in answer.grammars.items()}
    if answer.content is not None:
        parts[CONTENT] = lark_grammar(*answer.content, special_tokens, one_of)
    if not parts:
        return grammar
    named = [{"name": name, "lark_grammar": lark} for name, lark in parts.items()]
    return json.dumps({"grammars": [{"lark_grammar": grammar}, *named]})


def with_options(lark: str) -> str:
    """Return a user's grammar with the options of all grammars."""
    return f"{lark}\n{_OPTIONS}"


def json_rule(
    schema: Any, whitespace: str = _WHITESPACE, layout: Mapping[str, Any] | None = None, one_of: bool = False
) -> str:
    """Return the right side of a rule for JSON that a checked schema allows."""
    options = {**_JSON_OPTIONS, **(layout or {})}
    if options["whitespace_flexible"]:
        options.setdefault("whitespace_pattern", whitespace)
    if isinstance(schema, dict):
        schema = {"x-guidance": options, **exact_schema(schema, one_of)}
    elif schema:
        schema = {"x-guidance": options}
    return "%json " + json.dumps(schema)


def _regex(text: str) -> str:
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(text, '')}/"


def literal(text: str) -> str:
    """Return a text as a Lark string."""
    return json.dumps(text, ensure_ascii=False)


def _user_grammar(text: str, one_of: bool) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    num_rules = text.count("::=")
    if num_rules * len(text) > MAX_GBNF:
        raise ParameterError(
            f"{PARAM}.grammar has {num_rules} GBNF rules in {len(text)} characters, which takes too long to parse: "
            "write it in Lark",
            param=PARAM,
            code="constraint_too_complex",
        )
    try:
        grammar = text if _LARK.search(text) else gbnf_to_lark(text)
    except (Exception, RecursionError) as error:  # the package raises bare Exceptions
        reason = clipped(" ".join(str(error).split()), 300)
        raise invalid(f"{PARAM}.grammar is neither Lark nor GBNF: {reason}") from None
    return _with_checked_schemas(grammar, one_of) if "%json" in grammar else grammar


def _with_checked_schemas(grammar: str, one_of: bool) -> str:
    """Check and rewrite the schemas in a grammar like any other schema."""
    parts, position = [], 0
    for token in _LARK_TOKEN.finditer(grammar):
        if token.start() < position:
            continue
        if token["open_string"] is not None or token["open_regex"] is not None:
            text = clipped(token[0], 100)
            raise invalid(f"{PARAM}.grammar has a string or a regex that is not closed: {text}")
        if token["json"] is None:
            continue
        parts.append(grammar[position : token.start()])
        try:
            schema, position = _JSON.raw_decode(grammar, token.end())
        except (ValueError, RecursionError) as error:
            raise invalid(f"{PARAM}.grammar: the text after %json is not JSON: {error}") from None
        parts.append(_checked_rule(schema, one_of))
    return "".join([*parts, grammar[position:]])


def _checked_rule(schema: Any, one_of: bool) -> str:
    """Return the rule of a schema in a user's grammar, which may also set the JSON's layout."""
    layout: Any = {}
    if isinstance(schema, dict):
        schema = dict(schema)
        layout = schema.pop("x-guidance", {})
    if not isinstance(layout, dict) or not layout.keys() <= _LAYOUT:
        allowed = ", ".join(sorted(_LAYOUT))
        raise invalid(f"{PARAM}.grammar: x-guidance after %json may only have {allowed}")
    check_schema(schema, f"{PARAM}.grammar, after %json")
    return json_rule(schema, layout=layout, one_of=one_of)


def _structural_tag(text: str, special_tokens: Collection[str], one_of: bool) -> str:
    """Return rules for free text in which a trigger must begin one of the structures."""
    try:
        tags = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ParameterError(f"{PARAM}.structural_tag is not JSON: {error}", param=PARAM) from None
    structures = tags.get("structures") if isinstance(tags, dict) else None
    triggers = tags.get("triggers") if isinstance(tags, dict) else None
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
    bodies: list[list[str]] = [[] for _ in triggers]
    indices = {trigger: index for index, trigger in reversed([*enumerate(triggers)])}
    lengths = set(map(len, triggers))
    for structure in structures:
        begin = structure["begin"]
        starts = (begin[:length] for length in lengths)
        index = min((indices[start] for start in starts if start in indices), default=None)
        if index is None:
            raise ParameterError(
                f"{PARAM}.structural_tag: the structure {begin!r} begins with no trigger", param=PARAM
            )
        check_schema(structure["schema"], f"{PARAM}.structural_tag")
        parts = (begin[len(triggers[index]) :], structure["end"])
        before, after = (literal(part) if part else "" for part in parts)
        rule = json_rule(structure["schema"], one_of=one_of)
        bodies[index].append(f"{before} {rule} {after}")
    for index, (trigger, alternatives) in enumerate(zip(triggers, bodies, strict=True)):
        if not alternatives:
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
        rules.append(f"body_{index}: " + " | ".join(alternatives))
    return "\n".join(rules)


def _are_texts(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and bool(value) and all(isinstance(text, str) and text for text in value)


def _are_structures(value: Any) -> TypeGuard[list[dict[str, Any]]]:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, dict) and set(item) == _TAG_KEYS for item in value)
        and all(isinstance(item["begin"], str) and isinstance(item["end"], str) for item in value)
    )
