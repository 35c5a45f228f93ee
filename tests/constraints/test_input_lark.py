"""A rewritten grammar matches the JSON strings of exactly those texts that the grammar itself matches."""

from __future__ import annotations

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from inflight.constraints.input_lark import bare_input, json_quoted

PATCH = """start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: "*** Add File: " filename LF add_line+
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
%import common.LF
"""
STRINGS = """start: ESCAPED_STRING WS INT
%import common.ESCAPED_STRING
%import common.WS
%import common.INT
"""
CASES: dict[str, tuple[str, ...]] = {
    PATCH: (
        '*** Begin Patch\n*** Add File: a.py\n+print("hi \\n")\n*** End Patch',
        "*** Begin Patch\n*** Add File: a.py\n+\tx\n+\n*** End Patch\n",
        "*** Begin Patch\nx\n*** End Patch",
    ),
    STRINGS: ('"a b" \n 12', '"a\\"b"\t3', '"a 3'),
    r'start: /[^\n"]+/': ("a\tb", 'a"b', "a\nb", "a\\b", "é"),
    r"start: /[\s\S]+/": ("a\tb", 'a"b\n\\'),
    "start: /a.b/": ("a\nb", 'a"b', "a\\b", "axb", "aéb"),
    "start: /a.b/s": ("a\nb",),
    "start: /(?s:a.)(.)/": ("a\nb", "a\n\n"),
    r'start: "A\n\"b\""i': ('a\n"B"', 'A\n"b"', 'a\n"c"'),
    'start: "a".."f"': ("c", "g"),
    'start: e\ne: NUMBER | "(" e ("+"|"*") e ")"\n%import common.NUMBER': ("((1+2)*3)", "(1+2"),
    'start: value\nvalue: STRING | "[" value ("," value)* "]"\nSTRING: /"[^"]*"/': (
        '["a","b"]',
        '[["a\n"],"b"]',
    ),
    'start: s\ns: line s | line\nline: /[a-z"]+/ "\\n"': ("ab\ncd\n", 'a"b\nc\n', "a"),
    'start: a b\na: "x" -> foo\n | "y"\nb[lazy]: /z+"/': ('xz"', 'yzz"', "y"),
    'start: e\ne: "(" e ")" | X\nX: /[a-z]+/\n%import common.WS\n%ignore WS': ("( a )", "(\na)", "(a"),
    r"start: /\w+ = \x22[^\x22]*\x22/": ('a = "b"', 'a = "b'),
    r'start: /[\]\\"x]+/': (']"\\x', "y"),
    r"start: /\p{Lu}+\\/": ("ABC\\", "abc\\"),
    "start: /SELECT [a-z, ]+ FROM [a-z]+;?/i": ("select a, b from t", "SELECT a FROM t;", "x"),
    'start: A+ -> x\nA: "a" | /b/ // "comment\n# "x\n': ("ab", "c"),
    'start: a{1,3} b~2\na: "\\t"\nb: "x"': ("\txx", "\t\t\t\txx"),
}


def accepts(grammar: str, text: str) -> bool:
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("grammar", CASES)
def test_quoted_grammar_matches_json_strings(grammar: str) -> None:
    for text in CASES[grammar]:
        written = json.dumps(text, ensure_ascii=False)[1:-1]
        assert accepts(json_quoted(grammar), written) == accepts(grammar, text), text


def test_escapes_have_one_case() -> None:
    assert accepts(json_quoted(r"start: /a\n/i"), r"A\n")
    assert not accepts(json_quoted(r"start: /a\n/i"), r"A\N")


def test_bare_input_never_contains_its_ending() -> None:
    grammar = bare_input(PATCH, r"<\/end>")
    text = "*** Begin Patch\n*** Add File: a.py\n+{}\n*** End Patch"
    assert accepts(grammar, text.format("<end>"))
    assert not accepts(grammar, text.format("</end>"))


@pytest.mark.parametrize(
    "grammar", ["start: %json {}", "start: <|eot|>", "start: A\nA: ~/a/", "start: /a/x", "start: /[a/"]
)
def test_unsupported_construct_is_rejected(grammar: str) -> None:
    with pytest.raises(ValueError, match=r"not supported|not closed"):
        json_quoted(grammar)
