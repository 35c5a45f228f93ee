"""When the requests of a comparison or a benchmark arrive, which depends only on the seed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from inflight.errors import ParameterError

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
        return arrival_times(count, math.inf if self.rate is None else self.rate, seed)

    def __str__(self) -> str:
        return "burst" if self.rate is None else f"poisson:{self.rate:g}"


BURST = Arrival()


def arrival_times(
    count: int, rate: float, seed: int, ramp: float = 0.0, burstiness: float = 1.0
) -> list[float]:
    """Return the arrival times of a Poisson process, in seconds after the start and in ascending order.

    Gaps have a gamma distribution: with a burstiness below 1 requests come in bursts, above 1 more evenly. With an
    infinite rate all requests arrive at once or, with a ramp, evenly spread over it.
    """
    if not 0 < burstiness < math.inf:
        raise ParameterError(f"burstiness is {burstiness}: it must be a positive number")
    if math.isinf(rate):
        return [ramp * index / count for index in range(count)]
    rng, expected, times = Random(f"{seed}/arrivals"), 0.0, []
    for _ in range(count):
        # Expected number of arrivals at this point, for a unit rate.
        expected += rng.expovariate(1.0) if burstiness == 1 else rng.gammavariate(burstiness, 1 / burstiness)
        times.append(_moment(expected, rate, ramp))
    return times


def _moment(expected: float, rate: float, ramp: float) -> float:
    """Return when `expected` arrivals are due.

    The rate grows linearly from 0 during the ramp, so rate * t^2 / (2 * ramp) arrivals are due after t seconds of it.
    """
    within = rate * ramp / 2
    if expected < within:
        return math.sqrt(2 * ramp * expected / rate)
    return ramp + (expected - within) / rate
