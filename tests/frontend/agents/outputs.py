"""Recorded outputs in each format, and the messages that they stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from inflight.frontend.agents.source import CalledFunction, ParsedMessage


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
    "hermes, a call in unclosed reasoning": Recorded(
        "hermes",
        f'<think>\nI call <tool_call>.\n<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>'
        "\n</think>\n\n",
        (WEATHER,),
        "",
        "think",
        "I call <tool_call>.",
    ),
    "hermes, arguments that are not valid JSON": Recorded(
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": Paris}}</tool_call>',
        (("get_weather", '{"city": Paris}'),),
        complete=False,
    ),
    "hermes, repeated end markers": Recorded(
        "hermes",
        '<tool_call>{"name": "get_time"}</tool_call>\n</tool_call></tool_call>\n',
        (TIME,),
    ),
    "qwen3_coder, a call in unclosed reasoning": Recorded(
        "qwen3_coder",
        "Hm.\n\n<tool_call>\n<function=get_time>\n</function>\n</tool_call></function>",
        (TIME,),
        "",
        "think",
        "Hm.",
        prompt="<|im_start|>assistant\n<think>\n",
    ),
    "glm45, a call in unclosed reasoning": Recorded(
        "glm45",
        "<think>Hm.<tool_call>get_time</tool_call>",
        (TIME,),
        "",
        "think",
        "Hm.",
    ),
    "mistral, a call in unclosed reasoning": Recorded(
        "mistral", "[THINK]So.[TOOL_CALLS]get_time[ARGS]{}", (TIME,), "", "mistral", "So."
    ),
    "deepseek_v3, a call in unclosed reasoning": Recorded(
        "deepseek_v3",
        "<think>Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜><｜tool▁calls▁end｜>",
        (TIME,),
        "",
        "think",
        "Hm.",
    ),
    "harmony, a recipient without a namespace": Recorded(
        "harmony",
        f"<|channel|>commentary to=get_weather <|constrain|>json<|message|>{PARIS}<|call|>",
        (WEATHER,),
        reasoning="harmony",
    ),
    "harmony, a built-in tool": Recorded(
        "harmony", "<|channel|>analysis to=python<|message|>1 + 1<|call|>", (), "", "harmony", "1 + 1"
    ),
    "longcat": Recorded(
        "longcat",
        f'<longcat_tool_call>{{"name": "get_weather", "arguments": {PARIS}}}</longcat_tool_call>\n'
        '<longcat_tool_call>{"name": "get_time", "arguments": {}}</longcat_tool_call>',
        (WEATHER, TIME),
    ),
    "granite": Recorded(
        "granite",
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": "get_time", "arguments": {{}}}}]',
        (WEATHER, TIME),
    ),
    "granite, as 3.1 writes, after a thought": Recorded(
        "granite",
        'Here is my thought process: Hm. Here is my response: Sure.\n<tool_call>[{"name": "get_time"}]',
        (TIME,),
        "Sure.",
        "granite",
        "Hm.",
    ),
    "granite, no marker": Recorded("granite", '[{"name": "get_time", "arguments": {}}]', (TIME,)),
    "granite_20b_fc": Recorded(
        "granite_20b_fc",
        f'<function_call> {{"name": "get_weather", "arguments": {PARIS}}} <function_call> {{"name": "get_time"}}',
        (WEATHER, TIME),
    ),
    "phi4_mini": Recorded(
        "phi4_mini",
        f'functools[{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": "get_time", "arguments": {{}}}}]',
        (WEATHER, TIME),
    ),
    "jamba": Recorded(
        "jamba",
        f'Ok.<tool_calls>[\n    {{"name": "get_weather", "arguments": {PARIS}}},\n    {{"name": "get_time"}}\n]'
        "</tool_calls>",
        (WEATHER, TIME),
        "Ok.",
    ),
    "jamba, no brackets, reasoning and answer in tags": Recorded(
        "jamba",
        '<think>\nHm.\n</think>\n<answer>\nI look.\n</answer>\n<tool_calls>\n{"name": "get_time"}\n'
        f'{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_calls>',
        (TIME, WEATHER),
        "I look.",
        "hunyuan_a13b",
        "Hm.",
    ),
    "internlm2": Recorded(
        "internlm2",
        f'Let me look.<|action_start|><|plugin|>\n{{"name": "get_weather", "parameters": {PARIS}}}<|action_end|>\n',
        (WEATHER,),
        "Let me look.",
    ),
    "nemotron": Recorded(
        "nemotron",
        f'<TOOLCALL>[{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": "get_time"}}]</TOOLCALL>',
        (WEATHER, TIME),
    ),
    "cohere_command": Recorded(
        "cohere_command",
        "<|START_THINKING|>I will look.<|END_THINKING|><|START_ACTION|>[\n"
        f'    {{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {PARIS}}},\n'
        '    {"tool_call_id": "1", "tool_name": "get_time", "parameters": {}}\n]<|END_ACTION|>',
        (WEATHER, TIME),
        "",
        "cohere_command",
        "I will look.",
    ),
    "cohere_command, an answer": Recorded(
        "cohere_command",
        "<|START_THINKING|>Easy.<|END_THINKING|><|START_RESPONSE|>It is 4.<|END_RESPONSE|>",
        (),
        "It is 4.",
        "cohere_command",
        "Easy.",
    ),
    "apertus": Recorded(
        "apertus",
        f'Ok. <|tools_prefix|>[{{"get_weather": {PARIS}}}, {{"get_time": {{}}}}]<|tools_suffix|>',
        (WEATHER, TIME),
        "Ok.",
    ),
    "gigachat3": Recorded(
        "gigachat3",
        f'I look.<|message_sep|>\n\nfunction call<|role_sep|>\n{{"name": "get_weather", "arguments": {PARIS}}}',
        (WEATHER,),
        "I look.",
    ),
    "xlam": Recorded(
        "xlam",
        f'[{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": "get_time", "arguments": {{}}}}]',
        (WEATHER, TIME),
    ),
    "xlam, in a code block": Recorded(
        "xlam", 'So:\n```json\n[{"name": "get_time", "arguments": {}}]\n```', (TIME,), "So:"
    ),
    "seed_oss": Recorded(
        "seed_oss",
        "<seed:think>Hm.</seed:think>I look.\n<seed:tool_call>\n<function=get_weather>\n"
        "<parameter=city>New\n<York></parameter>\n<parameter=days>3</parameter>\n</function>\n</seed:tool_call>",
        (("get_weather", '{"city": "New\\n<York>", "days": 3}'),),
        "I look.",
        "seed_oss",
        "Hm.",
    ),
    "minimax_m2": Recorded(
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="get_time">\n</invoke>\n</minimax:tool_call>',
        (WEATHER, TIME),
    ),
    "deepseek_v32": Recorded(
        "deepseek_v32",
        'Ok\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="get_time">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        (WEATHER, TIME),
        "Ok",
    ),
    "deepseek_v32, the tag tells strings": Recorded(
        "deepseek_v32",
        '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="x" string="true">1'
        '</｜DSML｜parameter><｜DSML｜parameter name="y" string="false">1</｜DSML｜parameter></｜DSML｜invoke>',
        (("f", '{"x": "1", "y": 1}'),),
    ),
    "deepseek_v4": Recorded(
        "deepseek_v4",
        '<think>Hm.<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_time">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        (TIME,),
        "",
        "think",
        "Hm.",
    ),
    "deepseek_v4, in the tags of the version before": Recorded(
        "deepseek_v4",
        'Ok\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        (WEATHER,),
        "Ok",
    ),
    "step3": Recorded(
        "step3",
        '<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_weather">'
        '<steptml:parameter name="city">Paris</steptml:parameter><steptml:parameter name="days">3</steptml:parameter>'
        "</steptml:invoke><｜tool_call_end｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>"
        '<steptml:invoke name="get_time"></steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>',
        (WEATHER, TIME),
    ),
    "hy_v3": Recorded(
        "hy_v3",
        "<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>get_time<tool_sep>\n"
        "</tool_call>\n</tool_calls>",
        (WEATHER, TIME),
    ),
    "solar_open2": Recorded(
        "solar_open2",
        "I look.\n<|tool_call:start|>get_weather\n<|tool_arg:start|>city<|tool_arg:value|>Paris<|tool_arg:end|>\n"
        "<|tool_arg:start|>days<|tool_arg:value|>3<|tool_arg:end|>\n<|tool_call:end|>\n"
        "<|tool_call:start|>get_time\n<|tool_call:end|>",
        (WEATHER, TIME),
        "I look.",
    ),
    "minicpm5": Recorded(
        "minicpm5",
        '<function name="get_weather"><param name="city">Paris</param><param name="days">3</param></function>\n'
        '<function name="get_time"></function>',
        (WEATHER, TIME),
    ),
    "minicpm5, values in CDATA": Recorded(
        "minicpm5",
        '<function name="f"><param name="code"><![CDATA[a < b]]></param>'
        '<param name="text">\n<![CDATA[ if x:\n  "</param></function>" ]]>\n</param>'
        '<param name="parts"><![CDATA[a[b[0]]]]><![CDATA[> 1]]></param>'
        '<param name="mixed">x <![CDATA[</param>]]> y]]></param>'
        '<param name="empty"><![CDATA[]]></param></function>'
        '<function name="get_weather"><param name="city"><![CDATA[Paris]]></param><param name="days">'
        "<![CDATA[3]]></param></function>",
        (
            (
                "f",
                '{"code": "a < b", "text": " if x:\\n  \\"</param></function>\\" ", "parts": "a[b[0]]> 1", '
                '"mixed": "x </param> y]]>", "empty": ""}',
            ),
            WEATHER,
        ),
    ),
    "minicpm5, CDATA that does not end": Recorded(
        "minicpm5",
        '<function name="get_weather"><param name="city"><![CDATA[Par</param></function>',
        (("get_weather", '{"city": "Par</param></function>'),),
        complete=False,
    ),
    "kimi_k3": Recorded(
        "kimi_k3",
        "Hm.<|close|>think<|sep|><|open|>response<|sep|>I look.<|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>Paris'
        '<|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>'
        '<|close|>call<|sep|><|open|>call tool="get_time" index="2"<|sep|><|close|>call<|sep|>'
        "<|close|>tools<|sep|><|close|>message<|sep|>",
        (WEATHER, TIME),
        "I look.",
        "kimi_k3",
        "Hm.",
        prompt="<|open|>think<|sep|>",
    ),
    "gemma4": Recorded(
        "gemma4",
        '<|channel>thought\nHm.<channel|>I look.<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>'
        "<|tool_call>call:get_time{}<tool_call|>",
        (WEATHER, TIME),
        "I look.",
        "gemma4",
        "Hm.",
    ),
    "gemma4, nested values": Recorded(
        "gemma4",
        '<|tool_call>call:get_weather{place:{names:[<|"|>a, "b"<|"|>,<|"|>{<|"|>],at:[1,-2.5,[]],no:null,yes:true}}'
        "<tool_call|>",
        (
            (
                "get_weather",
                '{"place": {"names": ["a, \\"b\\"", "{"], "at": [1, -2.5, []], "no": null, "yes": true}}',
            ),
        ),
    ),
    "gemma4, cut short": Recorded(
        "gemma4",
        '<|tool_call>call:get_weather{city:<|"|>Par',
        (("get_weather", '{"city": "Par'),),
        complete=False,
    ),
    "functiongemma": Recorded(
        "functiongemma",
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3}<end_function_call>",
        (WEATHER,),
    ),
    "olmo3": Recorded(
        "olmo3",
        '<function_calls>\nget_weather(city="Paris", days=3)\nget_time()\n</function_calls>',
        (WEATHER, TIME),
    ),
    "lfm2": Recorded(
        "lfm2",
        'Ok.<|tool_call_start|>[get_weather(city="Paris", days=3), get_time()]<|tool_call_end|>So.',
        (WEATHER, TIME),
        "Ok.So.",
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
        "<|tool_call_begin|>functions.get_time.0<|tool_call_argument_begin|>{}<|tool_call_end|>",
    ],
    "harmony": [
        "Plain.",
        "<|channel|>analysis",
        "a <|start|>assistant",
        " to=functions.x",
        "<|start|><|channel|>",
    ],
    "longcat": ["<longcat_tool_call>", '<longcat_tool_call>{"tool": 1}</longcat_tool_call>'],
    "granite": ["<|tool_call|>", "[1]", '[{"name": "Bob"}]', "<|tool_call|>[]"],
    "granite_20b_fc": ["<function_call>", "<function_call> []"],
    "phi4_mini": ["import functools", "functools[0]", "functools[]"],
    "jamba": ["<tool_calls>", "<tool_calls>[]</tool_calls>"],
    "internlm2": ["<|action_start|><|interpreter|>1", "<|action_start|><|plugin|>1"],
    "nemotron": ["<TOOLCALL>[]</TOOLCALL>", "<TOOL"],
    "cohere_command": ["<|START_ACTION|>[]", '<|START_ACTION|>[{"tool": 1}]<|END_ACTION|>'],
    "apertus": ["<|tools_prefix|>[]<|tools_suffix|>", '<|tools_prefix|>[{"a": 1}]'],
    "gigachat3": ["a function call", "function call<|role_sep|>\n{}"],
    "xlam": ["[1]", '[{"name": "Bob"}]', "```json\n[1]\n```"],
    "seed_oss": ["<seed:tool_call>", "<function=\n>"],
    "minimax_m2": ["<minimax:tool_call>", "<minimax:tool_call><invoke>", '<invoke name="'],
    "deepseek_v32": ["<｜DSML｜function_calls>", '<｜DSML｜invoke name=""></｜DSML｜invoke>'],
    "deepseek_v4": [
        "<｜DSML｜tool_calls>",
        "<｜DSML｜function_calls>",
        "<｜DSML｜tool_calls></｜DSML｜tool_calls>",
    ],
    "step3": ["<｜tool_calls_begin｜>", "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>f"],
    "hy_v3": ["<tool_calls>", "<tool_calls><tool_call>f</tool_call></tool_calls>", "<tool_call>"],
    "solar_open2": ["<|tool_call:start|>", "<|tool_call:start|>get_time and"],
    "minicpm5": ["<function>", "<![CDATA[<function>]]>", '<function name="">', "<function name='f'>"],
    "kimi_k3": ["<|open|>tools<|sep|>", '<|open|>call tool="f"', "<|open|>x<|sep|>"],
    "gemma4": ["<|tool_call>", "<|tool_call>call:f", "<|tool_call>call:{}"],
    "functiongemma": ["<start_function_call>", "<start_function_call>f{}"],
    "olmo3": ["<function_calls>", "<function_calls>\nf\n</function_calls>", "f()"],
    "lfm2": ["<|tool_call_start|>[1]", "[get_time()]", "<|tool_call_start|>get_time()"],
}
