"""Open the configured checkpoint and read everything but its weights: tokenizer, EOS tokens and other defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from inflight.checkpoint.builtin import checkpoint_folder
from inflight.checkpoint.checkpoint import Checkpoint, open_checkpoint
from inflight.checkpoint.fields import Fields
from inflight.config import CacheConfig, EngineConfig, ModelConfig, SpeculationConfig
from inflight.errors import ConfigError, ModelError, ParameterError, shown
from inflight.frontend.text.tokenizer import Tokenizer
from inflight.models.decoders.assistant import assistant_spec, is_assistant
from inflight.models.decoders.draft_model import DraftModelSpec, draft_model_spec
from inflight.models.decoders.eagle import eagle_spec, is_eagle
from inflight.models.decoders.families import decoder_spec, mtp_spec
from inflight.models.decoders.heads import DecoderPlan, Encode, plan_decoder
from inflight.models.decoders.spec import DecoderSpec
from inflight.models.encoders.families import encoder_architecture
from inflight.models.quantization import ON_LOADING, QuantizedOnLoading
from inflight.models.tensors import read_headers
from inflight.sampling_params import SamplingParams

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# generation_config.json -> SamplingParams
_SAMPLING = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
_ALWAYS = {"repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens"}


def resolve_dtype(name: str, config: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of the weights in memory: `name`, or the checkpoint's own for "auto"."""
    if name == "auto":
        inner = config.get("text_config")
        parts = (config, inner) if isinstance(inner, Mapping) else (config,)
        names = [str(part[key]) for part in parts for key in ("dtype", "torch_dtype") if part.get(key)]
        name = names[0].removeprefix("torch.") if names else "float32"
    if name not in DTYPES:
        raise ModelError(f"dtype is {name!r}: it must be one of {', '.join(DTYPES)}")
    return DTYPES[name]


def eos_token_ids(config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return all tokens that end a generation, those of the generation config first."""
    ids: dict[int, None] = {}
    for part in (generation_config, config, config.get("text_config")):
        value = part.get("eos_token_id") if isinstance(part, Mapping) else None
        for token in value if isinstance(value, list) else [value]:
            if token is None:
                continue
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 1 << 31:
                raise ModelError(f"eos_token_id is {shown(value)}: it must be a token id or a list of them")
            ids[token] = None
    return tuple(ids)


def default_sampling(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `SamplingParams` fields that generation_config.json recommends.

    Fields that shape the distribution are used only if it recommends sampling at all.
    """
    names = _ALWAYS if generation_config.get("do_sample") is False else _SAMPLING | _ALWAYS
    fields = Fields(generation_config, "generation_config.json")
    params = {ours: fields.values[theirs] for theirs, ours in names.items() if theirs in fields}
    try:
        SamplingParams(**params)
    except ParameterError as error:  # fail at load time rather than on every request
        raise ModelError(f"generation_config.json has an invalid sampling parameter: {error}") from error
    return params


def resolve_length(longest: int, default: int, max_model_len: int | None) -> int:
    """Return the longest context or text to serve: `max_model_len`, or by default the checkpoint's own."""
    if max_model_len is not None and max_model_len > longest:
        raise ConfigError(
            f"max_model_len is {max_model_len}: the checkpoint supports at most {longest} positions"
        )
    return default if max_model_len is None else max_model_len


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """The decoder to load from a checkpoint, as the configuration wants it."""

    decoder: DecoderPlan
    dtype: torch.dtype  # of the weights
    context: int  # tokens, the longest to serve
    draft: Checkpoint | None = None  # of a predictor that another checkpoint has

    @property
    def spec(self) -> DecoderSpec:
        return self.decoder.spec


def plan_model(config: EngineConfig, checkpoint: Checkpoint, encode: Encode | None) -> ModelPlan:
    """Choose what to load. `encode` is None without a tokenizer."""
    expert_parallel = config.parallel.enable_expert_parallel
    plan = plan_decoder(model_name(config), checkpoint, encode, expert_parallel)
    draft = open_draft(config, is_dummy=not checkpoint.weight_files)
    spec = quantized_spec(with_predictor(plan.spec, config, checkpoint, draft), config.model)
    spec = quantized_kv_spec(spec, config.cache)
    dtype = resolve_dtype(config.model.dtype, checkpoint.config)
    context = resolve_length(spec.max_position, spec.default_context, config.model.max_model_len)
    return ModelPlan(replace(plan, spec=spec), dtype, context, draft)


def open_draft(config: EngineConfig, is_dummy: bool) -> Checkpoint | None:
    """Return the checkpoint that drafts for the model, if speculation is configured to use one."""
    options = config.scheduler.speculative_config
    model = None if options is None else SpeculationConfig.from_options(options).model
    if model is None:
        return None
    load_format = "dummy" if is_dummy else "auto"
    return open_checkpoint(model, load_format=load_format, download_dir=config.model.download_dir)


def with_predictor(
    spec: DecoderSpec, config: EngineConfig, checkpoint: Checkpoint, draft: Checkpoint | None = None
) -> DecoderSpec:
    """Return the decoder with the layer that predicts further tokens, if speculation is configured to use one."""
    options = config.scheduler.speculative_config
    method = None if options is None else SpeculationConfig.from_options(options).method
    if draft is not None and spec.has_lm_head:
        stored = read_headers(draft.weight_files)
        if method == "eagle3" or is_eagle(draft.config):
            return replace(spec, predictor=eagle_spec(draft.config, stored, spec))
        if is_assistant(draft.config):
            return replace(spec, predictor=assistant_spec(draft.config, spec))
        return replace(spec, predictor=draft_model_spec(decoder_spec(draft.config).as_stored(stored), spec))
    if method not in ("auto", "mtp"):
        return spec
    predictor = mtp_spec(checkpoint.config, spec) if spec.has_lm_head else None
    if predictor is not None and checkpoint.weight_files:  # configs do not tell
        tensors = f"{predictor.names.projection}."
        if not any(name.startswith(tensors) for name in read_headers(checkpoint.weight_files)):
            predictor = None
    if predictor is None and method == "mtp":
        raise ConfigError(
            f"speculative_config: method is mtp, but this checkpoint of {spec.architecture} has no layer that predicts "
            "further tokens, or not exactly one that is supported"
        )
    return replace(spec, predictor=predictor)


def quantized_spec(spec: DecoderSpec, model: ModelConfig) -> DecoderSpec:
    """Return the decoder with its weights quantized while loading, if the configuration says so."""
    requested, stored = model.quantization, spec.quantization.method
    if requested is None or requested == stored:
        if model.quantize_head and requested is None:
            raise ConfigError(
                "quantize_head is True, but quantization is not set: set it to fp8, int8 or int4"
            )
        return spec
    if stored is not None:
        raise ConfigError(f"quantization is {requested!r}: the checkpoint is already quantized, as {stored}")
    if requested not in ON_LOADING:
        raise ConfigError(
            f"quantization is {requested!r}, but the checkpoint is not quantized: "
            f"it must be one of {', '.join(ON_LOADING)}"
        )
    return replace(spec, quantization=QuantizedOnLoading(ON_LOADING[requested], model.quantize_head))


def check_kv_cache_dtype(dtype: str, allowed: Sequence[str], device_type: str) -> None:
    """Check that a kind of device, "cpu" or "cuda", can hold keys and values in this type."""
    if dtype not in allowed:
        device = "CPU" if device_type == "cpu" else "GPU"
        raise ConfigError(
            f"kv_cache_dtype is {dtype!r}: on a {device} it must be {' or '.join(map(repr, allowed))}"
        )


def quantized_kv_spec(spec: DecoderSpec, cache: CacheConfig) -> DecoderSpec:
    """Return the decoder with the keys and values of its layers quantized, if the configuration says so."""
    skipped = set(cache.kv_cache_dtype_skip_layers)
    known = {"sliding_window", *map(str, range(spec.num_layers))}
    if skipped - known:
        raise ConfigError(
            f"kv_cache_dtype_skip_layers has {', '.join(sorted(skipped - known))}: allowed are layers from 0 to "
            f"{spec.num_layers - 1}, and sliding_window"
        )
    if cache.kv_cache_dtype == "auto":
        if skipped:
            raise ConfigError(
                "kv_cache_dtype_skip_layers is set, but kv_cache_dtype is auto: set it to fp8 or int8"
            )
        return spec
    predictor = spec.predictor
    if predictor is not None:
        predictor = predictor.with_quantized_kv(cache.kv_cache_dtype)
    mixers = [
        mixer
        if mixer is None
        or mixer.kv is None
        or str(index) in skipped
        or (mixer.kv.window is not None and "sliding_window" in skipped)
        else mixer.with_quantized_kv(cache.kv_cache_dtype)
        for index, mixer in enumerate(spec.mixers)
    ]
    return replace(spec, mixers=tuple(mixers), predictor=predictor)


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A configured model, with everything known except its weights."""

    config: EngineConfig
    checkpoint: Checkpoint
    tokenizer: Tokenizer | None

    @classmethod
    def open(cls, config: EngineConfig) -> OpenModel:
        checkpoint = open_configured(config)
        return cls(config, checkpoint, load_tokenizer(config, checkpoint))

    @property
    def is_encoder(self) -> bool:
        return encoder_architecture(self.checkpoint.config) is not None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        ids = eos_token_ids(self.checkpoint.config, self.checkpoint.generation_config)
        stored = None if self.tokenizer is None else self.tokenizer.eos_token_id
        return ids if stored is None else tuple(dict.fromkeys((*ids, stored)))

    def plan(self) -> ModelPlan:
        tokenizer = self.tokenizer
        encode = None if tokenizer is None else partial(tokenizer.encode, add_special_tokens=False)
        plan = plan_model(self.config, self.checkpoint, encode)
        path = None if plan.draft is None else plan.draft.tokenizer_path
        if tokenizer is not None and path is not None and isinstance(plan.spec.predictor, DraftModelSpec):
            try:
                other = Tokenizer.load(path)
            except ModelError:  # it needs none
                return plan
            check_same_tokens(tokenizer, other)
        return plan


SAME_TOKENS = 0.99  # of the tokens of a draft model; names of reserved ones may differ


def check_same_tokens(tokenizer: Tokenizer, draft: Tokenizer) -> None:
    """Raise unless nearly all tokens of a draft model are those of the model."""
    count = min(tokenizer.vocab_size, draft.vocab_size)
    same = sum(tokenizer.token(token_id) == draft.token(token_id) for token_id in range(count))
    if same < SAME_TOKENS * count:
        raise ConfigError(
            f"speculative_config: the draft model has another tokenizer: {count - same} of {count} tokens differ"
        )


def open_configured(config: EngineConfig, load_format: str | None = None) -> Checkpoint:
    """Return the configured checkpoint. In the format "dummy", its weights need not exist."""
    model = config.model
    load_format = load_format or model.load_format
    return open_checkpoint(
        model_name(config), model.revision, load_format, model.hf_config, model.download_dir
    )


def model_name(config: EngineConfig) -> str:
    return str(checkpoint_folder()) if config.model.model is None else config.model.model


def load_tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> Tokenizer | None:
    model = config.model
    if model.skip_tokenizer_init:
        return None
    if model.tokenizer is not None:
        other = open_checkpoint(model.tokenizer, load_format="dummy", download_dir=model.download_dir)
        path: Path | None = other.tokenizer_path
    else:
        path = checkpoint.tokenizer_path
    if path is None:
        return None
    try:
        return Tokenizer.load(path, model.chat_template)
    except ModelError:
        if model.load_format == "dummy" and model.tokenizer is None:
            return None  # random weights need only a config
        raise
