"""How chats with tools and thoughts are written down: the chat template, and the same in Python for the corpus.

    <|im_start|>system
    Be kind.

    # Tools

    <tools>
    {"type": "function", "function": {"name": "get_weather", ...}}
    </tools><|im_end|>
    <|im_start|>user
    What is the weather in Rome?<|im_end|>
    <|im_start|>assistant
    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Rome"}}
    </tool_call><|im_end|>
    <|im_start|>tool
    <tool_response>
    sunny
    </tool_response><|im_end|>
    <|im_start|>assistant
    The weather in Rome is sunny.<|im_end|>

With thinking, the prompt ends with an open `<think>` block. Thoughts of earlier turns are left out; those since the
last question stay, where the client sends them back.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)
# Tokens of their own, but not special ones: they are text that the answer shows.
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
THINK = "<think>\n"
THOUGHT = "\n</think>\n\n"

CHAT_TEMPLATE = """\
{%- set thinks = enable_thinking if enable_thinking is defined
    else reasoning_effort is defined and reasoning_effort in ('low', 'medium', 'high') -%}
{%- set begins = messages[0].role in ('system', 'developer') -%}
{%- set found = namespace(question=-1) -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}{%- set found.question = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if tools or begins -%}
    {{- '<|im_start|>system\\n' -}}
    {%- if begins -%}{{- messages[0].content -}}{%- endif -%}
    {%- if tools -%}
        {{- '\\n\\n' if begins and messages[0].content else '' -}}
        {{- '# Tools\\n\\n<tools>\\n' -}}
        {%- for tool in tools -%}{{- (tool | tojson) + '\\n' -}}{%- endfor -%}
        {{- '</tools>' -}}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'assistant' -%}
        {{- '<|im_start|>assistant\\n' -}}
        {%- set thought = message.reasoning_content or message.reasoning -%}
        {%- if thought and loop.index0 > found.question -%}
            {{- '<think>\\n' + thought + '\\n</think>\\n\\n' -}}
        {%- endif -%}
        {%- set content = (message.content or '').split('</think>')[-1].lstrip('\\n') -%}
        {{- content -}}
        {%- for call in message.tool_calls or [] -%}
            {%- set arguments = call.function.arguments -%}
            {{- '\\n' if content or not loop.first else '' -}}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
            {{- arguments if arguments is string else arguments | tojson -}}
            {{- '}\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\\n' -}}
    {%- elif message.role == 'tool' -%}
        {{- '<|im_start|>tool\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' -}}
    {%- elif not (loop.first and begins) -%}
        {%- set role = 'system' if message.role == 'developer' else message.role -%}
        {{- '<|im_start|>' + role + '\\n' + message.content + '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' + ('<think>\\n' if thinks else '') -}}
{%- endif -%}
"""


class Segment(NamedTuple):
    """A piece of a document, and whether the model is to learn to write it."""

    text: str
    learned: bool


class Call(NamedTuple):
    name: str
    arguments: Mapping[str, Any]

    @property
    def text(self) -> str:
        return f"<tool_call>\n{dumps({'name': self.name, 'arguments': self.arguments})}\n</tool_call>"


class Turn(NamedTuple):
    """One message of a chat with tools. `skill` and `needed` say how an answer of the assistant is judged."""

    role: str
    content: str = ""
    calls: tuple[Call, ...] = ()
    thought: str = ""
    skill: str = ""
    needed: tuple[str, ...] = ()  # what the answer must contain

    @property
    def written(self) -> str:
        """What the assistant writes after its thought."""
        return "\n".join([self.content] * bool(self.content) + [call.text for call in self.calls])


def dumps(value: object) -> str:
    """JSON as the template writes it."""
    return json.dumps(value, ensure_ascii=False)


def system_text(system: str, tools: Sequence[Mapping[str, Any]]) -> str:
    """The system message, which also lists the tools; empty if there is neither."""
    if tools:
        listed = "\n".join(map(dumps, tools))
        system = (f"{system}\n\n" if system else "") + f"# Tools\n\n<tools>\n{listed}\n</tools>"
    return f"{IM_START}system\n{system}{IM_END}\n" if system else ""


def segments(system: str, tools: Sequence[Mapping[str, Any]], messages: Sequence[Turn]) -> Iterator[Segment]:
    """The document as the template writes it. Only what the assistant writes is learned."""
    prompt = system_text(system, tools)
    for message in messages:
        if message.role != "assistant":
            content = message.content
            if message.role == "tool":
                content = f"<tool_response>\n{content}\n</tool_response>"
            prompt += f"{IM_START}{message.role}\n{content}{IM_END}\n"
            continue
        prompt += f"{IM_START}assistant\n" + (THINK if message.thought else "")
        yield Segment(prompt, False)
        thought = message.thought + THOUGHT if message.thought else ""
        yield Segment(thought + message.written + IM_END, True)
        prompt = "\n"
    yield Segment(prompt, False)
    yield Segment(END_OF_TEXT, True)
