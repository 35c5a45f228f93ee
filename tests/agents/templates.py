"""Minimal chat templates that write calls the way each family of models does."""

from ..text.templates import CHATML, GEMMA, LLAMA3, QWEN3

TOOLS = "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"


def template(message: str, prompt: str) -> str:
    """Return a template in which `message` writes one message, with its `calls`."""
    return (
        f"{TOOLS}{{% for message in messages %}}{{% set calls = message.tool_calls or [] %}}{message}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{prompt}{{% endif %}}"
    )


QWEN3_CODER = template(
    "{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') }}"
    "{% for call in calls %}{{ '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}"
    "{% for key, value in call.function.arguments | items %}"
    "{{ '<parameter=' + key + '>\\n' ~ value ~ '\\n</parameter>\\n' }}{% endfor %}"
    "{{ '</function>\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}",
    "{{ '<|im_start|>assistant\\n' }}",
)
GLM45 = template(
    "{{ '<|' + message.role + '|>' }}{% if message.role == 'assistant' %}{{ '\\n<think></think>' }}{% endif %}"
    "{{ '\\n' + (message.content or '') }}{% for call in calls %}{{ '\\n<tool_call>' + call.function.name }}"
    "{% for key, value in call.function.arguments | items %}{{ '\\n<arg_key>' + key + '</arg_key>\\n<arg_value>' }}"
    "{{ value if value is string else value | tojson }}{{ '</arg_value>' }}{% endfor %}{{ '\\n</tool_call>' }}"
    "{% endfor %}",
    "<|assistant|>",
)
MISTRAL = template(
    "{% if message.role == 'user' %}{{ '[INST] ' + message.content + '[/INST]' }}"
    "{% elif calls %}{{ '[TOOL_CALLS] [' }}{% for call in calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('IDs must have nine letters or digits') }}{% endif %}"
    "{{ (call.function | tojson)[:-1] + ', \"id\": \"' + call.id + '\"}' }}{% endfor %}{{ ']' + eos_token }}"
    "{% else %}{{ ' ' + message.content + eos_token }}{% endif %}",
    "",
)
MAGISTRAL = template(
    "{% if message.role == 'user' %}{{ '[INST]' + message.content + '[/INST]' }}"
    "{% else %}{% for part in message.thoughts or [] %}{{ '[THINK]' + part + '[/THINK]' }}{% endfor %}"
    "{{ message.content }}{% for call in calls %}"
    "{{ '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}"
    "{% endfor %}{{ eos_token }}{% endif %}",
    "",
)
DEEPSEEK_V3 = template(
    "{% if message.role == 'user' %}{{ '<｜User｜>' + message.content }}"
    "{% elif message.content is none %}{{ '<｜Assistant｜><｜tool▁calls▁begin｜>' }}{% for call in calls %}"
    "{{ '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' }}"
    "{{ call.function.arguments + '\\n```<｜tool▁call▁end｜>' }}{% endfor %}"
    "{{ '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}"
    "{% else %}{{ '<｜Assistant｜>' + message.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{% endif %}",
    "{{ '<｜Assistant｜><think>\\n' }}",
)
KIMI_K2 = template(
    "{{ '<|im_' + message.role + '|>' + message.role + '<|im_middle|>' + (message.content or '') }}"
    "{% if calls %}{{ '<|tool_calls_section_begin|>' }}{% for call in calls %}"
    "{{ '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}"
    "{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}"
    "{{ '<|tool_call_end|>' }}{% endfor %}{{ '<|tool_calls_section_end|>' }}{% endif %}{{ '<|im_end|>' }}",
    "<|im_assistant|>assistant<|im_middle|>",
)
HARMONY = template(
    "{% if calls %}{{ '<|start|>assistant to=functions.' + calls[0].function.name }}"
    "{{ '<|channel|>commentary json<|message|>' + calls[0].function.arguments | tojson + '<|call|>' }}"
    "{% elif message.role == 'assistant' %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + (message.thinking or '') + '<|end|>' }}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}"
    "{% else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{% endif %}",
    "<|start|>assistant",
)
PYTHONIC = template(
    "{{ '<|header_start|>' + message.role + '<|header_end|>' + (message.content or '') }}"
    "{% if calls %}{{ '[' }}{% for call in calls %}{{ call.function.name + '(' }}"
    "{% for key, value in call.function.arguments | items %}"
    "{{ key + '=\"' + value + '\"' if value is string else key ~ \"=\" ~ value }}"
    "{{ '' if loop.last else ', ' }}{% endfor %}{{ ')' if loop.last else '), ' }}{% endfor %}{{ ']' }}{% endif %}"
    "{{ '<|eot|>' }}",
    "<|header_start|>assistant<|header_end|>",
)
BROKEN = "{{ messages[99].content }}{% if %}"
REJECTING = "{{ raise_exception('no') }}"

# Each template with its tool call format and its reasoning format.
KNOWN: dict[str, tuple[str, str | None, str | None]] = {
    "qwen3": (QWEN3, "hermes", "think"),
    "qwen3_coder": (QWEN3_CODER, "qwen3_coder", None),
    "glm45": (GLM45, "glm45", "think"),
    "llama3": (LLAMA3, "llama3_json", None),
    "mistral": (MISTRAL, "mistral", None),
    "magistral": (MAGISTRAL, "mistral", "mistral"),
    "deepseek_v3": (DEEPSEEK_V3, "deepseek_v3", "think"),
    "kimi_k2": (KIMI_K2, "kimi_k2", None),
    "harmony": (HARMONY, "harmony", "harmony"),
    "pythonic": (PYTHONIC, "pythonic", None),
    "chatml": (CHATML, None, None),
    "gemma": (GEMMA, None, None),
    "broken": (BROKEN, None, None),
    "rejecting": (REJECTING, None, None),
}
