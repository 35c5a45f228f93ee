"""Rewrites the Lark grammar of a tool's free text input, to be used inside the grammar of a call.

Most models write that text as a JSON string, in which a line break of the grammar is the two characters \\n. Strings
and regexes of the grammar are rewritten one character matcher at a time: a character that JSON escapes is replaced by
its escape. Every text has only one spelling, and some matchers (of control characters, or nested classes) allow fewer
texts than before, but none allows more.

The lexer decides where a terminal ends by looking one character ahead, which is too little to tell \\" from \\n. So
rules that do not refer to themselves become terminals, which have no ends inside. Where a rule does refer to itself, a
terminal that may continue with an escape cannot be followed by one that starts with an escape.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from inflight.constraints.schema_rewriting import end_of_class
from inflight.errors import clipped

# Characters that JSON writes as a backslash and a letter. Other control characters are never generated.
_ESCAPES = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
_PLAIN = r'[^"\\\x00-\x1F]'
_ESCAPED_LETTERS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}
# Terminals of Lark's library that match characters with escapes; the others are imported as they are.
_COMMON = {
    "LF": r"\n",
    "CR": r"\r",
    "NEWLINE": r"(\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "ESCAPED_STRING": r'"([^"\\\n]|\\[^\n])*"',
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"\/\/[^\n]*",
    "C_COMMENT": r"\/\*([^*]|\*[^\/])*\*\/",
    "SQL_COMMENT": r"--[^\n]*",
}
_STRING = r'"(?:\\.|[^"\\\n])*+"i?'
_COMMENT = r"//[^\n]*|\#[^\n]*"
# One that is not closed is found where it begins, so that it is not read again from each quote or slash in it.
_TOKEN = re.compile(
    rf"""(?P<comment>{_COMMENT})
    | (?P<range>{_STRING}\s*+\.\.\s*+{_STRING})
    | (?P<string>{_STRING})
    | /(?P<regex>(?:\\.|[^/\\\n])++)/(?P<flags>[a-z]*)
    | (?P<import>%import\s++common\.(?P<common>\w++)(?:\s*+->\s*+(?P<alias>\w++))?)
    | (?P<unsupported>%json\b|%regex\b|%lark\b|%llguidance\b|<[^>\s]*+>?|~(?!\s*\d))
    | (?P<unclosed>["/])""",
    re.VERBOSE,
)
_RULE = re.compile(r"^[ \t]*+[?!]*+([a-z_]\w*+)(\[[^\[\]]*+\])?[ \t]*+:", re.MULTILINE)
_STATEMENT = re.compile(r"^[ \t]*+(?:[?!]*+\w++(?:\[[^\[\]]*+\])?[ \t]*+:|%)", re.MULTILINE)
# A reference to a rule, or a comment, string or regex that may contain what looks like one.
_REFERENCE = re.compile(rf"{_COMMENT}|{_STRING}|/(?:\\.|[^/\\\n])++/|(?<!\w)(?P<name>[a-z_]\w*+)")
_ALIAS = re.compile(r"->[ \t]*+\w++[ \t]*+(?=\||\n|\Z)")
_GROUP = re.compile(r"\?(?:P?<\w+>|(?P<flags>[a-z]*)(?:-(?P<off>[a-z]*))?(?P<end>[:)]))")
_CODE_POINT = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|[xuU]\{([0-9A-Fa-f]{1,8})\}")
_SET_OPERATION = re.compile(r"\[|&&|--|~~|\|\|")
_PROPERTY = re.compile(r"[pP](?:\{[^}]{0,64}\}|.)")  # no property name is longer


def json_quoted(grammar: str) -> str:
    """Return the grammar of the JSON strings, without their quotes, whose texts a grammar matches.

    Raises ValueError if it uses something that cannot be rewritten.
    """
    parts, position = [], 0
    for token in _TOKEN.finditer(grammar):
        parts += [grammar[position : token.start()], _rewritten(token)]
        position = token.end()
    return _with_terminals("".join([*parts, grammar[position:]]))


def bare_input(grammar: str, never: str) -> str:
    """Return a grammar for text between markers, without the texts that contain a match of the regex `never`.

    They cannot be left out of a grammar whose first rule refers to itself.
    """
    json_quoted(grammar)  # the same grammars are supported in all formats
    return _with_terminals(grammar, never)


def _with_terminals(grammar: str, never: str = "") -> str:
    """Turn the rules that do not refer to themselves, directly or through others, into terminals."""
    if "%ignore" in grammar:  # applies between terminals, and not inside them
        return grammar
    rules = [_Rule.read(grammar, head) for head in _RULE.finditer(grammar)]
    terminals = {name: f"TERMINAL_{index}" for index, name in enumerate(_finite_rules(rules))}

    def renamed(match: re.Match[str]) -> str:
        return terminals.get(match["name"] or "", match[0])

    parts, position = [], 0
    for rule in rules:
        body = _REFERENCE.sub(renamed, rule.body)
        if rule.name in terminals:
            body, rule.head = _ALIAS.sub("", body), f"{terminals[rule.name]}:"
        parts += [grammar[position : rule.start], rule.head, body]
        position = rule.end
    if "start" in terminals:
        limits = f" & ~/(?s:.*)({never})(?s:.*)/" if never else ""
        parts.append(f"\nstart: INPUT\nINPUT: {terminals['start']}{limits}\n")
    return "".join([*parts, grammar[position:]])


def _finite_rules(rules: list[_Rule]) -> dict[str, None]:
    """Return the names of the rules that can become terminals, each after the rules that it refers to."""
    names: dict[str, None] = {}
    num_missing: list[int] = []  # of each rule: references to rules that are not known to be finite
    referring: dict[str, list[int]] = {}  # the rules that refer to a name
    for index, rule in enumerate(rules):
        references = rule.references()
        num_missing.append(len(references))
        for name in references:
            referring.setdefault(name, []).append(index)
    ready = [index for index, missing in enumerate(num_missing) if not missing]
    while ready:
        rule = rules[ready.pop()]
        if rule.has_attributes or rule.name in names:
            continue
        names[rule.name] = None
        for index in referring.get(rule.name, ()):
            num_missing[index] -= 1
            if not num_missing[index]:
                ready.append(index)
    return names


@dataclass(slots=True)
class _Rule:
    name: str
    head: str  # up to its colon
    body: str
    start: int  # where it is in the grammar
    end: int
    has_attributes: bool

    @classmethod
    def read(cls, grammar: str, head: re.Match[str]) -> _Rule:
        next_statement = _STATEMENT.search(grammar, head.end())
        end = len(grammar) if next_statement is None else next_statement.start()
        return cls(
            head[1], head[0], grammar[head.end() : end], head.start(), end, has_attributes=head[2] is not None
        )

    def references(self) -> set[str]:
        """Return the names of the rules that it refers to."""
        return {match["name"] for match in _REFERENCE.finditer(_ALIAS.sub("", self.body)) if match["name"]}


def _rewritten(token: re.Match[str]) -> str:
    if token["unclosed"] is not None:
        raise ValueError(f"a string or a regex is not closed: {clipped(token.string[token.start() :], 100)}")
    if token["unsupported"] is not None:
        raise ValueError(f"{clipped(token[0], 100)} is not supported in the grammar of a tool's input")
    if token["range"] is not None:
        first, last = (_value(text) for text in re.findall(_STRING, token["range"]))
        return f"/{_class(f'[{re.escape(first)}-{re.escape(last)}]')}/"
    if token["string"] is not None:
        text, is_caseless = _value(token["string"]), token["string"].endswith("i")
        quoted = json.dumps(json.dumps(text, ensure_ascii=False)[1:-1], ensure_ascii=False)
        # Letters of escapes have only one case.
        return f"/{_quoted_regex(_escaped(text), 'i')}/" if is_caseless else quoted
    if token["regex"] is not None:
        return f"/{_quoted_regex(token['regex'], token['flags'])}/"
    if token["common"] in _COMMON:
        return f"{token['alias'] or token['common']}: /{_quoted_regex(_COMMON[token['common']])}/"
    return token[0]


def _value(string: str) -> str:
    value: str = json.loads(re.sub(r"\\x(..)", r"\\u00\1", string.removesuffix("i")))
    return value


def _escaped(text: str) -> str:
    """Return a regex for a text, without slashes that end it."""
    return re.escape(text).replace("/", r"\/")


def _quoted_regex(regex: str, flags: str = "") -> str:
    if "x" in flags:
        raise ValueError("the regex flag x is not supported in the grammar of a tool's input")
    text = "".join(_quoted_parts(regex, "s" in flags))
    inline = "".join(flag for flag in flags if flag in "imu")
    return f"(?{inline}:{text})" if inline else text


def _quoted_parts(regex: str, matches_all: bool) -> Iterator[str]:
    """Yield a regex piece by piece. `matches_all` says that a dot matches line breaks."""
    position, groups = 0, [matches_all]  # the flag inside each open group
    while position < len(regex):
        character = regex[position]
        end = position + 1
        if character == "\\":
            end, piece = _escape(regex, position)
        elif character == "[":
            end = end_of_class(regex, position)
            if end == position + 1:
                raise ValueError(f"the regex {regex[:100]!r} has a character class that is not closed")
            piece = _class(regex[position:end])
        elif character == ".":
            piece = _any(set(_ESCAPES) if groups[-1] else set(_ESCAPES) - {"\n"})
        elif character == "(":
            group = _GROUP.match(regex, end)
            piece = character
            if group is not None:
                end, piece = group.end(), f"({group[0]}"
                if "x" in (group["flags"] or ""):
                    raise ValueError("the regex flag x is not supported in the grammar of a tool's input")
                flag = ("s" in (group["flags"] or "") or groups[-1]) and "s" not in (group["off"] or "")
                if group["end"] == ")":
                    groups[-1] = flag
                else:
                    groups.append(flag)
            else:
                groups.append(groups[-1])
        else:
            if character == ")" and len(groups) > 1:
                groups.pop()
            piece = _literal(character) if character in _ESCAPES else character
        yield piece
        position = end


def _escape(regex: str, position: int) -> tuple[int, str]:
    """Return the end of the escape at a position, and its replacement."""
    code = _CODE_POINT.match(regex, position + 1)
    if code is not None:
        number = int(next(filter(None, code.groups())), 16)
        character = chr(number) if number <= 0x10FFFF else ""
        is_special = character < " " or character in _ESCAPES
        return code.end(), _literal(character) if is_special else f"\\{code[0]}"
    named = _PROPERTY.match(regex, position + 1)
    if named is not None:
        return named.end(), f"[\\{named[0]}&&{_PLAIN}]"
    letter = regex[position + 1 : position + 2]
    if letter in _ESCAPED_LETTERS or letter in _ESCAPES:
        return position + 2, _literal(_ESCAPED_LETTERS.get(letter, letter))
    if letter in "sSDW":
        return position + 2, _class(f"[\\{letter}]")
    return position + 2, f"\\{letter}"


def _literal(character: str) -> str:
    """Return a regex for a character that JSON escapes, or one that matches nothing if it has no short escape."""
    return _any({character}, unescaped="") if character in _ESCAPES else f"[a&&{_PLAIN}&&b]"


def _any(escaped: set[str], unescaped: str = _PLAIN) -> str:
    """Return a regex for any of the characters that are written `unescaped`, or as an escape."""
    letters = "".join(re.escape(letter) for character, letter in _ESCAPES.items() if character in escaped)
    # A surrounding i flag must not allow \N for \n.
    alternatives = filter(None, (unescaped, rf"\\(?-i:[{letters}])" if letters else ""))
    return f"(?:{'|'.join(alternatives)})"


def _class(text: str) -> str:
    """Return a regex for a character class. Escapes are left out of classes that Python reads differently."""
    escaped: set[str] = set()
    with contextlib.suppress(re.error):
        if not _SET_OPERATION.search(re.sub(r"\\.", "", text[1:])):
            contains = re.compile(text.replace(r"\/", "/")).fullmatch
            escaped = {character for character in _ESCAPES if contains(character)}
    return _any(escaped, f"[{text}&&{_PLAIN}]")
