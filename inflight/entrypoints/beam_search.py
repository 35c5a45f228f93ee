"""Beam search, one token per engine run. The prefix cache holds all but the last tokens of each beam."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from inflight.errors import ParameterError
from inflight.outputs import Logprobs, RequestOutput
from inflight.sampling_params import MAX_LOGPROBS, SamplingParams

# Continues prompts given as token ids.
Extend = Callable[[list[list[int]], SamplingParams], list[RequestOutput]]
MAX_BEAMS = MAX_LOGPROBS // 2  # each beam has twice as many candidates


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """Beam width, length and length penalty (1: beams are ranked by their mean logprob)."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0  # always 0: nothing is sampled
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False  # accepted as in vLLM: there are no stop strings

    def __post_init__(self) -> None:
        for name, value, most in (
            ("beam_width", self.beam_width, MAX_BEAMS),
            ("max_tokens", self.max_tokens, None),
        ):
            is_integer = isinstance(value, int) and not isinstance(value, bool)
            if not is_integer or value < 1 or (most is not None and value > most):
                allowed = "an integer of at least 1" if most is None else f"an integer from 1 to {most}"
                raise ParameterError.of_value(name, value, f"it must be {allowed}")
        if self.temperature:
            raise ParameterError.of_value(
                "temperature", self.temperature, "beam search does not sample, so it must be 0"
            )


@dataclass(slots=True)
class BeamSearchSequence:
    """A prompt with one continuation."""

    tokens: list[int]  # including the prompt
    logprobs: list[Logprobs] = field(default_factory=list)  # of each new token and its candidates
    cum_logprob: float = 0.0
    text: str | None = None  # of all tokens except special ones
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def extended(self, token_id: int, candidates: Logprobs) -> BeamSearchSequence:
        total = self.cum_logprob + candidates[token_id].logprob
        return BeamSearchSequence([*self.tokens, token_id], [*self.logprobs, candidates], total)


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The best sequences, best first."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True)
class _Search:
    """The beams of one prompt."""

    beams: list[BeamSearchSequence]
    done: list[BeamSearchSequence] = field(default_factory=list)


def beam_search(
    prompts: Sequence[list[int]],
    params: BeamSearchParams,
    extend: Extend,
    eos_token_ids: Sequence[int],
    max_model_len: int,
) -> list[BeamSearchOutput]:
    """Search all prompts together, a token at a time."""
    searches = [_Search([BeamSearchSequence(list(prompt))]) for prompt in prompts]
    step = SamplingParams(max_tokens=1, temperature=0, logprobs=2 * params.beam_width, ignore_eos=True)
    ends = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
    for _ in range(params.max_tokens):
        open_ = [
            (search, beam) for search in searches for beam in search.beams if len(beam.tokens) < max_model_len
        ]
        if not open_:
            break
        outputs = extend([beam.tokens for _, beam in open_], step)
        grown: dict[int, list[BeamSearchSequence]] = {id(search): [] for search in searches}
        for (search, beam), output in zip(open_, outputs, strict=True):
            for candidates in (output.outputs[0].logprobs or ())[:1]:
                best = sorted(candidates, key=lambda token_id: candidates[token_id].rank)[
                    : 2 * params.beam_width
                ]
                grown[id(search)] += [beam.extended(token_id, candidates) for token_id in best]
        for search in searches:
            _choose(search, grown[id(search)], ends, params.beam_width)
    return [BeamSearchOutput(_best(search, ends, params)) for search in searches]


def _choose(search: _Search, grown: list[BeamSearchSequence], ends: frozenset[int], beam_width: int) -> None:
    """Keep the best candidates as beams; ended ones are done."""
    if not grown:
        return
    search.beams = []
    for beam in sorted(grown, key=lambda beam: beam.cum_logprob, reverse=True):
        if beam.tokens[-1] in ends:
            beam.finish_reason = "stop"
            search.done.append(beam)
        elif len(search.beams) < beam_width:
            search.beams.append(beam)


def _best(search: _Search, ends: frozenset[int], params: BeamSearchParams) -> list[BeamSearchSequence]:
    def score(beam: BeamSearchSequence) -> float:
        num_tokens = len(beam.tokens) - (beam.tokens[-1] in ends)
        weight: float = max(1, num_tokens) ** params.length_penalty
        return beam.cum_logprob / weight

    for beam in search.beams:
        beam.finish_reason = "length"
    return sorted([*search.done, *search.beams], key=score, reverse=True)[: params.beam_width]
