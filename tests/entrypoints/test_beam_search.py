"""Beam search against all sequences there are, over a model that is a table."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from inflight.entrypoints.beam_search import BeamSearchParams, beam_search
from inflight.errors import ParameterError
from inflight.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from inflight.sampling_params import SamplingParams

NUM_TOKENS, END = 4, 3
METRICS = RequestMetrics(0.0, None, None, None, None, 0)


def logprobs_after(tokens: list[int]) -> list[float]:
    weights = [1 + (7 * token + 3 * sum(tokens) + len(tokens)) % 5 for token in range(NUM_TOKENS)]
    return [math.log(weight / sum(weights)) for weight in weights]


def extend(beams: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
    assert params.max_tokens == 1
    outputs = []
    for beam in beams:
        ranked = sorted(enumerate(logprobs_after(beam)), key=lambda item: -item[1])
        candidates = {token: Logprob(logprob, rank + 1) for rank, (token, logprob) in enumerate(ranked)}
        answer = CompletionOutput(0, token_ids=[ranked[0][0]], logprobs=[candidates])
        outputs.append(RequestOutput("r", None, beam, [answer], METRICS))
    return outputs


def search(width: int, length: int, **more: Any) -> list[tuple[list[int], float]]:
    params = BeamSearchParams(width, length, **more)
    (found,) = beam_search([[0]], params, extend, [END], 100)
    return [(sequence.tokens, sequence.cum_logprob) for sequence in found.sequences]


def score(tokens: tuple[int, ...]) -> float:
    return sum(logprobs_after([0, *tokens[:place]])[token] for place, token in enumerate(tokens))


def test_wide_beams_find_the_best_of_all_sequences() -> None:
    found = search(16, 3, ignore_eos=True)
    every = itertools.product(range(NUM_TOKENS), repeat=3)
    best = max(every, key=score)
    assert found[0][0] == [0, *best]
    assert found[0][1] == pytest.approx(score(best))
    assert [logprob for _, logprob in found] == sorted((logprob for _, logprob in found), reverse=True)


def test_one_beam_is_greedy() -> None:
    ((tokens, _),) = search(1, 5, ignore_eos=True)
    for place in range(1, len(tokens)):
        assert tokens[place] == max(range(NUM_TOKENS), key=logprobs_after(tokens[:place]).__getitem__)


def test_beams_end_at_eos_and_at_the_context_length() -> None:
    assert any(tokens[-1] == END for tokens, _ in search(4, 6, length_penalty=0.0))
    assert all(END not in tokens[:-1] for tokens, _ in search(4, 6))
    (found,) = beam_search([[0]], BeamSearchParams(2, 50, ignore_eos=True), extend, [END], 5)
    assert {len(sequence.tokens) for sequence in found.sequences} == {5}
    assert {sequence.finish_reason for sequence in found.sequences} == {"length"}


@pytest.mark.parametrize(
    "wrong", [{"beam_width": 0}, {"beam_width": 51}, {"max_tokens": 0}, {"temperature": 1.0}]
)
def test_error_names_the_wrong_parameter(wrong: dict[str, Any]) -> None:
    with pytest.raises(ParameterError) as caught:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **wrong})
    assert caught.value.param == next(iter(wrong))
