from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

import inflight
from inflight.errors import PromptError, TemplateError, TemplateWorkerError
from inflight.frontend.text.chat_template import MAX_MESSAGES, ChatTemplate, RenderLimits, check_messages

from .samples import backend
from .templates import ALL, HOSTILE

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
USER = {"role": "user", "content": "  What's <b>5</b> & 6? é🙂\n"}
ASSISTANT = {"role": "assistant", "content": "<think>\nwell\n</think>\n\nIt is 11. "}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 5, "b": "é<6>"}}}],
}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds 'é' & <more>.",
        "parameters": {"type": "object", "properties": {}},
    },
}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "turns": [USER, ASSISTANT, USER],
    "ends with a reply": [USER, ASSISTANT],
    "system": [SYSTEM, USER],
    "parts": [{"role": "user", "content": [{"type": "text", "text": " a "}, {"type": "text", "text": "b"}]}],
    "tools": [SYSTEM, USER, CALL, {"role": "tool", "content": "11"}, ASSISTANT, USER],
    "two results": [USER, CALL, {"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}],
}


@pytest.fixture(scope="module")
def templates() -> Iterator[dict[str, ChatTemplate]]:
    templates = {name: ChatTemplate(source, SPECIALS) for name, source in ALL.items()}
    yield templates
    for template in templates.values():
        template.close()


def theirs(source: str, messages: list[dict[str, Any]], **options: Any) -> str | None:
    """Return what transformers renders, or None if the template fails."""
    oracle = PreTrainedTokenizerFast(
        tokenizer_object=backend("byte_fallback"), chat_template=source, **SPECIALS
    )
    try:
        text: str = oracle.apply_chat_template(messages, tokenize=False, **options)
    except Exception:
        return None
    return text


def ours(template: ChatTemplate, messages: list[dict[str, Any]], **options: Any) -> str | None:
    try:
        return template.render(messages, **options)
    except TemplateError:
        return None


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, [TOOL, TOOL]], ids=["plain", "tools"])
def test_templates_render_like_transformers(
    templates: dict[str, ChatTemplate], name: str, conversation: str, tools: list[dict[str, Any]] | None
) -> None:
    messages = CONVERSATIONS[conversation]
    for add in (False, True):
        expected = theirs(ALL[name], messages, tools=tools, add_generation_prompt=add)
        assert ours(templates[name], messages, tools=tools, add_generation_prompt=add) == expected
    if conversation == "one":
        assert expected is not None  # every template supports this much


@given(content=st.text(max_size=40))
def test_any_content_passes_unchanged(templates: dict[str, ChatTemplate], content: str) -> None:
    messages = [{"role": "user", "content": content}]
    for name in ("chatml", "llama3"):
        assert templates[name].render(messages) == theirs(ALL[name], messages, add_generation_prompt=True)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("content", ["Sure", "Sure, ", "  Sure\n\n", "", "é"])
def test_final_message_is_continued_like_transformers(
    templates: dict[str, ChatTemplate], name: str, content: str
) -> None:
    messages = [USER, {"role": "assistant", "content": content}]
    text = templates[name].render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == theirs(ALL[name], messages, continue_final_message=True)
    assert text.rstrip().endswith(content.strip())


def test_final_message_in_parts_is_continued(templates: dict[str, ChatTemplate]) -> None:
    messages: list[dict[str, Any]] = [
        USER,
        {"role": "assistant", "content": [{"type": "text", "text": "Sure"}]},
    ]
    text = templates["gemma"].render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<start_of_turn>model\nSure")


def test_messages_that_cannot_be_continued_are_rejected(templates: dict[str, ChatTemplate]) -> None:
    with pytest.raises(PromptError, match="both true"):
        templates["chatml"].render([USER], continue_final_message=True)
    with pytest.raises(PromptError, match="no content"):
        templates["chatml"].render([USER, CALL], add_generation_prompt=False, continue_final_message=True)
    silent = ChatTemplate("nothing of the messages")
    with pytest.raises(TemplateError, match="omits it"):
        silent.render([USER], add_generation_prompt=False, continue_final_message=True)
    silent.close()


def test_template_arguments_are_an_allow_list_of_scalars(templates: dict[str, ChatTemplate]) -> None:
    qwen = templates["qwen3"]
    assert qwen.render([USER], kwargs={"enable_thinking": False}).endswith("<think>\n\n</think>\n\n")
    assert qwen.render([USER], kwargs={"enable_thinking": True}) == qwen.render([USER])
    assert "Today Date: 1 May" in templates["llama3"].render([USER], kwargs={"date_string": "1 May"})
    with pytest.raises(
        TemplateError, match=r"'messages' is not allowed: it must be one of .*enable_thinking"
    ):
        qwen.render([USER], kwargs={"messages": "mine"})
    with pytest.raises(TemplateError, match="is a list"):
        qwen.render([USER], kwargs={"enable_thinking": []})  # type: ignore[dict-item]


def test_exception_raised_by_a_template_is_reported(templates: dict[str, ChatTemplate]) -> None:
    with pytest.raises(TemplateError, match="System role not supported"):
        templates["gemma"].render([SYSTEM, USER])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ messages[7].role }}", "no element 7"),
        ("{{ nothing.here }}", "'nothing' is undefined"),
        ("a\n{% if %}", "line 2: Expected an expression"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ],
)
def test_template_errors_say_what_failed(source: str, message: str) -> None:
    template = ChatTemplate(source)
    with pytest.raises(TemplateError, match=message):
        template.render([USER])
    template.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_end_in_an_error(name: str) -> None:
    source, message = HOSTILE[name]
    template = ChatTemplate(source, limits=RenderLimits(seconds=1.0 if message == "longer than" else 30.0))
    with pytest.raises(TemplateError, match=message):
        template.render([USER])
    template.close()


def run_program(program: str) -> str:
    """Run a program in a new Python and return its output, once all its children have closed the pipes too."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, check=True, timeout=120
    ).stdout.decode()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux enforces address space limits")
def test_hostile_templates_stay_within_the_memory_limit() -> None:
    sources = [
        "{{ 'x' * 10**9 }}",
        "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
        "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{{ range(99999)|map('center', 99999)|list|length }}",
    ]
    used = run_program(
        "import resource; from inflight.frontend.text.chat_template import ChatTemplate\n"
        f"for source in {sources!r}:\n"
        "    try: ChatTemplate(source).render([{'role': 'user', 'content': ''}])\n"
        "    except ValueError: pass\n"
        "    else: raise SystemExit('rendered ' + source)\n"
        # The ru_maxrss of a new program includes its parent's memory: its own peak is in its status.
        "status = open('/proc/self/status').read()\n"
        "print(status.split('VmHWM:')[1].split()[0], resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    ours, child = (int(number) << 10 for number in used.split())
    assert child <= RenderLimits().memory
    assert ours <= RenderLimits().memory


def test_rendering_works_after_an_exceeded_limit_and_old_workers_are_gone() -> None:
    source = "{% if messages|length == 2 %}" + HOSTILE["nested loops"][0]
    template = ChatTemplate(
        source + "{% elif messages|length == 3 %}{{ 'x' * 10**9 }}{% else %}fine{% endif %}",
        limits=RenderLimits(seconds=1.0),
    )
    for number in (1, 2, 1, 3, 1):
        if number == 1:
            assert template.render([USER]) == "fine"
            (worker,) = template._renderer._pool.idle
            process = worker._process
        else:
            with pytest.raises(TemplateError):
                template.render([USER] * number)
            assert process.returncode is not None  # killed and reaped
    template.close()
    assert template._renderer._pool.idle == []
    assert template.render([USER]) == "fine"  # a closed template starts a new worker when needed
    template.close()


def test_dead_worker_fails_only_one_rendering() -> None:
    template = ChatTemplate("fine")
    assert template.render([USER]) == "fine"
    template._renderer._pool.idle[0]._process.kill()
    template._renderer._pool.idle[0]._process.wait()
    with pytest.raises(TemplateWorkerError, match="process that renders the chat template died"):
        template.render([USER])
    assert template.render([USER]) == "fine"
    template.close()


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_worker_ends_with_its_parent(busy: bool) -> None:
    # The worker inherits stderr: the program's pipes close only when it has ended as well.
    source = HOSTILE["nested loops"][0]
    output = run_program(
        "import os, threading, time; from pathlib import Path\n"
        "from inflight.frontend.text.chat_template import ChatTemplate, RenderLimits\n"
        f"t = ChatTemplate({{'default': 'fine', 'tool_use': {source!r}}}, limits=RenderLimits(seconds=5.0))\n"
        "message = {'role': 'user', 'content': ''}\n"
        "t.render([message])\n"
        "stat = Path(f'/proc/{t._renderer._pool.idle[0]._process.pid}/stat')\n"
        "ticks = lambda: int(stat.read_text().rpartition(')')[2].split()[11])\n"  # of a processor
        f"enough = ticks() + {5 * busy}\n"  # by then the worker is inside the loops
        f"threading.Thread(target=lambda: {busy} and t.render([message], tools=[{{}}])).start()\n"
        "while ticks() < enough: time.sleep(0.002)\n"
        "print('gone', flush=True); os._exit(0)"
    )
    assert output == "gone\n"


def test_many_threads_render_concurrently() -> None:
    template = ChatTemplate("{{ messages[0].content }}", limits=RenderLimits(max_workers=2, seconds=30))
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda n: template.render([{"role": "user", "content": str(n)}]), range(40)))
    assert texts == [str(number) for number in range(40)]
    assert len(template._renderer._pool.idle) <= 2
    template.close()


def test_named_template_is_chosen_by_tools() -> None:
    named = ChatTemplate({"default": "plain", "tool_use": "with tools"})
    assert named.render([USER]) == "plain"
    assert named.render([USER], tools=[]) == "plain"
    assert named.render([USER], tools=[TOOL]) == "with tools"
    named.close()
    with pytest.raises(TemplateError, match="only rag"):
        ChatTemplate({"rag": "x"}).render([USER])


def test_missing_template_is_reported() -> None:
    assert not ChatTemplate(None)
    assert ChatTemplate("x")
    with pytest.raises(TemplateError, match="has no chat template"):
        ChatTemplate(None).render([USER])


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ("hello", "is a str"),
        ([], "0 messages"),
        ([USER] * (MAX_MESSAGES + 1), f"1 to {MAX_MESSAGES}"),
        (["hello"], r"messages\[0\] is a str"),
        ([USER, {"content": "x"}], r"messages\[1\].role is None"),
        ([{"role": "", "content": "x"}], "non-empty"),
        ([{"role": "user"}], "NoneType"),
        ([{"role": "user", "content": 5}], "type int"),
        ([{"role": "user", "content": ["x"]}], "'str'"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "'image_url'"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "must be a string"),
    ],
)
def test_invalid_messages_are_rejected(messages: Any, error: str) -> None:
    with pytest.raises(PromptError, match=error):
        check_messages(messages)
    with pytest.raises(PromptError, match=error):
        ChatTemplate("x").render(messages)


def test_input_is_bounded_and_must_be_json() -> None:
    template = ChatTemplate("x", limits=RenderLimits(max_input_bytes=10_000))
    with pytest.raises(PromptError, match="at most 10000"):
        template.render([{"role": "user", "content": "x" * 10_000}])
    with pytest.raises(PromptError, match="not JSON data"):
        template.render([{"role": "user", "content": "x", "extra": object()}])
    nested: Any = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(PromptError, match="not JSON data"):
        template.render([{"role": "user", "content": "x", "extra": nested}])


def test_clock_and_json_filters_are_available() -> None:
    template = ChatTemplate(
        "{{ strftime_now('%Y')|length }} "
        "{{ messages[0]|tojson(indent=2, sort_keys=true, ensure_ascii=true) }}"
    )
    message = {"role": "user", "content": "<é>"}
    assert template.render([message]) == f"4 {json.dumps(message, indent=2, sort_keys=True)}"
    template.close()


def test_worker_finds_the_package_of_an_editable_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a package is found by an import hook, and its folder is not on the path."""
    root = Path(inflight.__file__).parents[1]
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path and Path(path).resolve() != root])
    monkeypatch.delenv("PYTHONPATH", raising=False)
    template = ChatTemplate("{{ messages[0]['content'] }}", SPECIALS)
    try:
        assert template.render([{"role": "user", "content": "Hello"}]) == "Hello"
    finally:
        template.close()
