"""Recorded outputs in each format, and the messages that they stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from inflight.agents import CalledFunction, ParsedMessage


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool(
        "get_weather",
        city={"type": "string"},
        days={"type": "integer"},
        detailed={"type": "boolean"},
        place={"type": "object"},
        unit={"type": ["string", "null"]},
    ),
    tool("add", a={"type": "number"}, b={"anyOf": [{"type": "number"}, {"type": "null"}]}),
    tool("get_time"),
]


@dataclass(frozen=True)
class Recorded:
    """One output. `reasoning` is the name of its reasoning format."""

    format: str
    text: str
    calls: tuple[tuple[str, str], ...]  # names and arguments
    content: str = ""
    reasoning: str | None = None
    thought: str = ""
    prompt: str = ""
    ids: tuple[str | None, ...] = ()
    complete: bool = True

    @property
    def message(self) -> ParsedMessage:
        ids = self.ids or (None,) * len(self.calls)
        calls = [
            CalledFunction(name, arguments, id, self.complete)
            for (name, arguments), id in zip(self.calls, ids, strict=True)
        ]
        return ParsedMessage(self.content, self.thought, calls)


PARIS = '{"city": "Paris", "days": 3}'
WEATHER = ("get_weather", PARIS)
TIME = ("get_time", "{}")

OUTPUTS = {
    "hermes": Recorded(
        "hermes", f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>', (WEATHER,)
    ),
    "hermes, text before and after, two calls": Recorded(
        "hermes",
        'I look.\n\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>\n'
        f'<tool_call>{{"name":"get_weather","arguments":{PARIS}}}</tool_call> Done.\n',
        (TIME, WEATHER),
        content="I look. Done.\n",
    ),
    "hermes, markers in strings, members in another order": Recorded(
        "hermes",
        '<tool_call>{"arguments": {"city": "</tool_call>{\\"}", "x": [{}]}, "type": "function", '
        '"name": "get_weather"}</tool_call>',
        (("get_weather", '{"city": "</tool_call>{\\"}", "x": [{}]}'),),
    ),
    "hermes, arguments as a string": Recorded(
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"\\u00e9\\ud83d\\ude42\\\\n\\"}"}</tool_call>',
        (("get_weather", '{"city": "é🙂\\n"}'),),
    ),
    "hermes, no arguments": Recorded("hermes", '<tool_call>{"name": "get_time"}</tool_call>', (TIME,)),
    "hermes, null for arguments": Recorded(
        "hermes", '<tool_call>{"name": "get_time", "arguments": null}</tool_call>', (TIME,)
    ),
    "hermes, a missing brace": Recorded(
        "hermes",
        f'<tool_call>{{"name": "get_weather", "arguments": {PARIS}\n</tool_call>\nSo.',
        (WEATHER,),
        "\nSo.",
    ),
    "hermes, broken off": Recorded(
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Par',
        (("get_weather", '{"city": "Par'),),
        complete=False,
    ),
    "hermes, after a thought": Recorded(
        "hermes",
        "<think>\nHm, <tool_call>?\n</think>\n\nOk."
        f'<tool_call>{{"name": "get_weather", "arguments": {PARIS}}}</tool_call>',
        (WEATHER,),
        "Ok.",
        "think",
        "Hm, <tool_call>?",
    ),
    "hermes, inside a thought": Recorded(
        "hermes",
        'Right.\n</think>\n<tool_call>{"name": "get_time", "arguments": {}}</tool_call>',
        (TIME,),
        "",
        "think",
        "Right.",
        prompt="<|im_start|>assistant\n<think>\n",
    ),
    "qwen3_coder": Recorded(
        "qwen3_coder",
        'Sure.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nNew\n"York"\n</parameter>\n'
        "<parameter=days>\n3\n</parameter>\n<parameter=detailed>\nTrue\n</parameter>\n"
        "<parameter=place>\n{'a': [1, None]}\n</parameter>\n<parameter=unit>\nnull\n</parameter>\n"
        "</function>\n</tool_call>",
        (
            (
                "get_weather",
                '{"city": "New\\n\\"York\\"", "days": 3, "detailed": true, "place": {"a": [1, null]}, "unit": null}',
            ),
        ),
        "Sure.",
    ),
    "qwen3_coder, no outer tag, no end of a parameter": Recorded(
        "qwen3_coder",
        "<function=add><parameter=a>1.5\n<parameter=b>\n2\n</function><function=get_time></function>",
        (("add", '{"a": 1.5, "b": 2}'), TIME),
    ),
    "qwen3_coder, broken off": Recorded(
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar",
        (("get_weather", '{"city": "Par'),),
        complete=False,
    ),
    "glm45": Recorded(
        "glm45",
        "<think></think>\nOk\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>3</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>get_time</tool_call>",
        (("get_weather", '{"city": "3", "days": 3}'), TIME),
        "Ok",
        "think",
    ),
    "glm45, a parameter without a schema": Recorded(
        "glm45",
        "<tool_call>get_time<arg_key>zone</arg_key><arg_value>[1, 2]</arg_value>"
        "<arg_key>x</arg_key><arg_value>it's</arg_value></tool_call>",
        (("get_time", '{"zone": [1, 2], "x": "it\'s"}'),),
    ),
    "llama3_json": Recorded("llama3_json", f'{{"name": "get_weather", "parameters": {PARIS}}}', (WEATHER,)),
    "llama3_json, several": Recorded(
        "llama3_json",
        f'\n{{"type": "function", "name": "get_weather", "parameters": {PARIS}}}; '
        '{"name": "get_time", "parameters": {}}',
        (WEATHER, TIME),
    ),
    "llama3_json, a tag": Recorded(
        "llama3_json", 'Now: <|python_tag|>{"name": "get_time", "parameters": {}}', (TIME,), "Now:"
    ),
    "pythonic": Recorded(
        "pythonic",
        "[get_weather(city='Paris', days=3), get_time( )]",
        (WEATHER, TIME),
    ),
    "pythonic, values": Recorded(
        "pythonic",
        "<|python_start|>[get_weather(city=\"it's, (so)\\n\", place={'a': [True, None, (1, 2)]}, days=x+1,)]"
        "<|python_end|>",
        (("get_weather", '{"city": "it\'s, (so)\\n", "place": {"a": [true, null, [1, 2]]}, "days": "x+1"}'),),
    ),
    "mistral, a list": Recorded(
        "mistral",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}, "id": "abcdefghi"}}, '
        '{"id": "123456789", "name": "get_time", "arguments": {}}]',
        (WEATHER, TIME),
        ids=(None, "123456789"),
    ),
    "mistral, names": Recorded(
        "mistral",
        f"[THINK]So.[/THINK]Ok[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]get_time[CALL_ID]abcdefghi[ARGS]{{}}",
        (WEATHER, TIME),
        "Ok",
        "mistral",
        "So.",
        ids=(None, "abcdefghi"),
    ),
    "deepseek_v3": Recorded(
        "deepseek_v3",
        "Hm.</think>I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        f"{PARIS}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n```json\n{{}}\n```\n"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        (WEATHER, TIME),
        "I look.",
        "think",
        "Hm.",
        prompt="<｜Assistant｜><think>\n",
    ),
    "deepseek_v3, as v3.1 writes": Recorded(
        "deepseek_v3",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{PARIS}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        (WEATHER, TIME),
    ),
    "kimi_k2": Recorded(
        "kimi_k2",
        "<think>Let me<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        f"<|tool_call_argument_begin|>{PARIS}<|tool_call_end|><|tool_call_begin|>functions.get_time:1"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        (WEATHER, TIME),
        "",
        "think",
        "Let me",
        ids=("functions.get_weather:0", "functions.get_time:1"),
    ),
    "harmony": Recorded(
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>analysis<|message|>So.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.get_weather <|constrain|>json<|message|>{PARIS}<|call|>",
        (WEATHER,),
        "I look.",
        "harmony",
        "Hm.\nSo.",
    ),
    "harmony, to before the channel, the last token not in the text": Recorded(
        "harmony",
        " to=functions.get_time<|channel|>commentary json<|message|>{}",
        (TIME,),
        reasoning="harmony",
    ),
    "harmony, final": Recorded(
        "harmony", "<|channel|>final<|message|>{4} <b>\n<|return|>", (), "{4} <b>\n", "harmony"
    ),
    "harmony, inside a thought": Recorded(
        "harmony",
        "So.<|end|><|start|>assistant<|channel|>final<|message|>4",
        (),
        "4",
        "harmony",
        "So.",
        prompt="<|end|><|start|>assistant<|channel|>analysis<|message|>",
    ),
}

# Texts that no format should take for calls: they are content, letter by letter.
CONTENT = {
    "hermes": [
        "Use <tool_call> and </tool_call>.",
        '<tool_call>\n{"tool": "get_time"}\n</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "get_ti',
        'a \n <tool_call>[{"name": "get_time"}]',
        "no <tool",
        '<tool_call>{"name": "\\ud800", "arguments": {}}',
    ],
    "qwen3_coder": [
        "<tool_call>\n<function=",
        "<tool_call>get_time</tool_call>",
        "\n<function=a<b>",
        "x <function=\n>",
    ],
    "glm45": ["<tool_call>", "<tool_call>get_time and", '\t<tool_call>{"name": "get_time"}</tool_call>\n'],
    "llama3_json": [
        '{"name": "Bob", "parameters": {}}',
        '{"answer": 4}',
        'It is {"name": "get_time", "parameters": {}}',
        "<|python_tag|>print(1)",
        " {",
    ],
    "pythonic": [
        "[1]",
        "[link(url='x')]",
        "[get_time(1)]",
        " [get_time",
        "get_time()",
        "[]",
        "<|python_start|>1+1",
    ],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS] []", "a [TOOL_CALLS] name", '[TOOL_CALLS][{"a": 1}]', "[TOOL"],
    "deepseek_v3": [
        "a\n<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>get_time<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜> <｜tool",
    ],
    "kimi_k2": [
        "<|tool_calls_section_begin|>x",
        " <|tool_call_begin|>functions.get_time:0<|tool_call_end|>",
        "<|tool_call_begin|><|tool_call_argument_begin|>{}",
    ],
    "harmony": [
        "Plain.",
        "<|channel|>analysis",
        "a <|start|>assistant",
        " to=functions.x",
        "<|start|><|channel|>",
    ],
}
