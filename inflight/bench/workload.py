"""The requests sent to a server and their arrival times, which depend only on the seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal

import msgspec

from inflight.bench.compare.arrivals import arrival_times
from inflight.errors import ConfigError, ParameterError

Endpoint = Literal["completions", "chat"]
PATHS: dict[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
# Common short words, most of which are one token in most vocabularies, for prompts that must be text.
_WORD_LIST = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one had "
    "by word but not what all were we when your can said there use an each which she do how their if will "
    "up other about out many then them these so some her would make like him into time has look two more "
    "write go see number no way could people my than first water been call who oil its now find long down "
    "day did get come made may part "
)
WORDS = tuple(_WORD_LIST.split())


@dataclass(frozen=True, slots=True)
class Range:
    """Lengths from `low` to `high`, inclusive."""

    low: int
    high: int

    @classmethod
    def parse(cls, name: str, text: str) -> Range:
        low, colon, high = text.partition(":")
        try:
            lengths = cls(int(low), int(high if colon else low))
        except ValueError:
            lengths = cls(0, 0)
        if not 1 <= lengths.low <= lengths.high:
            raise ParameterError(
                f"{name} is {text!r}: it must be a length, or LOW:HIGH with 1 <= LOW <= HIGH"
            )
        return lengths

    def widened(self, name: str, ratio: float) -> Range:
        """Return the range of `--random-range-ratio`: a single length, up to `ratio` of it shorter or longer."""
        if not 0 <= ratio < 1:
            raise ParameterError(f"random_range_ratio is {ratio}: it must be at least 0 and below 1")
        if self.low != self.high:
            raise ParameterError(f"{name} is {self}: with random_range_ratio it must be a single length")
        return Range(max(1, math.floor(self.low * (1 - ratio))), math.ceil(self.low * (1 + ratio)))

    def draw(self, rng: Random) -> int:
        return rng.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


class PlannedRequest(msgspec.Struct, frozen=True, gc=False):
    """A request that is yet to be sent."""

    index: int
    at: float  # when it is due, in seconds after the start
    body: bytes


@dataclass(frozen=True)
class ServingWorkload:
    """The requests of a benchmark; each rate is a separate run."""

    model: str
    endpoint: Endpoint = "completions"
    num_requests: int = 400
    prompt_len: Range = Range(100, 1024)
    output_len: Range = Range(32, 256)
    vocab_size: int = 10_000  # token ids are below this
    seed: int = 0
    ramp: float = 0.0  # seconds over which the rate grows from zero
    burstiness: float = 1.0  # shape of the gamma distribution of gaps; 1: a Poisson process
    ignore_eos: bool = True
    parameters: dict[str, Any] = field(default_factory=dict)  # additional parameters of every request
    dataset: tuple[dict[str, Any], ...] = ()

    def jobs(self, rate: float, label: str) -> list[PlannedRequest]:
        """Return the requests of a run at `rate` requests per second.

        Lengths are the same for every label. Prompts are not, so that no run hits the prefix cache of an earlier one.
        """
        times = arrival_times(self.num_requests, rate, self.seed, self.ramp, self.burstiness)
        bodies = self.bodies(self.num_requests, label)
        return [
            PlannedRequest(index, at, body)
            for index, (at, body) in enumerate(zip(times, bodies, strict=True))
        ]

    def bodies(self, count: int, label: str) -> list[bytes]:
        lengths, ids = Random(f"{self.seed}/lengths"), Random(f"{self.seed}/{label}")
        bodies = []
        for index in range(count):
            num_prompt, num_output = self.prompt_len.draw(lengths), self.output_len.draw(lengths)
            fields = {"max_tokens": num_output, **self._prompt_fields(index, num_prompt, ids)}
            bodies.append(msgspec.json.encode({**self._common_fields(), **fields}))
        return bodies

    def _prompt_fields(self, index: int, num_prompt: int, rng: Random) -> dict[str, Any]:
        if self.dataset:
            return self.dataset[index % len(self.dataset)]
        if self.endpoint == "completions":
            return {"prompt": [rng.randrange(self.vocab_size) for _ in range(num_prompt)]}
        text = " ".join(rng.choices(WORDS, k=num_prompt))
        return {"messages": [{"role": "user", "content": text}]}

    def _common_fields(self) -> dict[str, Any]:
        ending = {"ignore_eos": True} if self.ignore_eos else {}
        return {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            **ending,
            **self.parameters,
        }


def parse_rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not rate > 0:
        raise ParameterError(f"rate is {text!r}: it must be a positive number of requests per second, or inf")
    return rate


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: int | None = None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the dataset {str(path)!r}: {error.strerror}") from error


def read_dataset(path: Path, endpoint: Endpoint) -> tuple[dict[str, Any], ...]:
    """Read requests from a JSON Lines file: each has a prompt or messages, and optionally max_tokens."""
    lines = _read(path).splitlines()
    requests = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            requests.append(_read_line(f"{path}, line {number}", line, endpoint))
    if not requests:
        raise ConfigError(f"the dataset {str(path)!r} is empty: it must contain one JSON object per line")
    return tuple(requests)


def _read_line(where: str, line: bytes, endpoint: Endpoint) -> dict[str, Any]:
    try:
        item = msgspec.json.decode(line, type=_Line)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{where}: {error}") from None
    limit: dict[str, Any] = {} if item.max_tokens is None else {"max_tokens": item.max_tokens}
    if endpoint == "completions":
        if item.prompt is None:
            raise ConfigError(f"{where}: prompt is missing: --endpoint completions needs it")
        return {**limit, "prompt": item.prompt}
    if item.messages is not None:
        return {**limit, "messages": item.messages}
    if not isinstance(item.prompt, str):
        raise ConfigError(
            f"{where}: messages are missing: --endpoint chat needs them, or a prompt that is a string"
        )
    return {**limit, "messages": [{"role": "user", "content": item.prompt}]}


# ---- ShareGPT ----

# Conversations outside these limits are skipped, as by vLLM: tokens of a prompt or answer, of a prompt, of both.
MIN_TOKENS, MAX_PROMPT_TOKENS, MAX_TOTAL_TOKENS = 4, 1024, 2048
MAX_CHARACTERS = 16 * MAX_TOTAL_TOKENS  # a longer text is not worth counting its tokens


class _Turn(msgspec.Struct):
    value: str


class _ShareGptItem(msgspec.Struct):
    conversations: list[_Turn]


def is_sharegpt(path: Path) -> bool:
    """Return whether a dataset is one JSON list, as ShareGPT's files are, instead of JSON Lines."""
    return _read(path).lstrip()[:1] == b"["


def read_sharegpt(
    path: Path,
    endpoint: Endpoint,
    num_requests: int,
    seed: int,
    count_tokens: Callable[[str], int],
    keep_lengths: bool = True,
) -> tuple[dict[str, Any], ...]:
    """Read up to `num_requests` prompts from a ShareGPT file, in random order: the first turns of its conversations.

    If `keep_lengths`, an answer is as long as the second turn.
    """
    try:
        conversations = msgspec.json.decode(_read(path), type=list[_ShareGptItem])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is not a ShareGPT file: {error}") from None
    turns = [item.conversations[:2] for item in conversations if len(item.conversations) > 1]
    Random(f"{seed}/dataset").shuffle(turns)
    requests: list[dict[str, Any]] = []
    for prompt, answer in turns:
        if len(requests) == num_requests:
            break
        if len(prompt.value) + len(answer.value) > MAX_CHARACTERS:
            continue
        num_prompt, num_output = count_tokens(prompt.value), count_tokens(answer.value)
        if num_prompt < MIN_TOKENS or (num_output < MIN_TOKENS and keep_lengths):
            continue
        if num_prompt > MAX_PROMPT_TOKENS or num_prompt + num_output > MAX_TOTAL_TOKENS:
            continue
        fields = {"max_tokens": num_output} if keep_lengths else {}
        if endpoint == "completions":
            requests.append({**fields, "prompt": prompt.value})
        else:
            requests.append({**fields, "messages": [{"role": "user", "content": prompt.value}]})
    if not requests:
        raise ConfigError(
            f"the dataset {str(path)!r} has no usable conversation: it needs two turns of at least {MIN_TOKENS} "
            f"tokens, with at most {MAX_PROMPT_TOKENS} in the first and {MAX_TOTAL_TOKENS} together"
        )
    return tuple(requests)
