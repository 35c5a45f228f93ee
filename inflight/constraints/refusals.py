"""What llguidance says about a grammar that it cannot use, in words for the user who asked for it."""

from __future__ import annotations

import re

from inflight.constraints.patterns import as_written
from inflight.errors import ParameterError

MAX_LENGTH = 400  # characters
# Of what it says, at both ends. It quotes all that a user wrote, and patterns take a time that grows with the square.
MAX_READ = 2000

# What it says, and what is said instead. All that match are applied, in this order.
_WORDS = [
    (r"invalid regex \".*?\" \(in regex\): (?=regex parse error|lookarounds)", ""),
    (r"\s\^+ error: ", ": "),
    (
        r"lookarounds not supported yet; \w+ in regex",
        "word boundaries and other look-around are not supported:",
    ),
    (r"; following special tokens are available: .*", ""),
    (r"NoExtensionBias", "it leads back to itself before anything is written, so no text can match it"),
    (
        r"oneOf constraints are not supported\. Enable 'coerce_one_of' .*",
        "alternatives of oneOf overlap, and whether exactly one of them holds cannot be told token by token: use anyOf",
    ),
]
_TOO_COMPLEX = [
    (r".*fuel exhausted.*", "it takes too many steps to compile"),
    (r".*Current row has \d+ items; max is \d+.*", "too many different things may come at one place"),
    (r"Unable to determine if regex is empty.*", "its patterns and lengths can hardly be kept all at once"),
    (r".*(?:step|lexer|parser|items?|states?).*(?:limit|too many).*", "it has too many states"),
    (r"(?!Token range).*too (?:many|large|complex|deep).*", r"\g<0>"),
]


def refusal(name: str, param: str, message: str) -> ParameterError:
    """Without the grammar around it that the user never saw."""
    text = message.split("<non-verbose/>")[0]
    text = text.split("failed to compile JSON schema: ", 1)[-1]
    text = _shortened(re.split(r"\n[ \t]++\d++ \| ", text, maxsplit=1)[0], 2 * MAX_READ)
    text = as_written(re.sub(r"^at \d+\(\d+\): ", "", " ".join(text.split())))
    unsupported = re.search(r"Unimplemented keys: \[(.*)\]", text)
    if unsupported:
        keywords = unsupported[1].replace('"', "'")
        return ParameterError(
            f"{name}: the keyword {keywords} is not supported", param=param, code="unsupported_keyword"
        )
    for pattern, words in _TOO_COMPLEX:
        found = re.fullmatch(pattern, text, re.IGNORECASE)
        if found:
            reason = _shortened(found.expand(words), MAX_LENGTH)
            return ParameterError(
                f"{name} is too complex: {reason}", param=param, code="constraint_too_complex"
            )
    for pattern, words in _WORDS:
        text = re.sub(pattern, words, text)
    return ParameterError(
        f"{name} cannot be used: {_shortened(text, MAX_LENGTH)}", param=param, code="invalid_constraint"
    )


def _shortened(text: str, length: int) -> str:
    """Its beginning, and its end: why often stands there."""
    half = length // 2
    return text if len(text) <= length else f"{text[:half]} ... {text[-half:]}"
