"""Load the configured model and build an engine over it.

`load_engine` opens the checkpoint and calls `load_decoder_engine` or `load_encoder_engine`. `load_rank` is its
counterpart in the process of another rank.
"""

from __future__ import annotations

import logging
import weakref
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from inflight.checkpoint.checkpoint import fingerprint
from inflight.config import EngineConfig
from inflight.constraints.compiler import GrammarCompiler
from inflight.engine.client import ModelFacts
from inflight.engine.core import EngineCore
from inflight.engine.runner import Runner
from inflight.errors import ConfigError
from inflight.execution import platforms
from inflight.execution.parallel.starting import rank_shard, stage_links, start_ranks
from inflight.execution.platforms import Platform
from inflight.frontend.chat import check_parsers
from inflight.frontend.frontend import Frontend
from inflight.frontend.input_processor import InputProcessor, vocabulary_of
from inflight.kv.budget import fit_context
from inflight.kv.layout import KVLayout
from inflight.loading.checkpoint import (
    ModelPlan,
    OpenModel,
    check_kv_cache_dtype,
    default_sampling,
    resolve_dtype,
    resolve_length,
)
from inflight.loading.engine import (
    LoadedEngine,
    LoadProgress,
    decoder_core,
    encoder_core,
    kv_layout,
    policy_of,
)
from inflight.models.decoders.decoder import Decoder
from inflight.models.decoders.footprint import default_rows
from inflight.models.decoders.spec import DecoderSpec, whole_shard
from inflight.models.decoders.weights import load_decoder
from inflight.models.encoders.encoder import load_encoder
from inflight.models.encoders.families import encoder_head, encoder_spec
from inflight.models.head_config import declared_length, read_sentence_files
from inflight.scheduling.policy import Policy

if TYPE_CHECKING:
    from inflight.execution.parallel.layout import RankMemory
    from inflight.execution.parallel.messages import Begin
    from inflight.execution.parallel.rank_processes import RankProcesses
    from inflight.execution.parallel.runner import LoadedRank

logger = logging.getLogger(__name__)

# The default limit for the tokens of a text: rotary tables and steps are sized by it, and a config may claim anything.
MAX_DEFAULT_TEXT = 1 << 16


def load_decoder_engine(
    model: OpenModel, policy: Policy, platform: Platform, progress: LoadProgress | None
) -> LoadedEngine:
    config, tokenizer = model.config, model.tokenizer
    check_kv_cache_dtype(config.cache.kv_cache_dtype, platform.defaults.kv_cache_dtypes, platform.device.type)
    plan = model.plan()
    config = _with_rows(config, plan.spec, platform)
    recommended = default_sampling(model.checkpoint.generation_config)
    eos, vocab_size = model.eos_token_ids, plan.spec.vocab_size
    with ExitStack() as undo:
        shared = _SharedProgress(progress)
        ranks = start_ranks(config, platform, plan.spec, plan.context, plan.dtype, shared.repeat)
        if ranks is not None:
            shared.ranks = ranks
            undo.callback(ranks.close)
        memory = None if ranks is None else ranks.memory
        decoder = fill_decoder(model, platform, plan, memory, shared)
        num_blocks = _num_blocks(config, platform, decoder, plan.context, ranks)
        max_model_len = _max_model_len(config, platform, kv_layout(config, decoder, ranks), num_blocks, plan)
        grammars = grammar_compiler(model, platform, vocab_size)
        build = partial(decoder_core, platform, decoder, ranks, num_blocks, max_model_len, grammars)
        inputs = InputProcessor.create(tokenizer, vocab_size, max_model_len, eos, config.model.seed, grammars)
        generates, pooling = decoder.generates, plan.decoder.pooling
        frontend = Frontend(config, tokenizer, inputs, recommended, generates=generates, pooling=pooling)
        loaded = LoadedEngine(config, frontend, platform, build(config, policy), decoder, build)
        if ranks is not None:  # they end with the model, even if the engine is never closed
            loaded.end_ranks = weakref.finalize(decoder, ranks.close)
        undo.pop_all()
    return loaded


def _num_blocks(
    config: EngineConfig, platform: Platform, decoder: Decoder, context: int, ranks: RankProcesses | None
) -> int:
    """Return how many KV blocks each rank has room for, once all have loaded their weights."""
    if ranks is None:
        return platform.num_blocks(config, decoder, context)
    if platform.device.type == "cpu":
        ranks.wait_until_loaded()  # the remaining memory is for KV; on GPUs, all ranks profile their largest step
    num_blocks = platform.num_blocks(config, decoder, context)
    least = ranks.wait_until_loaded()
    return num_blocks if least is None else min(num_blocks, least)


def _max_model_len(
    config: EngineConfig, platform: Platform, layout: KVLayout, num_blocks: int, plan: ModelPlan
) -> int:
    """Return the longest context that fits into the KV cache, at most that of the plan."""
    limits = config.scheduler
    chunk = limits.max_num_batched_tokens or platform.defaults.max_num_batched_tokens
    longest = fit_context(
        num_blocks, layout, chunk, limits.max_kv_tokens, plan.context, config.model.max_model_len
    )
    if longest < plan.context:
        logger.warning(
            "the KV cache holds %d tokens: max_model_len is reduced from %d", longest, plan.context
        )
    logger.info(
        "%s; %d KV blocks of %d tokens; %s", platform.describe(), num_blocks, layout.block_size, layout
    )
    return longest


def grammar_compiler(model: OpenModel, platform: Platform, vocab_size: int) -> GrammarCompiler:
    vocabulary = partial(vocabulary_of, model.tokenizer, vocab_size, model.eos_token_ids)
    return GrammarCompiler(vocabulary, native=platform.device.type == "cuda")


def _with_rows(config: EngineConfig, spec: DecoderSpec, platform: Platform) -> EngineConfig:
    """Set the number of rows unless it is configured."""
    options = config.scheduler
    max_num_seqs = options.max_num_seqs or default_rows(spec, platform.defaults.max_num_seqs)
    return replace(config, scheduler=replace(options, max_num_seqs=max_num_seqs))


class _SharedProgress:
    """The first rank's progress, reported again whenever another rank makes progress. An engine must not be given up
    while its first rank waits for one that is still loading, nor a rank while it waits for the first."""

    def __init__(self, progress: LoadProgress | None) -> None:
        self.ranks: RankProcesses | None = None
        self._progress = progress
        self._last = 0, 0

    def __call__(self, num_done: int, num_total: int) -> None:
        self._last = num_done, num_total
        if self.ranks is not None:
            self.ranks.note_progress()
        self.repeat()

    def repeat(self) -> None:
        if self._progress is not None:
            self._progress(*self._last)


def fill_decoder(
    model: OpenModel,
    platform: Platform,
    plan: ModelPlan,
    memory: RankMemory | None = None,
    progress: LoadProgress | None = None,
) -> Decoder:
    """Return the decoder with its weights; with `memory`, the shard of the calling rank."""
    shard = whole_shard(plan.spec) if memory is None else rank_shard(plan.spec, memory, platform)
    decoder = load_decoder(
        model.checkpoint,
        *platform.kernels_and_attention(plan.dtype),
        plan.dtype,
        platform.device,
        progress=progress,
        load_format=model.config.model.load_format,
        seed=model.config.model.seed,
        max_position=plan.context,
        shard=shard,
        draft=plan.draft,
    )
    if shard.is_last:
        plan.decoder.complete(decoder)
    return decoder


def load_rank(config: EngineConfig, memory: RankMemory, progress: LoadProgress | None = None) -> LoadedRank:
    """Load the part of a model that belongs to a rank in its own process: see `execution/parallel/worker.py`."""
    from inflight.execution.parallel.runner import LoadedRank

    model, platform = OpenModel.open(config), platforms.platform(config.model.device)
    plan = model.plan()
    grammars = grammar_compiler(model, platform, plan.spec.vocab_size)
    config = _with_rows(config, plan.spec, platform)
    decoder = fill_decoder(model, platform, plan, memory, progress)
    if decoder.generates and decoder.shard.is_last:
        grammars.warm_up()  # otherwise all ranks would wait for this one at the first constraint

    def make_runner(begin: Begin) -> Runner[Any]:
        # Ranks must pad steps alike, even if the first rank's limits changed after loading.
        limits = replace(
            config.scheduler, max_num_seqs=begin.max_rows, max_num_batched_tokens=begin.max_tokens
        )
        limited = replace(config, scheduler=limits)
        links = stage_links(memory, decoder)
        return platform.runner(limited, decoder, begin.num_blocks, begin.max_len, grammars, links)

    if platform.device.type == "cpu":  # ranks share the memory of their machine
        return LoadedRank(make_runner)
    return LoadedRank(make_runner, platform.num_blocks(config, decoder, plan.context))


def load_encoder_engine(
    opened: OpenModel, policy: Policy, platform: Platform, progress: LoadProgress | None
) -> LoadedEngine:
    config, checkpoint, model = opened.config, opened.checkpoint, opened.config.model
    folder = checkpoint.folder
    if config.parallel.num_ranks > 1:
        raise ConfigError(f"{config.parallel}: an encoder runs on one rank")
    if model.quantization is not None:
        raise ConfigError(f"quantization is {model.quantization!r}: encoders are not quantized")
    spec = encoder_spec(checkpoint.config)
    files = None if folder is None else read_sentence_files(folder)
    head = encoder_head(checkpoint.config, files, spec.hidden_size)
    declared = (None if files is None else files.max_length, declared_length(folder))
    default = min(
        [spec.max_position, MAX_DEFAULT_TEXT, *(length for length in declared if length is not None)]
    )
    max_model_len = resolve_length(spec.max_position, default, model.max_model_len)
    dtype = resolve_dtype(model.dtype, checkpoint.config)
    kernels = platform.encoder_kernels(spec, dtype)
    encoder = load_encoder(
        checkpoint,
        spec,
        head,
        kernels.layers,
        kernels.attention,
        kernels.head,
        dtype,
        platform.device,
        max_position=max_model_len,
        load_format=model.load_format,
        seed=model.seed,
        progress=progress,
    )
    logger.info("%s; texts of up to %d tokens", platform.describe(), max_model_len)
    build = partial(encoder_core, platform, encoder, max_model_len)
    inputs = InputProcessor.create(opened.tokenizer, spec.vocab_size, max_model_len, (), model.seed)
    frontend = Frontend(config, opened.tokenizer, inputs, {}, generates=False, pooling=head.facts)
    return LoadedEngine(config, frontend, platform, build(config, policy), encoder, build)


def load_engine(config: EngineConfig, progress: LoadProgress | None = None) -> LoadedEngine:
    """Open the checkpoint, load the weights, size the KV cache and build the engine."""
    model = config.model
    policy = policy_of(config.scheduler)  # first: a wrong name should not take minutes to be reported
    check_parsers(model)
    platform = platforms.platform(model.device)
    opened = OpenModel.open(config)
    other = opened.tokenizer.folder if opened.tokenizer is not None and model.tokenizer else None
    model_fingerprint = fingerprint(opened.checkpoint, other, model)
    load = load_encoder_engine if opened.is_encoder else load_decoder_engine
    loaded = load(opened, policy, platform, progress)
    loaded.fingerprint = model_fingerprint
    return loaded


def load_core(config: EngineConfig, progress: LoadProgress) -> tuple[EngineCore, ModelFacts]:
    """Load the half of an engine that runs in its own process: see `engine/remote/worker.py`."""
    loaded = load_engine(config, progress)
    compiler = loaded.frontend.input_processor.grammars.compiler
    if compiler is not None:
        compiler.warm_up()
    return loaded.core, loaded.facts
