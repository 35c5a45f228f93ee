"""What tools return, in the many forms there are, and how the answer says it."""

import json
from dataclasses import dataclass
from random import Random
from typing import Any

from tools.builtin.grammar import capital
from tools.builtin.tables import sections
from tools.builtin.tool_values import Words, result_words

FAMILIES = sections("tools")
_ERRORS = (
    "not found",
    "{v} is unknown",
    "timeout",
    "no data for {v}",
    "the service is not available",
    "try again later",
    "permission denied",
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A result as it comes back, the sentence that tells it, and the words that must not get lost."""

    result: str
    answer: str
    needed: tuple[str, ...]


def json_text(rng: Random, value: object) -> str:
    """JSON as different programs write it."""
    roll = rng.random()
    if roll < 0.12:
        return str(value)  # as Python writes a dict
    if roll < 0.4:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return json.dumps(value, ensure_ascii=False, indent=2 if roll < 0.5 else None)


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _number(text: str) -> int | float:
    digits = text.replace(",", "")
    return float(digits) if "." in digits else int(digits)


def _record(spec: str, words: Words) -> dict[str, Any]:
    """`city=v; temperature=#n` as a dict: the words by their keys, numbers behind #, and other text as it is."""
    record: dict[str, Any] = {}
    for field in spec.split(";"):
        key, _, source = field.strip().partition("=")
        record[key] = _number(words[source[1:]]) if source.startswith("#") else words.get(source, source)
    return record


def error(rng: Random, words: Words) -> Outcome:
    text = rng.choice(_ERRORS).format_map({"v": "it", **words})
    result = f"Error: {text}" if rng.random() < 0.6 else json_text(rng, {"error": text})
    return Outcome(result, f"That did not work: {text}.", (text,))


def outcome(rng: Random, family: str, words: Words) -> Outcome:
    """A result of a tool of this family. `words` are its arguments."""
    lists = FAMILIES[family]
    words = {**result_words(rng), **words, "V": capital(words.get("v", ""))}
    if "v" in words and words["v"].isdigit():
        words["n"] = str(rng.randint(1, 99))
    roll = rng.random()
    if roll < 0.03:
        return error(rng, words)
    template = rng.choice(lists["answer"])
    if roll < 0.25 and "sentence" in lists:
        text = capital(rng.choice(lists["sentence"]).format_map(words))
        return Outcome(text, text, (text.rstrip("."),))
    if roll < 0.55:
        record = _record(rng.choice(lists["json"]), words)
        values = tuple(map(_plain, record.values()))
        told = ", ".join(f"{key} {_plain(value)}" for key, value in record.items())
        if len(record) == 1:
            told = values[0]
        elif "want" in lists:
            template = capital(lists["want"][0]) + ": {r}."
        answer = capital(template.format_map({**words, "r": told}))
        return Outcome(json_text(rng, record), answer, values)
    text = rng.choice(lists["result"]).format_map(words)
    answer = capital(template.format_map({**words, "r": text}))
    return Outcome(json.dumps(text, ensure_ascii=False) if rng.random() < 0.1 else text, answer, (text,))
