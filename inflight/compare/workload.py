"""The requests of a comparison: their prompts, their lengths and their arrival times."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import Any

from inflight.compare.prompts import draw_prompts
from inflight.errors import ConfigError, ParameterError
from inflight.frontend.scoring import unsupported_task
from inflight.loading import LoadedEngine
from inflight.sampling_params import SamplingParams

LENGTHS = ("real", "ragged")
REAL_MAX_TOKENS = 768  # the built-in model's longest answers have about 600 tokens
RAGGED_MAX_TOKENS = 256
RAGGED_SPREAD = 10  # the longest prompts and answers have this many times the tokens of the shortest
MIN_RATE = 0.001  # requests per second: at lower rates a comparison would take hours


@dataclass(frozen=True, slots=True)
class Arrival:
    """When requests arrive: all at once, or as a Poisson process that does not wait for answers."""

    rate: float | None = None  # requests per second; None: all at once

    @classmethod
    def parse(cls, text: str) -> Arrival:
        name, _, number = text.partition(":")
        if text == "burst":
            return cls()
        try:
            rate = float(number)
        except ValueError:
            rate = math.nan
        if name != "poisson" or not MIN_RATE <= rate < math.inf:
            raise ParameterError(
                f"arrival is {text!r}: it must be burst, or poisson:RATE with a RATE of at least {MIN_RATE} "
                "requests per second"
            )
        return cls(rate)

    def times(self, count: int, seed: int) -> list[float]:
        """Return `count` arrival times in seconds after the start, in ascending order."""
        if self.rate is None:
            return [0.0] * count
        rng, now, times = Random(f"{seed}/arrivals"), 0.0, []
        for _ in range(count):
            now += rng.expovariate(self.rate)
            times.append(now)
        return times

    def __str__(self) -> str:
        return "burst" if self.rate is None else f"poisson:{self.rate:g}"


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests that every strategy runs."""

    num_requests: int = 64
    arrival: Arrival = Arrival()
    lengths: str = "real"
    max_tokens: int | None = None  # None: the default of `lengths`
    temperature: float | None = None  # None: the checkpoint's default
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_requests < 1:
            raise ParameterError(f"num_requests is {self.num_requests}: it must be at least 1")
        if self.lengths not in LENGTHS:
            raise ParameterError(f"lengths is {self.lengths!r}: allowed are {', '.join(LENGTHS)}")
        SamplingParams(max_tokens=self.token_limit, temperature=self.temperature or 0.0)

    @property
    def token_limit(self) -> int:
        if self.max_tokens is not None:
            return self.max_tokens
        return REAL_MAX_TOKENS if self.lengths == "real" else RAGGED_MAX_TOKENS


@dataclass(frozen=True, slots=True)
class Job:
    """The description of one request, from which each strategy creates its own `Request`."""

    request_id: str
    title: str  # shown to people
    prompt_ids: list[int]
    params: SamplingParams
    arrives_at: float  # seconds after the start


def build_jobs(workload: Workload, engine: LoadedEngine) -> list[Job]:
    """Return the jobs of a workload, which are the same for the same workload and model.

    Every job has its own seed, so its tokens do not depend on the strategy.
    """
    if not engine.frontend.generates:
        raise unsupported_task("generate", engine.frontend.pooling, generates=False)
    rng = Random(workload.seed)
    prompts = (
        _real_prompts(workload, engine) if workload.lengths == "real" else _ragged_prompts(workload, engine)
    )
    times = workload.arrival.times(workload.num_requests, workload.seed)
    return [
        Job(str(index), title, ids, _params(workload, engine, rng.getrandbits(63), num_output), time)
        for index, ((title, ids, num_output), time) in enumerate(zip(prompts, times, strict=True))
    ]


# A title, the prompt's token ids, and the answer's length if it is fixed.
_Prompt = tuple[str, list[int], int | None]


def _params(workload: Workload, engine: LoadedEngine, seed: int, num_output: int | None) -> SamplingParams:
    options: dict[str, Any] = {**engine.frontend.default_params, "seed": seed}
    if workload.temperature is not None:
        options["temperature"] = workload.temperature
    options["max_tokens"] = workload.token_limit if num_output is None else num_output
    return SamplingParams(**options, ignore_eos=num_output is not None)


def _real_prompts(workload: Workload, engine: LoadedEngine) -> list[_Prompt]:
    """Return chat prompts whose answers end when the model ends them."""
    tokenizer = engine.frontend.tokenizer
    if tokenizer is None:
        raise ConfigError("this model has no tokenizer, which chat prompts need: use --lengths ragged")
    prompts: list[_Prompt] = []
    for text in draw_prompts(workload.num_requests, workload.seed):
        if engine.frontend.chat_template:
            rendered = engine.frontend.chat_template.render([{"role": "user", "content": text}])
            ids = tokenizer.encode(rendered, add_special_tokens=False)
        else:
            ids = tokenizer.encode(text)
        prompts.append((text, ids, None))
    return prompts


def _ragged_prompts(workload: Workload, engine: LoadedEngine) -> list[_Prompt]:
    """Return prompts of random token ids; the lengths of prompts and answers are fixed and uniformly distributed."""
    rng = Random(f"{workload.seed}/ragged")
    high = min(workload.token_limit, engine.frontend.max_model_len // 2)
    low = max(1, high // RAGGED_SPREAD)
    prompts: list[_Prompt] = []
    for _ in range(workload.num_requests):
        num_prompt, num_output = rng.randint(low, high), rng.randint(low, high)
        ids = [rng.randrange(engine.frontend.input_processor.vocab_size) for _ in range(num_prompt)]
        prompts.append((f"{num_prompt} random tokens", ids, num_output))
    return prompts
