"""The requests made from a prompt, which no caller sees from outside."""

from __future__ import annotations

from array import array
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.errors import ParameterError, PromptError, RequestError
from inflight.frontend.input_processor import InputProcessor, bad_word_ids, split_prompts
from inflight.frontend.text.tokenizer import Tokenizer
from inflight.request import Request, RequestContext
from inflight.sampling_params import SamplingParams
from tests.support.checkpoints import write_tokenizer

EOS = (0, 7)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return Tokenizer.load(folder)


def make(tokenizer: Tokenizer | None = None, seed: int = 0) -> InputProcessor:
    return InputProcessor.create(tokenizer, 320, 64, EOS, seed)


def one(prompt: Any, params: SamplingParams | None = None, **options: Any) -> Request:
    _, (request,) = make().requests("r", prompt, params or SamplingParams(), **options)
    return request


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("text", ["text"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ({"prompt": "a"}, [{"prompt": "a"}]),
        ([{"prompt": "a"}, "b", [1]], [{"prompt": "a"}, "b", [1]]),
        ([], []),
        ([[]], [[]]),
        ((text for text in "ab"), ["a", "b"]),
    ],
)
def test_prompts_are_split_into_a_list(given: Any, expected: list[Any]) -> None:
    assert split_prompts(given) == expected


def test_prediction_becomes_tokens_that_the_model_has(tokenizer: Tokenizer) -> None:
    processor = make(tokenizer)

    def predicted(text: str | None) -> list[int]:
        request = processor.requests("r", [5], SamplingParams(prediction=text))[1][0]
        assert request.params.prediction is None, "it would be sent twice"
        return list(request.spec.prediction_ids or ())

    assert predicted("the cat") == tokenizer.encode("the cat", add_special_tokens=False)
    assert predicted(None) == predicted("") == []
    assert len(predicted("a b " * 60)) == 64, "no answer is longer"
    small = InputProcessor.create(tokenizer, max(tokenizer.encode("the cat")), 64, EOS, 0)
    ids = small.requests("r", [5], SamplingParams(prediction="the cat"))[1][0].spec.prediction_ids
    assert ids is None or list(ids) == predicted("the cat")[: len(ids)] != predicted("the cat")
    with pytest.raises(ParameterError, match="prediction has 1000000 characters"):
        predicted("x" * 1_000_000)
    with pytest.raises(PromptError, match="predictions need a tokenizer"):
        make().requests("r", [5], SamplingParams(prediction="x"))


def test_token_list_of_the_caller_is_copied() -> None:
    ids = [5, 6]
    requests = make().requests("r", ids, SamplingParams(n=2))[1]
    requests[0].token_ids.append(9)
    assert ids == [5, 6]
    assert requests[1].token_ids == [5, 6]


def test_outputs_are_cut_to_the_context() -> None:
    assert one([5] * 60, SamplingParams(max_tokens=100)).max_tokens == 4
    assert one([5] * 60, SamplingParams(max_tokens=3)).max_tokens == 3
    assert one([5] * 63, SamplingParams(max_tokens=None)).max_tokens == 1


def test_stop_ids_include_eos_unless_ignored() -> None:
    assert one([5]).stop_ids == {0, 7}
    assert one([5], SamplingParams(stop_token_ids=[9])).stop_ids == {0, 7, 9}
    assert one([5], SamplingParams(stop_token_ids=[9], ignore_eos=True)).stop_ids == {9}


def test_each_answer_has_its_own_id_and_seed() -> None:
    requests = make().requests("r", [5], SamplingParams(n=3, seed=11))[1]
    assert [request.request_id for request in requests] == ["r/0", "r/1", "r/2"]
    assert len({request.spec.seed for request in requests}) == 3
    assert requests[0].spec.seed == 11
    assert one([5], SamplingParams(n=1, seed=11)).request_id == "r"


def test_seeds_follow_the_engines_seed_and_the_order_of_requests() -> None:
    def seeds(input_processor: InputProcessor) -> list[int]:
        return [input_processor.requests("r", [5], SamplingParams())[1][0].spec.seed for _ in range(3)]

    assert seeds(make(seed=1)) == seeds(make(seed=1)) != seeds(make(seed=2))
    assert len(set(seeds(make(seed=1)))) == 3


def test_rejected_request_does_not_shift_later_seeds() -> None:
    input_processor, other = make(), make()
    for wrong in ([], [320], [5] * 64):
        with pytest.raises(PromptError):
            input_processor.requests("r", wrong, SamplingParams())
    found = [
        engine.requests("r", [5], SamplingParams())[1][0].spec.seed for engine in (input_processor, other)
    ]
    assert found[0] == found[1]


def test_priority_tenant_and_salt_reach_the_request() -> None:
    prompt = {"prompt_token_ids": [5], "cache_salt": "s"}
    assert one(prompt, context=RequestContext(-3, "t")).spec.context == RequestContext(-3, "t", "s")
    assert one(prompt, context=RequestContext(cache_salt="x")).spec.cache_key == "x"


def test_text_is_tokenized(tokenizer: Tokenizer) -> None:
    text, (request,) = make(tokenizer).requests("r", "the dog", SamplingParams(bad_words=["fox"]))
    assert text == "the dog"
    assert request.token_ids == tokenizer.encode("the dog")
    assert request.spec.bad_word_ids == bad_word_ids(tokenizer, ["fox"])


@pytest.mark.parametrize("fields", [{"stop": "x"}, {"bad_words": ["x"]}])
def test_text_features_need_a_tokenizer(fields: dict[str, Any]) -> None:
    with pytest.raises(PromptError, match="tokenizer"):
        one([5], SamplingParams(**fields))


junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=9)
    | st.just(array("q", [5])),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["prompt", "prompt_token_ids", "cache_salt", "x"]), inner, max_size=2
        )
    ),
    max_leaves=6,
)


@given(junk, junk, junk)
def test_any_input_is_accepted_or_raises_request_error(prompt: Any, priority: Any, tenant: Any) -> None:
    """Nothing but a RequestError leaves the validator, and what passes it is sound."""
    with suppress(RequestError):
        for item in split_prompts(prompt):
            _, requests = make().requests("r", item, SamplingParams(), RequestContext(priority, tenant))
            for request in requests:
                assert request.token_ids
                assert all(type(i) is int and 0 <= i < 320 for i in request.token_ids)
                assert isinstance(request.priority, int)
                assert isinstance(request.tenant, str)
                request.spec.cache_key.encode()


def test_params_of_the_wrong_type_are_rejected() -> None:
    wrong: Any = {"temperature": 0}
    with pytest.raises(ParameterError, match="it must be SamplingParams"):
        make().requests("r", [5], wrong)


def test_prompt_without_outputs_may_fill_the_context() -> None:
    request = one([5] * 64, task="prompt_logprobs")
    assert (request.task, request.max_tokens, request.max_total, request.num_to_compute) == (
        "prompt_logprobs",
        0,
        64,
        64,
    )
    with pytest.raises(PromptError, match="at most 64 are allowed"):
        one([5] * 65, task="prompt_logprobs")
    assert one([5] * 63).num_to_compute == 63, "the last output needs no KV"
    with pytest.raises(PromptError, match="at most 63 are allowed"):
        one([5] * 64)
