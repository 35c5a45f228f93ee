"""What a checkpoint says beside its weights: number format, end tokens, sampling defaults, context length."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from inflight.errors import ConfigError, ModelError, ParameterError, shown
from inflight.models.decoders.spec import DecoderSpec
from inflight.models.hf_config import Fields
from inflight.sampling_params import SamplingParams

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Tokens of a text, unless asked for more: rotary tables and steps are sized by it, and a config may claim anything.
MAX_DEFAULT_TEXT = 1 << 16

# generation_config.json -> SamplingParams
_SAMPLING = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
_ALWAYS = {"repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens"}


def resolve_dtype(name: str, config: Mapping[str, Any]) -> torch.dtype:
    """The format that weights are held in: the one asked for, or with "auto" the checkpoint's own."""
    if name == "auto":
        inner = config.get("text_config")
        places = (config, inner) if isinstance(inner, Mapping) else (config,)
        found = [str(place[key]) for place in places for key in ("dtype", "torch_dtype") if place.get(key)]
        name = found[0].removeprefix("torch.") if found else "float32"
    if name not in DTYPES:
        raise ModelError(f"dtype is {name!r}: weights can be held as {', '.join(DTYPES)}")
    return DTYPES[name]


def eos_token_ids(config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> tuple[int, ...]:
    """Every token that ends a generation, the generation config's first."""
    inner = config.get("text_config")
    ids: dict[int, None] = {}
    for where in (generation_config, config, inner if isinstance(inner, Mapping) else {}):
        value = where.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if token is None:
                continue
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 1 << 31:
                raise ModelError(f"eos_token_id is {shown(value)}: it must be a token id or a list of them")
            ids[token] = None
    return tuple(ids)


def default_sampling(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `SamplingParams` that the checkpoint's makers recommend.

    What shapes the distribution counts only where they recommend sampling at all.
    """
    names = _ALWAYS if generation_config.get("do_sample") is False else _SAMPLING | _ALWAYS
    fields = Fields(generation_config, "generation_config.json")
    found = {ours: fields.values[theirs] for theirs, ours in names.items() if theirs in fields}
    try:
        SamplingParams(**found)
    except ParameterError as error:  # now, and not at every request
        raise ModelError(f"generation_config.json recommends what cannot be: {error}") from error
    return found


def resolve_text_length(longest: int, declared: Iterable[int | None], asked: int | None) -> int:
    """The longest text to serve: what is asked, up to the positions that an encoder has, or the least of what its
    files declare."""
    if asked is None:
        return min([longest, MAX_DEFAULT_TEXT, *(length for length in declared if length is not None)])
    if asked > longest:
        raise ConfigError(f"max_model_len is {asked}: the checkpoint has {longest} positions")
    return asked


def resolve_context(spec: DecoderSpec, asked: int | None) -> int:
    """The longest context to serve: what is asked, up to what the checkpoint is meant for."""
    if asked is None:
        return spec.default_context
    if asked > spec.max_position:
        raise ConfigError(
            f"max_model_len is {asked}: the checkpoint is meant for at most {spec.max_position} positions"
        )
    return asked
