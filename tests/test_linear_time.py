"""Whatever reads text of a client, a model or a checkpoint takes time linear in the text's length.

Each case is run on a text and on one that is eight times as long. Time that grows with the square would grow 64 times,
time in proportion 8 times; 24 times leave room for caches and for the noise of a busy machine.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from inflight.checkpoint.builtin import checkpoint_folder
from inflight.constraints.attempts import GrammarSource
from inflight.constraints.input_lark import bare_input, json_quoted
from inflight.errors import InflightError
from inflight.frontend.agents.answer_grammar import answer_grammar
from inflight.frontend.agents.detect import CallStyle
from inflight.frontend.agents.grammar_writer import INPUT_GRAMMAR, InputGrammar
from inflight.frontend.agents.parser import MessageParser
from inflight.frontend.agents.values import bare_text_to_json
from inflight.frontend.chat import checked_tools, template_messages, template_tools
from inflight.frontend.input_processor import bad_word_ids
from inflight.frontend.output_processor import StopStrings
from inflight.frontend.scoring_inputs import encode_prefixes
from inflight.frontend.text.chat import encode_chat
from inflight.frontend.text.chat_template import ChatTemplate
from inflight.frontend.text.detokenizer import IncrementalDetokenizer
from inflight.frontend.text.tokenizer import Tokenizer
from inflight.models.tensors import fill, read_headers
from inflight.server.anthropic.conversation import chat_of
from inflight.server.anthropic.schemas import MessagesBody
from inflight.server.errors import ApiError
from inflight.server.http.bodies import parse_body
from inflight.server.http.limits import RequestFraming
from inflight.server.openai.responses.schemas import ResponsesBody
from inflight.server.openai.responses.tools import InputDecoder
from inflight.server.openai.schemas import ChatBody, CompletionBody
from tests.frontend.agents.outputs import OUTPUTS, TOOLS, Recorded

LONGER = 8
MAX_RATIO = 24
NEGLIGIBLE = 0.5e-3  # seconds for the shorter text, which can hardly be measured
REJECTIONS = (InflightError, ApiError, ValueError, RecursionError)


def cpu_seconds(run: Callable[[Any], object], text: Any) -> float:
    gc.collect()
    gc.disable()  # it runs after a number of allocations, and visits everything else in this process
    try:
        start = time.process_time()
        with suppress(*REJECTIONS):
            run(text)
        return time.process_time() - start
    finally:
        gc.enable()


def check_linear(run: Callable[[Any], object], make: Callable[[int], Any], size: int) -> None:
    short, long = make(size), make(LONGER * size)
    least = min(cpu_seconds(run, short) for _ in range(3))
    allowed = MAX_RATIO * max(least, NEGLIGIBLE)
    taken = float("inf")
    for _ in range(4):
        taken = min(taken, cpu_seconds(run, long))
        if taken <= allowed:
            return
    pytest.fail(f"{taken:.3f} s for {LONGER} times what takes {least:.3f} s")


@dataclass(frozen=True)
class Case:
    make: Callable[[int], Any]  # the input of some size
    run: Callable[[Any], object]
    size: int


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(checkpoint_folder())


@cache
def template() -> ChatTemplate:
    return ChatTemplate(tokenizer().chat_template, tokenizer().special_tokens)


# ---- constraints ----


def grammar_of(kind: str, size: int, make: Callable[[int], Any]) -> Case:
    def text(number: int) -> str:
        value = make(number)
        return value if isinstance(value, str) else json.dumps(value)

    def write(text: str) -> None:
        for one_of in (False, True):
            GrammarSource(kind, text, one_of=one_of).lark(frozenset({"<tool_call>"}))

    return Case(text, write, size)


def numbered(number: int, make: Callable[[int], Any]) -> list[Any]:
    return [make(index) for index in range(number)]


def defs(number: int, make: Callable[[int], Any], **other: Any) -> dict[str, Any]:
    return {"$defs": {f"d{index}": make(index) for index in range(number)}, **other}


SCHEMAS: dict[str, tuple[int, Callable[[int], Any]]] = {
    "properties": (400, lambda n: {"properties": {f"p{i}": {"type": "string"} for i in range(n)}}),
    "required": (400, lambda n: {"type": "object", "required": numbered(n, str), "properties": {"1": {}}}),
    "negated prefix": (8000, lambda n: {"not": {"pattern": "^" + "a" * n}}),
    "negated literal": (8000, lambda n: {"not": {"pattern": f"^{'a' * n}$"}}),
    "negated prefixes": (40, lambda n: {"allOf": [{"not": {"pattern": "^" + "a" * 300}}] * n}),
    "negated words": (40, lambda n: {"allOf": [{"not": {"enum": ["a" * 300]}}] * n}),
    "negated numbers": (1000, lambda n: {"not": {"enum": numbered(n, int)}}),
    "negated lists": (1000, lambda n: {"not": {"const": [1] * n}}),
    "negated objects": (500, lambda n: {"not": {"const": {f"a{i}": 1 for i in range(n)}}}),
    "negated oneOf": (500, lambda n: {"not": {"oneOf": numbered(n, lambda i: {"const": i})}}),
    "negated anyOf": (500, lambda n: {"not": {"anyOf": numbered(n, lambda i: {"const": i})}}),
    "negated allOf": (500, lambda n: {"not": {"allOf": numbered(n, lambda i: {"const": i})}}),
    "oneOf": (500, lambda n: {"oneOf": numbered(n, lambda i: {"const": i})}),
    "conditions": (200, lambda n: {"allOf": numbered(n, lambda i: {"if": {"const": i}, "then": {}})}),
    "contains": (200, lambda n: {"allOf": numbered(n, lambda i: {"contains": {"const": i}})}),
    "dependencies": (300, lambda n: {"dependentRequired": {"a": numbered(n, str)}}),
    "unevaluated properties": (
        400,
        lambda n: {
            "allOf": numbered(n, lambda i: {"properties": {f"p{i}": {}}}),
            "unevaluatedProperties": False,
        },
    ),
    "references": (500, lambda n: defs(1, lambda _: {}, anyOf=[{"$ref": "#/$defs/d0"}] * n)),
    "chain": (400, lambda n: defs(n, lambda i: {"$ref": f"#/$defs/d{i + 1}"}, **{"$ref": "#/$defs/d0"})),
    "chain, last first": (
        400,
        lambda n: defs(n, lambda i: {"$ref": f"#/$defs/d{i - 1}"}, **{"$ref": f"#/$defs/d{n - 1}"}),
    ),
    "long name": (1500, lambda n: {"properties": {"x" * 4 * n: {"anyOf": [{"$ref": "#"}] * (n // 3)}}}),
    "long reference": (8000, lambda n: {"$ref": "#/" + "a/" * n}),
    "classes": (3000, lambda n: {"pattern": "[^\\s]" * n}),
    "open classes": (8000, lambda n: {"pattern": "[" * n}),
    "open names": (8000, lambda n: {"pattern": "\\p{" * n}),
}
LARKS: dict[str, Callable[[int], str]] = {
    "escaped quotes": lambda n: 'start: "' + '\\"' * n,
    "escaped slashes": lambda n: "start: /" + "\\/" * n,
    "quotes in a comment": lambda n: 'start: a // "' + '\\"' * n + '\na: "x"',
    "chain": lambda n: "".join(f"r{i}: r{i + 1}\n" for i in range(n // 9)) + f'r{n // 9}: "a"',
    "chain, last first": lambda n: 'r0: "a"\n' + "".join(f"r{i + 1}: r{i}\n" for i in range(n // 9)),
    "open brackets": lambda n: "start: b\n" + "a[\n" * n,
    "angle brackets": lambda n: "start: " + "<" * n,
    "open names": lambda n: "start: /" + "\\p{" * n + "/",
    "open groups": lambda n: "start: /" + "(?<a" * n + "/",
    "open classes": lambda n: "start: /" + "[" * n + "/",
    "classes": lambda n: "start: /" + "[\u4e00\u5e00]" * (n // 4) + "/",
    "ranges": lambda n: "start: " + '"a".. ' * (n // 4),
    "spaces": lambda n: 'start: "a"' + " " * n + '"',
    "arrows": lambda n: "start: b\nb: " + "-> " * n + '"x"',
    "blank lines": lambda n: "start: b\n" + " \n" * n,
}
EMBEDDED: dict[str, Callable[[int], str]] = {
    "schemas": lambda n: "start: " + "%json {} " * (n // 8),
    "open schemas": lambda n: "start: " + '%json {"a": ' * (n // 8),
    "quotes": lambda n: 'start: %json {} "' + '\\"' * n,
    "slashes": lambda n: "start: %json {} /" + "\\/" * n,
    "comments": lambda n: "start: %json {} " + '//"\n' * n,
    "no grammar": lambda n: "start" + " \n" * n,
    "GBNF string": lambda n: 'root ::= "' + '\\"' * n,
    "GBNF alternatives": lambda n: 'root ::= "a"' + ' | "a"' * (n // 4),
    "GBNF classes": lambda n: "root ::= " + "[a-z]" * (n // 4),
}


def tags(number: int) -> dict[str, Any]:
    structures = numbered(number, lambda i: {"begin": f"<t{i}>", "schema": True, "end": ""})
    return {"triggers": numbered(number, lambda i: f"<t{i}>"), "structures": structures}


CONSTRAINTS = {
    **{f"schema, {name}": grammar_of("json", size, make) for name, (size, make) in SCHEMAS.items()},
    **{f"quoted Lark, {name}": Case(make, json_quoted, 4000) for name, make in LARKS.items()},
    **{
        f"bare Lark, {name}": Case(make, lambda text: bare_input(text, "end"), 4000)
        for name, make in LARKS.items()
    },
    **{f"grammar, {name}": grammar_of("grammar", 4000, make) for name, make in EMBEDDED.items()},
    "choices": grammar_of("choice", 1000, lambda n: numbered(n, str)),
    "tags": grammar_of("structural_tag", 250, tags),
    "regex": grammar_of("regex", 4000, lambda n: "\\/(" * n),
}


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_constraints_are_written_in_linear_time(name: str) -> None:
    case = CONSTRAINTS[name]
    check_linear(case.run, case.make, case.size)


# ---- tools ----

STYLES = ("hermes", "qwen3_coder", "glm45", "gemma4", "pythonic", "kimi_k2", "harmony", "deepseek_v32")


def function(parameters: dict[str, Any], **other: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True, **other}}


def with_definitions(number: int) -> list[Any]:
    properties = {f"p{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i}"}} for i in range(number)}
    return [function(defs(number, lambda _: {"type": "integer"}, type="object", properties=properties))]


def with_input(syntax: Any, definition: str) -> list[Any]:
    schema = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    return [function(schema, **{INPUT_GRAMMAR: InputGrammar(syntax, definition, "tools")})]


TOOL_LISTS: dict[str, tuple[int, Callable[[int], list[Any]]]] = {
    "definitions": (200, with_definitions),
    "properties": (
        200,
        lambda n: [function({"type": "object", "properties": {f"p{i}": {} for i in range(n)}})],
    ),
    "tools": (100, lambda n: [function({}, name=f"f{i}") for i in range(n)]),
    "values": (400, lambda n: [function({"properties": {"a": {"enum": numbered(n, str)}}})]),
    "Lark": (4000, lambda n: with_input("lark", 'start: "' + '\\"' * n)),
    "regex": (1000, lambda n: with_input("regex", "[a-z]./" * n)),
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", TOOL_LISTS)
def test_tools_are_read_in_linear_time(name: str, style: str) -> None:
    def run(tools: list[Any]) -> None:
        template_tools(tools)
        with suppress(InflightError):
            checked_tools(tools)
        answer_grammar(style, "think", tools=tools, tool_choice="required")

    size, make = TOOL_LISTS[name]
    check_linear(run, make, size)


# ---- generated text ----


def parser(output: Recorded) -> MessageParser:
    return MessageParser(output.format, output.reasoning, tools=TOOLS, prompt=output.prompt)


def in_characters(output: Recorded, text: str) -> None:
    reader = parser(output)
    for character in text:
        reader.feed(character)
    reader.finish()


FORMATS = {(output.format, output.reasoning): output for output in reversed(OUTPUTS.values())}


@pytest.mark.parametrize("output", FORMATS.values(), ids=lambda output: f"{output.format} {output.reasoning}")
def test_outputs_are_parsed_in_linear_time(output: Recorded) -> None:
    """Beginnings of an output, over and over again, so that each has an end that never comes."""
    length = len(output.text)
    for end in sorted({length // 6, length // 3, length // 2, 4 * length // 5, length - 1}):
        check_linear(lambda text: parser(output).parse(text), repeated(output.text[: max(end, 1)]), 4000)
    beginning = output.text[: length // 2]
    check_linear(partial(in_characters, output), repeated(beginning), 1500)
    for ending in (" ", "{", '"', "<"):
        check_linear(partial(in_characters, output), repeated(ending, beginning), 1500)


def repeated(piece: str, beginning: str = "") -> Callable[[int], str]:
    return lambda number: beginning + piece * (number // len(piece))


def decode_input(text: str) -> None:
    decoder = InputDecoder()
    for character in text:
        decoder.feed(character)


def detokenize(ids: list[int]) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer())
    for token_id in ids:
        detokenizer.push([token_id])


def stop(text: str) -> None:
    stops = StopStrings(["a" * 1000 + "b", "ab" * 500])
    for character in text:
        stops.push(character)


OUTPUT_TEXTS = {
    "input after spaces": Case(lambda n: " " * n, decode_input, 4000),
    "other input": Case(lambda n: '{"other": "' + "a" * n, decode_input, 4000),
    "escapes in an input": Case(lambda n: '{"input": "' + "\\ud83d" * n, decode_input, 4000),
    "after an input": Case(lambda n: '{"input": "a"' + " " * n, decode_input, 4000),
    "Python strings": Case(lambda n: "'\\" * n, lambda text: bare_text_to_json(text, frozenset()), 8000),
    "Python lists": Case(lambda n: "(" * n, lambda text: bare_text_to_json(text, frozenset()), 8000),
    "Python spaces": Case(lambda n: ", " * n, lambda text: bare_text_to_json(text, frozenset()), 8000),
    "incomplete characters": Case(lambda n: tokenizer().encode("😀")[:1] * n, detokenize, 4000),
    "almost a stop string": Case(lambda n: "a" * n, stop, 4000),
}


@pytest.mark.parametrize("name", OUTPUT_TEXTS)
def test_outputs_are_converted_in_linear_time(name: str) -> None:
    case = OUTPUT_TEXTS[name]
    check_linear(case.run, case.make, case.size)


# ---- prompts and bodies ----

PIECES = ("a", " ", "\n", " \n", "!", "1", "😀", "\u0301", "\x00", "漢", "<|im_end|>", "<|im_", "'s", "\r")


@pytest.mark.parametrize("piece", PIECES, ids=ascii)
def test_text_is_tokenized_in_linear_time(piece: str) -> None:
    def run(text: str) -> None:
        tokenizer().encode(text)
        encode_prefixes(tokenizer(), [text], [100])
        encode_chat(template(), tokenizer(), [{"role": "user", "content": text}])

    check_linear(run, lambda n: piece * (n // len(piece)), 16_000)


def messages(number: int) -> list[dict[str, Any]]:
    call = {"id": "a", "type": "function", "function": {"name": "a", "arguments": '{"a":' * 10}}
    return [
        {"role": "user", "content": [{"type": "text", "text": "<|im_"}]},
        {"role": "assistant", "tool_calls": [call]},
    ] * number


def anthropic_body(number: int) -> MessagesBody:
    blocks = [{"type": "text", "text": "a"}] * number
    system = [{"type": "text", "text": "x-anthropic-billing-header:"}] * number
    body = {
        "model": "a",
        "max_tokens": 1,
        "system": system,
        "messages": [{"role": "user", "content": blocks}],
    }
    return MessagesBody.model_validate(body)


def frame(data: bytes) -> None:
    """Read a request that arrives in pieces."""
    framing = RequestFraming()
    framing.headers_complete([(b"transfer-encoding", b"chunked")])
    for start in range(0, len(data), 64):
        piece, at = data[start : start + 64], 0
        while at < len(piece) and not framing.in_headers:
            at = framing.advance(piece, at, 1 << 16)


PROMPTS = {
    "messages": Case(messages, lambda value: encode_chat(template(), tokenizer(), value), 300),
    "message fields": Case(messages, lambda value: template_messages(value, CallStyle()), 1000),
    "blocks": Case(anthropic_body, chat_of, 1000),
    "bad words": Case(
        lambda n: ["x " * i + str(i) for i in range(1, int(n**0.5))],
        lambda words: bad_word_ids(tokenizer(), words),
        16_000,
    ),
    "chunks": Case(lambda n: b"1\r\na\r\n" * n, frame, 8000),
    "chunk extensions": Case(lambda n: b"1;" + b"a" * n, frame, 8000),
    "headers": Case(lambda n: b"a: b\n" * n, lambda data: RequestFraming().advance(data, 0, 1 << 20), 8000),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_are_read_in_linear_time(name: str) -> None:
    case = PROMPTS[name]
    check_linear(case.run, case.make, case.size)


BODIES: dict[str, Callable[[int], bytes]] = {
    "digits": lambda n: b'{"max_tokens": ' + b"9" * n + b"}",
    "fraction": lambda n: b'{"temperature": 1.' + b"9" * n + b"}",
    "nesting": lambda n: b'{"messages": ' + b"[" * n,
    "quotes": lambda n: b'{"model": "' + b'\\"' * n,
    "keys": lambda n: json.dumps({f"k{i}": 1 for i in range(n // 4)}).encode(),
    "equal keys": lambda n: b"{" + b'"model": "a", ' * (n // 4) + b'"a": 1}',
    "messages": lambda n: json.dumps({"messages": [{"role": "x", "content": 5}] * (n // 8)}).encode(),
    "items": lambda n: json.dumps({"input": [{"type": "x"}] * (n // 8)}).encode(),
    "structure in strings": lambda n: (b'"' + b"{" * 9 + b'"') * n,
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies_are_parsed_in_linear_time(name: str) -> None:
    def run(body: bytes) -> None:
        for schema in (ChatBody, CompletionBody, MessagesBody, ResponsesBody):
            with suppress(ApiError):
                parse_body(schema, body)

    check_linear(run, BODIES[name], 8000)


# ---- checkpoints ----


def test_weights_in_many_files_are_read_in_linear_time(tmp_path: Path) -> None:
    def files(number: int) -> Any:
        paths = [tmp_path / f"{index}.safetensors" for index in range(number)]
        for index, path in enumerate(paths):
            save_file({f"tensor.{index}": torch.zeros(1)}, path)
        return read_headers(paths)

    check_linear(lambda stored: fill({}, stored), files, 200)
