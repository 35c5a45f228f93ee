"""The requests of a comparison: what they ask, how long they may run, when they arrive."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import Any

from inflight.compare.prompts import draw_prompts
from inflight.errors import ConfigError, ParameterError
from inflight.frontend.pooling import cannot
from inflight.loading import LoadedEngine
from inflight.sampling_params import SamplingParams

LENGTHS = ("real", "ragged")
REAL_MAX_TOKENS = 768  # the built-in model's longest answers have about 600
RAGGED_MAX_TOKENS = 256
RAGGED_SPREAD = 10  # the longest prompt and answer have this many times the tokens of the shortest
MIN_RATE = 0.001  # requests a second: nobody waits for hours to see a comparison


@dataclass(frozen=True, slots=True)
class Arrival:
    """When requests come: all at once, or as a Poisson process that does not wait for answers."""

    rate: float | None = None  # requests a second; None: a burst

    @classmethod
    def parse(cls, text: str) -> Arrival:
        name, _, given = text.partition(":")
        if text == "burst":
            return cls()
        try:
            rate = float(given)
        except ValueError:
            rate = math.nan
        if name != "poisson" or not MIN_RATE <= rate < math.inf:
            raise ParameterError(
                f"arrival is {text!r}: allowed is burst, or poisson:RATE with a number of requests a second, "
                f"at least {MIN_RATE}"
            )
        return cls(rate)

    def times(self, count: int, seed: int) -> list[float]:
        """Seconds after the start, ascending."""
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
    """What is asked of every strategy alike."""

    num_requests: int = 64
    arrival: Arrival = Arrival()
    lengths: str = "real"
    max_tokens: int | None = None  # None: the default of `lengths`
    temperature: float | None = None  # None: what the checkpoint recommends
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_requests < 1:
            raise ParameterError(f"the number of requests is {self.num_requests}: it must be at least 1")
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
    """One request, before it is one: every strategy makes its own from it."""

    request_id: str
    title: str  # what a person reads
    prompt_ids: list[int]
    params: SamplingParams
    arrives_at: float  # seconds after the start


def build_jobs(workload: Workload, engine: LoadedEngine) -> list[Job]:
    """The same for the same workload and model. Every request has a seed of its own, so its tokens are fixed."""
    if not engine.generates:
        raise cannot("generate", engine.pooling, generates=False)
    rng = Random(workload.seed)
    asked = _real(workload, engine) if workload.lengths == "real" else _ragged(workload, engine)
    times = workload.arrival.times(workload.num_requests, workload.seed)
    return [
        Job(str(index), title, ids, _params(workload, engine, rng.getrandbits(63), fixed), time)
        for index, ((title, ids, fixed), time) in enumerate(zip(asked, times, strict=True))
    ]


# A title, the prompt's ids, and the answer's length where it is fixed.
_Asked = tuple[str, list[int], int | None]


def _params(workload: Workload, engine: LoadedEngine, seed: int, fixed: int | None) -> SamplingParams:
    options: dict[str, Any] = {**engine.default_params, "seed": seed}
    if workload.temperature is not None:
        options["temperature"] = workload.temperature
    options["max_tokens"] = workload.token_limit if fixed is None else fixed
    return SamplingParams(**options, ignore_eos=fixed is not None)


def _real(workload: Workload, engine: LoadedEngine) -> list[_Asked]:
    """Chat prompts; answers end where the model ends them."""
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise ConfigError("this model has no tokenizer, so it cannot be asked anything: use --lengths ragged")
    asked: list[_Asked] = []
    for text in draw_prompts(workload.num_requests, workload.seed):
        if engine.chat_template:
            rendered = engine.chat_template.render([{"role": "user", "content": text}])
            ids = tokenizer.encode(rendered, add_special_tokens=False)
        else:
            ids = tokenizer.encode(text)
        asked.append((text, ids, None))
    return asked


def _ragged(workload: Workload, engine: LoadedEngine) -> list[_Asked]:
    """Random ids, and answers of a fixed length each: prompts and answers of uniformly spread lengths."""
    rng = Random(f"{workload.seed}/ragged")
    high = min(workload.token_limit, engine.max_model_len // 2)
    low = max(1, high // RAGGED_SPREAD)
    asked: list[_Asked] = []
    for _ in range(workload.num_requests):
        num_prompt, num_output = rng.randint(low, high), rng.randint(low, high)
        ids = [rng.randrange(engine.input_processor.vocab_size) for _ in range(num_prompt)]
        asked.append((f"{num_prompt} random tokens", ids, num_output))
    return asked
