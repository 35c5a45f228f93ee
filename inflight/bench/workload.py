"""What is asked of a server, and when: requests and their moments, the same for the same seed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal

import msgspec

from inflight.bench.words import WORDS
from inflight.errors import ConfigError, ParameterError

Endpoint = Literal["completions", "chat"]
PATHS: dict[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class Range:
    """Lengths from `low` to `high`, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, name: str, text: str) -> Range:
        low, colon, high = text.partition(":")
        try:
            found = cls(int(low), int(high if colon else low))
        except ValueError:
            found = cls(0, 0)
        if not 1 <= found.low <= found.high:
            raise ParameterError(
                f"{name} is {text!r}: it must be a length, or LOW:HIGH with 1 <= LOW <= HIGH"
            )
        return found

    def draw(self, rng: Random) -> int:
        return rng.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


class PlannedRequest(msgspec.Struct, frozen=True, gc=False):
    """One request before it is sent."""

    index: int
    at: float  # seconds after the start
    body: bytes


@dataclass(frozen=True)
class ServingWorkload:
    """The requests of every run."""

    model: str
    endpoint: Endpoint = "completions"
    num_requests: int = 400
    prompt_len: Range = Range(100, 1024)
    output_len: Range = Range(32, 256)
    vocab_size: int = 10_000  # ids are drawn from below it
    seed: int = 0
    ramp: float = 0.0  # seconds in which the rate grows from nothing
    ignore_eos: bool = True
    parameters: dict[str, Any] = field(default_factory=dict)  # of every body, besides the usual ones
    dataset: tuple[dict[str, Any], ...] = ()

    def jobs(self, rate: float, label: str) -> list[PlannedRequest]:
        """Requests at `rate` a second. Lengths are the same for every label; prompts are not, so that no run finds
        the prefixes of the one before in a cache."""
        times = arrival_times(self.num_requests, rate, self.seed, self.ramp)
        bodies = self.bodies(self.num_requests, label)
        return [
            PlannedRequest(index, at, body)
            for index, (at, body) in enumerate(zip(times, bodies, strict=True))
        ]

    def bodies(self, count: int, label: str) -> list[bytes]:
        lengths, ids = Random(f"{self.seed}/lengths"), Random(f"{self.seed}/{label}")
        found = []
        for index in range(count):
            num_prompt, num_output = self.prompt_len.draw(lengths), self.output_len.draw(lengths)
            asked = {"max_tokens": num_output, **self._asked(index, num_prompt, ids)}
            found.append(msgspec.json.encode({**self._common(), **asked}))
        return found

    def _asked(self, index: int, num_prompt: int, rng: Random) -> dict[str, Any]:
        if self.dataset:
            return self.dataset[index % len(self.dataset)]
        if self.endpoint == "completions":
            return {"prompt": [rng.randrange(self.vocab_size) for _ in range(num_prompt)]}
        text = " ".join(rng.choices(WORDS, k=num_prompt))
        return {"messages": [{"role": "user", "content": text}]}

    def _common(self) -> dict[str, Any]:
        ending = {"ignore_eos": True} if self.ignore_eos else {}
        return {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            **ending,
            **self.parameters,
        }


def arrival_times(count: int, rate: float, seed: int, ramp: float = 0.0) -> list[float]:
    """A Poisson process: seconds after the start, ascending. With an infinite rate all come at once or, with a ramp,
    evenly within it."""
    if math.isinf(rate):
        return [ramp * index / count for index in range(count)]
    rng, expected, times = Random(f"{seed}/arrivals"), 0.0, []
    for _ in range(count):
        expected += rng.expovariate(1.0)  # arrivals that a steady rate would have brought by then
        times.append(_moment(expected, rate, ramp))
    return times


def _moment(expected: float, rate: float, ramp: float) -> float:
    """When so many arrivals are due, at a rate that grows evenly from 0 during the ramp: rate * t^2 / (2 * ramp)."""
    within = rate * ramp / 2
    if expected < within:
        return math.sqrt(2 * ramp * expected / rate)
    return ramp + (expected - within) / rate


def parse_rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not rate > 0:
        raise ParameterError(f"rate is {text!r}: it must be a positive number of requests a second, or inf")
    return rate


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: int | None = None


def read_dataset(path: Path, endpoint: Endpoint) -> tuple[dict[str, Any], ...]:
    """Requests from a file of JSON objects, one a line: a prompt or messages, and max_tokens if it is fixed."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"the dataset {str(path)!r} cannot be read: {error.strerror}") from error
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            found.append(_read_line(f"{path}, line {number}", line, endpoint))
    if not found:
        raise ConfigError(f"the dataset {str(path)!r} is empty: it must have a JSON object a line")
    return tuple(found)


def _read_line(where: str, line: bytes, endpoint: Endpoint) -> dict[str, Any]:
    try:
        given = msgspec.json.decode(line, type=_Line)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{where}: {error}") from None
    asked: dict[str, Any] = {} if given.max_tokens is None else {"max_tokens": given.max_tokens}
    if endpoint == "completions":
        if given.prompt is None:
            raise ConfigError(f"{where}: completions need a prompt")
        return {**asked, "prompt": given.prompt}
    if given.messages is not None:
        return {**asked, "messages": given.messages}
    if not isinstance(given.prompt, str):
        raise ConfigError(f"{where}: a chat needs messages, or a prompt that is a text")
    return {**asked, "messages": [{"role": "user", "content": given.prompt}]}
