"""Every refusal of a request says which parameter is to blame, and what happened where a program could act on it."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import inflight
from inflight.errors import InflightError, ParameterError, PromptError, TemplateError
from inflight.frontend.input_processor import InputProcessor, split_prompts
from inflight.frontend.text.chat_template import ChatTemplate
from inflight.frontend.text.tokenizer import Tokenizer
from inflight.processes.channel import RemoteError
from inflight.request import RequestContext
from inflight.sampling_params import SamplingParams
from tests.support.checkpoints import write_tokenizer

HUGE = 10**5000
CHAT = ChatTemplate("{{ messages[0].content }}")
Kind = type[InflightError]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def check(call: Callable[[], Any], kind: Kind, param: str | None, code: str | None = None) -> None:
    """The call is refused so, and a process that hears of it elsewhere is told the same."""
    with pytest.raises(kind) as caught:
        call()
    error = caught.value
    assert (type(error), error.param, error.code) == (kind, param, code)
    frame = msgspec.msgpack.encode(RemoteError.from_exception(error))
    found = msgspec.msgpack.decode(frame, type=RemoteError).error()
    assert (type(found), str(found), found.param, found.code) == (kind, str(error), param, code)


PARAMETERS: list[tuple[str, list[Any]]] = [
    ("n", [0, 129, 1.0, True, HUGE]),
    ("temperature", [-0.1, float("nan"), "1", HUGE]),
    ("top_p", [0, 1.1, float("inf")]),
    ("top_k", [-2, 1.5]),
    ("min_p", [-1, 2]),
    ("presence_penalty", [3, None]),
    ("frequency_penalty", [-3]),
    ("repetition_penalty", [0, "x"]),
    ("seed", [2**70, 1.5]),
    ("max_tokens", [0, "5"]),
    ("min_tokens", [-1, 17]),  # beyond max_tokens
    ("logprobs", [-1, 101]),
    ("prompt_logprobs", [-1, 101]),
    ("stop", [5, [""], [3], ["x"] * 65, ["x" * 1025]]),
    ("bad_words", ["text", [""], [3]]),
    ("stop_token_ids", ["text", 5, [-1], ["x"], [5, True]]),
    ("allowed_token_ids", ["text", [], [-1], [True], [5, 6.0]]),
    (
        "logit_bias",
        [[5], {"x": 1}, {-1: 1.0}, {5: 1000.0}, {5: float("nan")}, {5: "a"}, {5: True}, {True: 1.0}],
    ),
    ("structured_outputs", ["json", {}, {"regex": 5}, {"regex": "a", "json_object": True}, {"jsn": {}}]),
    ("prediction", [5, ["x"], b"x"]),
]


@pytest.mark.parametrize(("name", "values"), PARAMETERS, ids=[name for name, _ in PARAMETERS])
def test_errors_of_parameters_name_the_parameter(name: str, values: list[Any]) -> None:
    for value in values:
        check(lambda value=value: SamplingParams(**{name: value}), ParameterError, name)  # type: ignore[misc]


def test_every_parameter_with_a_range_is_in_the_table() -> None:
    plain = {"include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens"}
    assert {name for name, _ in PARAMETERS} == set(SamplingParams.__dataclass_fields__) - plain


def test_conflicting_parameters_are_rejected() -> None:
    check(lambda: SamplingParams(stop="x", detokenize=False), ParameterError, "stop")


@pytest.mark.parametrize(
    ("prompt", "param", "code"),
    [
        ([], "prompt", None),
        ([320], "prompt", None),
        ([-1], "prompt", None),
        ([2**70], "prompt", None),
        (["x", 5], "prompt", None),
        ([5, True], "prompt", None),
        ({"prompt_token_ids": (False,)}, "prompt", None),
        (b"bytes", "prompt", None),
        (5, "prompt", None),
        ({"prompt": 5}, "prompt", None),
        ({"text": "x"}, "prompt", None),
        ({"prompt_token_ids": "x"}, "prompt_token_ids", None),
        ([5] * 64, "prompt", "context_length_exceeded"),
        ("word " * 1000, "prompt", "context_length_exceeded"),
        ("\ud800", None, None),
    ],
)
def test_errors_of_prompts_are_short_and_named(
    prompt: Any, param: str | None, code: str | None, tokenizer: Tokenizer
) -> None:
    given = InputProcessor.create(tokenizer, 320, 64, (), 0)
    check(lambda: given.requests("r", prompt, SamplingParams()), PromptError, param, code)


@pytest.mark.parametrize(
    ("params", "more", "param"),
    [
        (5, {}, "sampling_params"),
        (SamplingParams(stop_token_ids=[320]), {}, "stop_token_ids"),
        (SamplingParams(allowed_token_ids=[320]), {}, "allowed_token_ids"),
        (SamplingParams(logit_bias={320: 1}), {}, "logit_bias"),
        (SamplingParams(), {"priority": 2**40}, "priority"),
        (SamplingParams(), {"priority": True}, "priority"),
        (SamplingParams(), {"tenant": "x" * 300}, "tenant"),
        (SamplingParams(), {"cache_salt": "x" * 300}, "cache_salt"),
        (SamplingParams(), {"cache_salt": "\ud800"}, "cache_salt"),
    ],
)
def test_values_beyond_the_models_limits_are_rejected(params: Any, more: dict[str, Any], param: str) -> None:
    given = InputProcessor.create(None, 320, 64, (), 0)
    check(lambda: given.requests("r", [5], params, RequestContext(**more)), ParameterError, param)


LISTED: list[tuple[str, Any, int]] = [  # the tokens of each
    ("stop_token_ids", [5] * 12, 12),
    ("allowed_token_ids", range(12), 12),
    ("logit_bias", {str(i): 1 for i in range(12)}, 12),
    ("bad_words", ["qqqqqq"], 12),  # alone and after a space
]


@pytest.mark.parametrize(("name", "value", "size"), LISTED, ids=[name for name, _, _ in LISTED])
def test_token_lists_count_once_per_answer(name: str, value: Any, size: int, tokenizer: Tokenizer) -> None:
    given, code = InputProcessor.create(tokenizer, 320, 64, (), 0), "too_many_listed_tokens"
    params = SamplingParams(n=3, **{name: value})
    if name == "bad_words":
        size = sum(map(len, given.requests("r", [5], params)[1][0].spec.bad_word_ids))
        assert size > 4
    given.check_listed(params, 3, 3 * size)
    check(lambda: given.check_listed(params, 3, 3 * size - 1), ParameterError, name, code)
    check(lambda: given.check_listed(params, 4, 3 * size), ParameterError, name, code)


def test_logprobs_count_per_token_and_answer() -> None:
    processor, code = InputProcessor.create(None, 320, 64, (), 0), "too_many_logprobs"
    params = SamplingParams(n=2, logprobs=4, prompt_logprobs=1, max_tokens=10)
    # Two prompts of 3 and 5 tokens with two answers of at most 10 tokens each, and 4 + 1 logprobs for a token.
    sizes = [(3, 10), (5, 10)]
    processor.check_logprobs(params, sizes, 200)
    check(lambda: processor.check_logprobs(params, sizes, 199), ParameterError, "logprobs", code)
    prompts_only = SamplingParams(n=2, prompt_logprobs=1)
    processor.check_logprobs(prompts_only, sizes, 32)
    check(lambda: processor.check_logprobs(prompts_only, sizes, 31), ParameterError, "prompt_logprobs", code)
    processor.check_logprobs(SamplingParams(n=2), sizes, 0)


def test_all_lists_count_together() -> None:
    given = InputProcessor.create(None, 320, 64, (), 0)
    params = SamplingParams(stop_token_ids=[5] * 5, logit_bias={5: 1, 6: 1}, allowed_token_ids=[7])
    given.check_listed(params, 2, 16)
    check(
        lambda: given.check_listed(params, 2, 15), ParameterError, "stop_token_ids", "too_many_listed_tokens"
    )


def test_text_needs_a_tokenizer() -> None:
    given = InputProcessor.create(None, 320, 64, (), 0)
    check(lambda: given.requests("r", "text", SamplingParams()), PromptError, None)
    check(lambda: given.requests("r", [5], SamplingParams(stop="x")), PromptError, "stop")
    check(lambda: given.requests("r", [5], SamplingParams(bad_words=["x"])), PromptError, "bad_words")
    check(lambda: split_prompts(5), PromptError, "prompts")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "messages",
    [
        "Hello",
        [],
        ["Hello"],
        [{"role": HUGE, "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
        [{"role": "user", "content": [{"type": "text", "text": 5}]}],
    ],
)
def test_invalid_messages_are_rejected(messages: Any) -> None:
    check(lambda: CHAT.render(messages), PromptError, "messages")


def test_template_errors_are_short() -> None:
    message = {"role": "user", "content": "x"}
    check(lambda: CHAT.render([message], kwargs={"messages": "x"}), TemplateError, None)
    check(lambda: ChatTemplate(None).render([message]), TemplateError, None)
    check(lambda: CHAT.render([message], continue_final_message=True), PromptError, None)


@pytest.mark.parametrize(
    "file",
    [
        "request.py",
        "sampling_params.py",
        "entrypoints/llm.py",
        "entrypoints/async_engine.py",
        "frontend/input_processor.py",
    ],
)
def test_every_request_error_has_a_param(file: str) -> None:
    tree = ast.parse((Path(inflight.__file__).parent / file).read_text())
    raised = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    calls = [node for node in raised if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    kinds = ("RequestError", "ParameterError", "PromptError")
    refusals = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in kinds]
    assert refusals
    for call in refusals:
        assert "param" in {item.arg for item in call.keywords}, f"line {call.lineno}"
