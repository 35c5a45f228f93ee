"""`SamplingParams`: how the tokens of a request are sampled. All checks that need no model are done here."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

from inflight.errors import ParameterError, shown
from inflight.structured_outputs import KINDS, StructuredOutputs
from inflight.structured_outputs import PARAM as STRUCTURED_OUTPUTS
from inflight.vllm_names import SAMPLING_RULES, translate_arguments, vllm_attribute

T = TypeVar("T")

MAX_N = 128
MAX_LOGPROBS = 100
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
MAX_BAD_WORDS = 1024
SEED_RANGE = (-(2**63), 2**64 - 1)
_TOKEN_ID = re.compile("[0-9]{1,19}")


# The checks below take the parameter's name; `what` names the part of it that is wrong.


def _number(name: str, value: object, what: str = "") -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:  # an integer too large for a float
            number = math.inf
        if math.isfinite(number):
            return number
    raise ParameterError(f"{what or name} is {shown(value)}: it must be a finite number", param=name)


def _items(name: str, value: Any, item_type: str) -> tuple[Any, ...]:
    """Return the items of a list; None counts as empty. Text is not accepted as a list of characters."""
    if value is None:
        return ()
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise ParameterError.of_value(name, value, f"it must be a list of {item_type}")
    return tuple(value)


def _integer(name: str, value: object, low: int, high: int | None = None, what: str = "") -> None:
    allowed = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or value < low
        or (high is not None and value > high)
    ):
        raise ParameterError(f"{what or name} is {shown(value)}: it must be {allowed}", param=name)


def _within(
    name: str, value: object, low: float, high: float, *, open_low: bool = False, what: str = ""
) -> None:
    number = _number(name, value, what)
    if number > high or number < low or (open_low and number == low):
        allowed = f"{'(' if open_low else '['}{low:g}, {high:g}]"
        raise ParameterError(f"{what or name} is {value!r}: it must be in {allowed}", param=name)


def _structured(fields: Mapping[str, Any]) -> StructuredOutputs:
    unknown = sorted(set(map(str, fields)) - set(KINDS))
    if unknown:
        raise ParameterError(
            f"structured_outputs has {', '.join(unknown)}: allowed are {', '.join(KINDS)}",
            param=STRUCTURED_OUTPUTS,
        )
    return StructuredOutputs(**fields)


def _takes_foreign_fields(cls: type[T]) -> type[T]:
    """Let the constructor of a dataclass with slots also accept vLLM's fields that have no effect."""
    defaults = {item.name: item.default for item in fields(cls)}  # type: ignore[arg-type]
    # These bypass __setattr__, which is for later assignments.
    setters = [getattr(cls, name).__set__ for name in defaults]
    constructor: Any = cls.__init__

    @wraps(constructor)
    def construct(self: Any, *args: Any, **values: Any) -> None:
        if not values.keys() <= defaults.keys():
            values = translate_arguments(values, SAMPLING_RULES, ParameterError)
        if args or not values.keys() <= defaults.keys():  # the constructor reads or rejects these
            constructor(self, *args, **values)
            return
        for set_value, value in zip(setters, {**defaults, **values}.values(), strict=True):
            set_value(self, value)
        self.__post_init__()

    cls.__init__ = construct  # type: ignore[method-assign]
    return cls


@_takes_foreign_fields
@dataclass(slots=True)
class SamplingParams:
    """How the tokens of one request are sampled, and when it ends.

    Values are checked here, also at every assignment; checks that need the vocabulary or the context length are made
    when the request is added. A request keeps its own clone, so later assignments do not affect it.
    """

    n: int = 1
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: up to the context length
    min_tokens: int = 0
    logprobs: int | None = None  # number of most likely tokens to report in addition to the sampled one
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    prediction: str | None = (
        None  # what the answer may be like: changes nothing but the speed, with speculation
    )
    structured_outputs: StructuredOutputs | None = None  # constrains the text

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, MAX_N)
        if _number("temperature", self.temperature) < 0:
            raise ParameterError.of_value("temperature", self.temperature, "it must be at least 0")
        _within("top_p", self.top_p, 0, 1, open_low=True)
        _integer("top_k", self.top_k, -1)
        _within("min_p", self.min_p, 0, 1)
        _within("presence_penalty", self.presence_penalty, -2, 2)
        _within("frequency_penalty", self.frequency_penalty, -2, 2)
        _within("repetition_penalty", self.repetition_penalty, 0, 1e6, open_low=True)
        if self.seed is not None:
            _integer("seed", self.seed, *SEED_RANGE)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1)
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            reason = f"it must not exceed max_tokens, {self.max_tokens}"
            raise ParameterError.of_value("min_tokens", self.min_tokens, reason)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _integer(name, value, 0, MAX_LOGPROBS)
        if not isinstance(self.prediction, str | None):
            raise ParameterError.of_value("prediction", self.prediction, "it must be a text")
        self._normalise_stops()
        self._normalise_ids()
        if isinstance(self.structured_outputs, Mapping):
            object.__setattr__(self, STRUCTURED_OUTPUTS, _structured(self.structured_outputs))
        elif not isinstance(self.structured_outputs, StructuredOutputs | None):
            raise ParameterError.of_value(
                STRUCTURED_OUTPUTS, self.structured_outputs, "it must be StructuredOutputs"
            )

    def _normalise_stops(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _items("stop", self.stop, "strings")
        if len(stop) > MAX_STOP_STRINGS:
            raise ParameterError(
                f"stop has {len(stop)} strings: at most {MAX_STOP_STRINGS} are allowed", param="stop"
            )
        for text in stop:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_LENGTH:
                value = f"of {len(text)} characters" if isinstance(text, str) else shown(text)
                raise ParameterError(
                    f"a stop string is {value}: it must have 1 to {MAX_STOP_LENGTH} characters", param="stop"
                )
        if stop and not self.detokenize:
            raise ParameterError("stop strings need detokenize=True", param="stop")
        object.__setattr__(self, "stop", stop)
        words = _items("bad_words", self.bad_words, "strings")
        if len(words) > MAX_BAD_WORDS or not all(isinstance(word, str) and word for word in words):
            raise ParameterError(
                f"bad_words must be at most {MAX_BAD_WORDS} non-empty strings", param="bad_words"
            )
        object.__setattr__(self, "bad_words", words)

    def _normalise_ids(self) -> None:
        object.__setattr__(self, "top_k", max(self.top_k, 0))
        object.__setattr__(self, "stop_token_ids", _items("stop_token_ids", self.stop_token_ids, "token ids"))
        if self.allowed_token_ids is not None:
            allowed = _items("allowed_token_ids", self.allowed_token_ids, "token ids")
            object.__setattr__(self, "allowed_token_ids", allowed)
            if not self.allowed_token_ids:
                raise ParameterError(
                    "allowed_token_ids is empty: it must name at least one token, or be None",
                    param="allowed_token_ids",
                )
        bias: dict[int, float] = {}
        if not isinstance(self.logit_bias, Mapping | None):
            raise ParameterError.of_value("logit_bias", self.logit_bias, "it must map token ids to numbers")
        for key, value in (self.logit_bias or {}).items():
            # JSON has only string keys.
            token_id = int(key) if isinstance(key, str) and _TOKEN_ID.fullmatch(key) else key
            is_usual = (
                type(token_id) is int and type(value) is float and token_id >= 0 and -100 <= value <= 100
            )
            if not is_usual:
                _integer("logit_bias", token_id, 0, what="a token id in logit_bias")
                _within("logit_bias", value, -100, 100, what=f"logit_bias[{token_id}]")
            bias[token_id] = float(value)
        object.__setattr__(self, "logit_bias", bias or None)
        for name in ("stop_token_ids", "allowed_token_ids"):
            ids = getattr(self, name)
            if ids and (set(map(type, ids)) != {int} or min(ids) < 0):
                for token_id in ids:
                    _integer(name, token_id, 0, what=f"an id in {name}")

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign with the checks of the constructor. A rejected value changes nothing."""
        if not hasattr(self, STRUCTURED_OUTPUTS):  # the last field: the constructor is still running
            object.__setattr__(self, name, value)
            return
        changed = replace(self, **{name: value})
        for item in fields(self):
            object.__setattr__(self, item.name, getattr(changed, item.name))

    def clone(self) -> SamplingParams:
        """Return a copy that assignments to this object do not change."""
        if self.logit_bias is not None:  # a dict, which may have been modified
            return replace(self)
        made = object.__new__(SamplingParams)
        for name in _FIELDS:
            object.__setattr__(made, name, getattr(self, name))
        return made

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, always as a tuple."""
        return self.stop  # type: ignore[return-value]  # __post_init__ made it one

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


_FIELDS = tuple(item.name for item in fields(SamplingParams))


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Return vLLM's names for our objects."""
        return vllm_attribute(__name__, name)
