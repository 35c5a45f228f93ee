"""Minimal chat templates that write calls the way each family of models does."""

from tests.frontend.text.templates import CHATML, GEMMA, LLAMA3, QWEN3

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


def calls_template(before: str, call: str, after: str = "", between: str = "", prompt: str = "") -> str:
    """Return a template that writes each call in Jinja expressions, with texts around and between the calls."""
    return template(
        "{{ '<|' + message.role + '|>' + (message.content or '') }}"
        f"{{% if calls %}}{{{{ {before!r} }}}}{{% for call in calls %}}{{% set function = call.function %}}"
        f"{call}{{{{ '' if loop.last else {between!r} }}}}{{% endfor %}}{{{{ {after!r} }}}}{{% endif %}}"
        "{{ eos_token }}",
        f"<|assistant|>{prompt}",
    )


def tags(name: str, parameter: str, end: str) -> str:
    """Return expressions for a call whose arguments are between tags."""
    return (
        f"{{{{ {name} }}}}{{% for key, value in function.arguments | items %}}{{% set text = value if value is string "
        f"else value | tojson %}}{{{{ {parameter} }}}}{{% endfor %}}{{{{ {end!r} }}}}"
    )


JSON_CALL = (
    "{{ '{\"name\": \"' + function.name + '\", \"arguments\": ' + function.arguments | tojson + '}' }}"
)
JSON_PARAMETERS = JSON_CALL.replace('arguments\\"', 'parameters\\"')
PYTHON_CALL = (
    "{{ function.name + '(' }}{% for key, value in function.arguments | items %}"
    "{{ key + '=' + value | tojson + ('' if loop.last else ', ') }}{% endfor %}{{ ')' }}"
)
LONGCAT = calls_template(
    "", "{{ '<longcat_tool_call>' }}" + JSON_CALL + "{{ '</longcat_tool_call>' }}", "", "\n"
)
GRANITE = calls_template("<|tool_call|>[", JSON_CALL, "]", ", ")
GRANITE_DESCRIBED = (
    "{% if tools %}{{ tools | tojson }} Respond with <|tool_call|> and a list. Put your thoughts after "
    "'Here is my thought process:' and your response after 'Here is my response:'.{% endif %}"
    "{% for message in messages %}{{ '<|start_of_role|>' + message.role + '<|end_of_role|>' }}"
    "{{ message.content or '' }}{% endfor %}"
)
GRANITE_20B_FC = calls_template("", "{{ '<function_call> ' }}" + JSON_CALL, "", " ")
PHI4_MINI = calls_template("functools[", JSON_CALL, "]", ", ")
JAMBA = calls_template("<tool_calls>[\n", JSON_CALL, "\n]</tool_calls>", ",\n")
HUNYUAN = calls_template(
    "<answer></answer><tool_calls>[", JSON_CALL, "]</tool_calls>", ",", "{# <think></think> #}"
)
INTERNLM2 = calls_template(
    "", "{{ '<|action_start|><|plugin|>\n' }}" + JSON_PARAMETERS + "{{ '<|action_end|>\n' }}"
)
NEMOTRON = calls_template("<TOOLCALL>[", JSON_CALL, "]</TOOLCALL>", ", ")
COHERE_COMMAND = calls_template(
    "<|START_THINKING|><|END_THINKING|><|START_ACTION|>[\n",
    '{{ \'{"tool_call_id": "\' ~ loop.index0 ~ \'", "tool_name": "\' + function.name + \'", \' }}'
    "{{ '\"parameters\": ' + function.arguments | tojson + '}' }}",
    "\n]<|END_ACTION|>",
    ",\n",
)
APERTUS = calls_template(
    "<|tools_prefix|>[",
    "{{ '{\"' + function.name + '\": ' + function.arguments | tojson + '}' }}",
    "]<|tools_suffix|>",
    ", ",
)
GIGACHAT3 = calls_template("<|message_sep|>\n\nfunction call<|role_sep|>\n", JSON_CALL)
XLAM = calls_template("[", JSON_CALL, "]", ", ")
SEED_OSS = calls_template(
    "",
    tags(
        "'\n<seed:tool_call>\n<function=' + function.name + '>\n'",
        "'<parameter=' + key + '>' + text + '</parameter>\n'",
        "</function>\n</seed:tool_call>",
    ),
    prompt="{# </seed:think> #}",
)
MINIMAX_M2 = calls_template(
    "\n<minimax:tool_call>\n",
    tags(
        "'<invoke name=\"' + function.name + '\">\n'",
        "'<parameter name=\"' + key + '\">' + text + '</parameter>\n'",
        "</invoke>\n",
    ),
    "</minimax:tool_call>",
    prompt="<think>\n{# </think> #}",
).replace(
    "(message.content or '')",
    "('<response>' + message.content + '</response>' if message.role == 'tool' else message.content or '')",
)
ERNIE45 = calls_template(
    "", "{{ '\n<tool_call>\n' }}" + JSON_CALL + "{{ '\n</tool_call>' }}", "", "", "<think>\n"
).replace(
    "(message.content or '')",
    "('<think>\n</think>\n\n<response>\n' + message.content + '\n</response>' if message.role == 'assistant' "
    "and message.content else message.content or '')",
)
DSML_CALL = tags(
    "'<｜DSML｜invoke name=\"' + function.name + '\">\n'",
    "'<｜DSML｜parameter name=\"' + key + '\" string=\"' + ('true' if value is string else 'false') + '\">' + text + "
    "'</｜DSML｜parameter>\n'",
    "</｜DSML｜invoke>\n",
)
DEEPSEEK_V32 = calls_template("\n\n<｜DSML｜function_calls>\n", DSML_CALL, "</｜DSML｜function_calls>")
DEEPSEEK_V4 = calls_template("\n\n<｜DSML｜tool_calls>\n", DSML_CALL, "</｜DSML｜tool_calls>")
STEP3 = calls_template(
    "<｜tool_calls_begin｜>\n",
    tags(
        "'<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name=\"' + function.name + '\">'",
        "'<steptml:parameter name=\"' + key + '\">' + text + '</steptml:parameter>'",
        "</steptml:invoke><｜tool_call_end｜>\n",
    ),
    "<｜tool_calls_end｜>",
)
ARGUMENT = "'<arg_key>' + key + '</arg_key>\n<arg_value>' + text + '</arg_value>\n'"
HY_V3 = calls_template(
    "<tool_calls>\n",
    tags("'<tool_call>' + function.name + '<tool_sep>\n'", ARGUMENT, "</tool_call>\n"),
    "</tool_calls>",
)
SOLAR_OPEN2 = calls_template(
    "",
    tags(
        "'<|tool_call:start|>' + function.name + '\n'",
        "'<|tool_arg:start|>' + key + '<|tool_arg:value|>' + text + '<|tool_arg:end|>\n'",
        "<|tool_call:end|>",
    ),
)
MINICPM5 = calls_template(
    "",
    tags(
        "'<function name=\"' + function.name + '\">'",
        "'<param name=\"' + key + '\">' + text + '</param>'",
        "</function>",
    ),
)
KIMI_K3 = calls_template(
    "<|close|>think<|sep|><|open|>tools<|sep|>",
    tags(
        "'<|open|>call tool=\"' + function.name + '\" index=\"' ~ loop.index ~ '\"<|sep|>'",
        "'<|open|>argument key=\"' + key + '\" type=\"' + ('string' if value is string else 'number') + '\"<|sep|>'"
        " + text + '<|close|>argument<|sep|>'",
        "<|close|>call<|sep|>",
    ),
    "<|close|>tools<|sep|>",
    prompt="<|open|>think<|sep|>",
)


def gemma_call(opening: str, quote: str, closing: str) -> str:
    return (
        f"{{{{ '{opening}call:' + function.name + '{{' }}}}{{% for key, value in function.arguments | items %}}"
        f"{{{{ key + ':' }}}}{{{{ '{quote}' + value + '{quote}' if value is string else value }}}}"
        f"{{{{ '' if loop.last else ',' }}}}{{% endfor %}}{{{{ '}}{closing}' }}}}"
    )


GEMMA4 = calls_template(
    "", gemma_call("<|tool_call>", '<|"|>', "<tool_call|>"), prompt="{# <|channel>thought<channel|> #}"
)
FUNCTIONGEMMA = calls_template("", gemma_call("<start_function_call>", "<escape>", "<end_function_call>"))
OLMO3 = calls_template("<function_calls>", PYTHON_CALL, "</function_calls>", "\n", "<think>{# </think> #}")
LFM2 = calls_template("<|tool_call_start|>[", PYTHON_CALL, "]<|tool_call_end|>", ", ")

# Templates that need a certain form of missing content.
QWQ = (
    TOOLS
    + "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{% set content = message.content %}"
    "{% if message.role == 'assistant' and not loop.last %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ content or '' }}{% for call in message.tool_calls or [] %}{{ '\n<tool_call>\n' }}"
    "{{ call.function | tojson }}{{ '\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
GLM46 = GLM45.replace("(message.content or '')", "message.content ~ ''")

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
    "longcat": (LONGCAT, "longcat", None),
    "granite": (GRANITE, "granite", None),
    "granite, in words": (GRANITE_DESCRIBED, "granite", "granite"),
    "granite_20b_fc": (GRANITE_20B_FC, "granite_20b_fc", None),
    "phi4_mini": (PHI4_MINI, "phi4_mini", None),
    "jamba": (JAMBA, "jamba", None),
    "hunyuan": (HUNYUAN, "jamba", "hunyuan_a13b"),
    "internlm2": (INTERNLM2, "internlm2", None),
    "nemotron": (NEMOTRON, "nemotron", None),
    "cohere_command": (COHERE_COMMAND, "cohere_command", "cohere_command"),
    "apertus": (APERTUS, "apertus", None),
    "gigachat3": (GIGACHAT3, "gigachat3", None),
    "xlam": (XLAM, "xlam", None),
    "seed_oss": (SEED_OSS, "seed_oss", "seed_oss"),
    "ernie45": (ERNIE45, "hermes", "ernie45"),
    "minimax_m2": (MINIMAX_M2, "minimax_m2", "think"),
    "deepseek_v32": (DEEPSEEK_V32, "deepseek_v32", None),
    "deepseek_v4": (DEEPSEEK_V4, "deepseek_v4", None),
    "step3": (STEP3, "step3", None),
    "hy_v3": (HY_V3, "hy_v3", None),
    "solar_open2": (SOLAR_OPEN2, "solar_open2", None),
    "minicpm5": (MINICPM5, "minicpm5", None),
    "kimi_k3": (KIMI_K3, "kimi_k3", "kimi_k3"),
    "gemma4": (GEMMA4, "gemma4", "gemma4"),
    "functiongemma": (FUNCTIONGEMMA, "functiongemma", None),
    "olmo3": (OLMO3, "olmo3", "think"),
    "lfm2": (LFM2, "lfm2", None),
    "qwq": (QWQ, "hermes", "think"),
    "glm46": (GLM46, "glm45", "think"),
    "chatml": (CHATML, None, None),
    "gemma": (GEMMA, None, None),
    "broken": (BROKEN, None, None),
    "rejecting": (REJECTING, None, None),
}
