"""From a configuration to an engine that is ready to step."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inflight.config import EngineConfig, SchedulerConfig
from inflight.constraints import Grammar, GrammarCompiler
from inflight.engine import EngineCore, ModelFacts
from inflight.engine.runner import Runner
from inflight.engine.sleep import asleep
from inflight.errors import ConfigError, EngineError, ModelError
from inflight.execution.dormancy import ModelDormancy
from inflight.execution.parallel.starting import parallel_core, rank_shard, stage_links, start_ranks
from inflight.execution.platforms import Platform, platform
from inflight.frontend import Frontend, InputProcessor
from inflight.frontend.chat_formats import check_parsers
from inflight.frontend.vocabulary import vocabulary_of
from inflight.kv import BlockManager, ChainHashCache, NoPrefixCache
from inflight.kv.budget import fit_context
from inflight.models.builtin import checkpoint_folder
from inflight.models.checkpoint import Checkpoint, open_checkpoint
from inflight.models.decoder import Decoder
from inflight.models.decoder_heads import DecoderPlan, Encode, plan_decoder
from inflight.models.defaults import (
    default_sampling,
    eos_token_ids,
    resolve_context,
    resolve_dtype,
    resolve_text_length,
)
from inflight.models.encoder import PoolingEncoder
from inflight.models.encoder_families import encoder_architecture, encoder_head, encoder_spec
from inflight.models.encoder_weights import load_encoder
from inflight.models.sentence_files import declared_length, read_sentence_files
from inflight.models.shard import whole_shard
from inflight.models.weights import load_decoder
from inflight.request import Request
from inflight.scheduling import HEADROOM, Limits, Policy, Scheduler, TimedTokenBudget, make_policy
from inflight.text import Tokenizer

if TYPE_CHECKING:
    from inflight.execution.parallel.follower import LoadedRank
    from inflight.execution.parallel.layout import RankMemory
    from inflight.execution.parallel.messages import Begin
    from inflight.execution.parallel.rank_processes import RankProcesses

logger = logging.getLogger(__name__)

BuildCore = Callable[[EngineConfig, Policy], EngineCore]
LoadProgress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass
class LoadedEngine(Frontend):
    """An engine and what belongs to its model."""

    platform: Platform
    core: EngineCore
    model: Decoder | PoolingEncoder
    build_core: BuildCore
    end_ranks: Callable[[], object] | None = None  # of a model on several ranks

    @property
    def facts(self) -> ModelFacts:
        """What is to be known without holding the weights."""
        folder = None if self.tokenizer is None else self.tokenizer.folder
        limits, blocks = self.core.scheduler.limits, self.core.scheduler.blocks
        return ModelFacts(
            model=_model(self.config),
            vocab_size=self.input_processor.vocab_size,
            max_model_len=self.max_model_len,
            eos_token_ids=self.input_processor.eos_token_ids,
            default_params=self.default_params,
            tokenizer_folder=None if folder is None else str(folder.absolute()),
            device=self.platform.describe(),
            dtype=str(self.model.dtype).removeprefix("torch."),
            num_blocks=blocks.pool.num_blocks,
            block_size=blocks.block_size,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            generates=self.generates,
            pooling=self.pooling,
        )

    def use(self, **scheduler_options: Any) -> EngineCore:
        """Put another engine over the same weights and KV memory in place of this one, which must be idle: another
        policy, other limits. The memory of the one before is given back first."""
        if self.core.is_sleeping:
            raise asleep()
        if self.core.has_work:
            raise EngineError("the engine has requests: another one can take its place only when it is idle")
        config = replace(self.config, scheduler=replace(self.config.scheduler, **scheduler_options))
        policy = _policy(config.scheduler)
        self.core.close()
        self.config = config
        self.core = self.build_core(config, policy)
        return self.core

    def close(self) -> None:
        """Give back memory and the processes that render templates and try grammars."""
        try:
            self.core.close()
        finally:
            if self.end_ranks is not None:
                self.end_ranks()
            super().close()


def load_engine(config: EngineConfig, progress: LoadProgress | None = None) -> LoadedEngine:
    """Open the checkpoint, load the weights, size the KV memory and put the engine together."""
    model = config.model
    policy = _policy(config.scheduler)  # first of all: a wrong name should not take minutes to show
    check_parsers(model)
    place = platform(model.device)
    checkpoint = _open(config, model.load_format)
    tokenizer = _load_tokenizer(config, checkpoint)
    load = _load_decoder if encoder_architecture(checkpoint.config) is None else _load_encoder
    return load(config, policy, place, checkpoint, tokenizer, progress)


def _load_decoder(
    config: EngineConfig,
    policy: Policy,
    place: Platform,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer | None,
    progress: LoadProgress | None,
) -> LoadedEngine:
    model = config.model
    plan = plan_decoder(_model(config), checkpoint, _plain_ids(tokenizer))
    spec = plan.spec
    recommended = default_sampling(checkpoint.generation_config)
    eos = _eos(checkpoint, tokenizer)
    context = resolve_context(spec, model.max_model_len)
    with ExitStack() as undo:
        dtype = resolve_dtype(model.dtype, checkpoint.config)
        ranks = start_ranks(config, place, spec, context, dtype)
        if ranks is not None:
            undo.callback(ranks.close)
        memory = None if ranks is None else ranks.memory
        decoder = _fill_decoder(config, place, checkpoint, plan, context, memory, progress)
        if ranks is not None and place.device.type == "cpu":
            ranks.wait_until_loaded()  # what is left then is for KV; on GPUs all ranks try their largest steps now
        num_blocks = place.num_blocks(config, decoder, context)
        if ranks is not None:
            theirs = ranks.wait_until_loaded()
            num_blocks = min(num_blocks, num_blocks if theirs is None else theirs)
        limits = config.scheduler
        max_model_len = fit_context(
            num_blocks, config.cache.block_size, limits.max_kv_tokens, context, model.max_model_len
        )
        if max_model_len < context:
            logger.warning(
                "the KV memory holds %d tokens: max_model_len is cut from %d", max_model_len, context
            )
        logger.info("%s; %d KV blocks of %d tokens", place.describe(), num_blocks, config.cache.block_size)
        grammars = GrammarCompiler(partial(vocabulary_of, tokenizer, spec.vocab_size, eos))
        input_processor = InputProcessor.create(
            tokenizer, spec.vocab_size, max_model_len, eos, model.seed, grammars
        )
        build = partial(_decoder_core, place, decoder, ranks, num_blocks, max_model_len, grammars)
        core = build(config, policy)
        loaded = LoadedEngine(
            config,
            tokenizer,
            input_processor,
            recommended,
            place,
            core,
            decoder,
            build,
            generates=decoder.generates,
            pooling=plan.pooling,
        )
        if ranks is not None:  # they end with the model, also where nobody closes the engine
            loaded.end_ranks = weakref.finalize(decoder, ranks.close)
        undo.pop_all()
    return loaded


def _fill_decoder(
    config: EngineConfig,
    place: Platform,
    checkpoint: Checkpoint,
    plan: DecoderPlan,
    context: int,
    memory: RankMemory | None,
    progress: LoadProgress | None,
) -> Decoder:
    """The decoder, or with `memory` the part of it that belongs to the rank that sees it, with its weights."""
    model = config.model
    shard = whole_shard(plan.spec) if memory is None else rank_shard(plan.spec, memory, place)
    dtype = resolve_dtype(model.dtype, checkpoint.config)
    decoder = load_decoder(
        checkpoint,
        *place.kernels_and_attention(shard.spec, dtype),
        dtype,
        place.device,
        progress=progress,
        load_format=model.load_format,
        seed=model.seed,
        max_position=context,
        spec=plan.spec,
        shard=shard,
    )
    if shard.is_last:
        plan.complete(decoder)
    return decoder


def load_rank(config: EngineConfig, memory: RankMemory) -> LoadedRank:
    """The part of a model that a rank in a process of its own holds: see `execution/parallel/worker.py`."""
    from inflight.execution.parallel.follower import LoadedRank

    model = config.model
    checkpoint = _open(config, model.load_format)
    tokenizer = _load_tokenizer(config, checkpoint)
    plan = plan_decoder(_model(config), checkpoint, _plain_ids(tokenizer))
    context = resolve_context(plan.spec, model.max_model_len)
    eos = _eos(checkpoint, tokenizer)
    grammars = GrammarCompiler(partial(vocabulary_of, tokenizer, plan.spec.vocab_size, eos))
    place = platform(model.device)
    decoder = _fill_decoder(config, place, checkpoint, plan, context, memory, None)
    if place.device.type == "cpu":
        return LoadedRank(decoder, grammars)

    def make_runner(begin: Begin) -> Runner[Any]:
        # Ranks round steps alike, also when the first has got other limits since it was loaded.
        limits = replace(
            config.scheduler, max_num_seqs=begin.max_rows, max_num_batched_tokens=begin.max_tokens
        )
        limited = replace(config, scheduler=limits)
        links = stage_links(memory, decoder)
        return place.runner(limited, decoder, begin.num_blocks, begin.max_len, grammars, links)

    num_blocks = place.num_blocks(config, decoder, context)
    return LoadedRank(decoder, grammars, num_blocks, make_runner)


def _load_encoder(
    config: EngineConfig,
    policy: Policy,
    place: Platform,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer | None,
    progress: LoadProgress | None,
) -> LoadedEngine:
    model, folder = config.model, checkpoint.folder
    if config.parallel.num_ranks > 1:
        raise ConfigError(f"{config.parallel}: an encoder has one rank")
    spec = encoder_spec(checkpoint.config)
    files = None if folder is None else read_sentence_files(folder)
    head = encoder_head(checkpoint.config, files, spec.hidden_size)
    declared = (None if files is None else files.max_length, declared_length(folder))
    max_model_len = resolve_text_length(spec.max_position, declared, model.max_model_len)
    dtype = resolve_dtype(model.dtype, checkpoint.config)
    kernels = place.encoder_kernels(spec, dtype)
    encoder = load_encoder(
        checkpoint,
        spec,
        head,
        kernels.layers,
        kernels.attention,
        kernels.head,
        dtype,
        place.device,
        max_position=max_model_len,
        load_format=model.load_format,
        seed=model.seed,
        progress=progress,
    )
    logger.info("%s; texts of up to %d tokens", place.describe(), max_model_len)
    build = partial(_encoder_core, place, encoder, max_model_len)
    input_processor = InputProcessor.create(tokenizer, spec.vocab_size, max_model_len, (), model.seed)
    core = build(config, policy)
    return LoadedEngine(
        config,
        tokenizer,
        input_processor,
        {},
        place,
        core,
        encoder,
        build,
        generates=False,
        pooling=head.facts,
    )


def load_core(config: EngineConfig, progress: LoadProgress) -> tuple[EngineCore, ModelFacts]:
    """The half of an engine that runs in a process of its own: see `engine/worker.py`."""
    loaded = load_engine(config, progress)
    compiler = loaded.input_processor.grammars.compiler
    if compiler is not None:
        compiler.warm_up()
    return loaded.core, loaded.facts


def open_model(config: EngineConfig) -> tuple[Checkpoint, str]:
    """The checkpoint without its weights, which need not be there, and what it is called."""
    return _open(config, "dummy"), _model(config)


def _open(config: EngineConfig, load_format: str) -> Checkpoint:
    model = config.model
    return open_checkpoint(_model(config), model.revision, load_format, model.hf_config, model.download_dir)


def _model(config: EngineConfig) -> str:
    return str(checkpoint_folder()) if config.model.model is None else config.model.model


def _load_tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> Tokenizer | None:
    model = config.model
    if model.skip_tokenizer_init:
        return None
    if model.tokenizer is not None:
        other = open_checkpoint(model.tokenizer, load_format="dummy", download_dir=model.download_dir)
        folder: Path | None = other.folder
    else:
        folder = checkpoint.folder
    if folder is None:
        return None
    try:
        return Tokenizer.load(folder, model.chat_template)
    except ModelError:
        if model.load_format == "dummy" and model.tokenizer is None:
            return None  # a config alone is enough for random weights
        raise


def _eos(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    eos = eos_token_ids(checkpoint.config, checkpoint.generation_config)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        eos = tuple(dict.fromkeys((*eos, tokenizer.eos_token_id)))
    return eos


def _plain_ids(tokenizer: Tokenizer | None) -> Encode | None:
    return None if tokenizer is None else partial(tokenizer.encode, add_special_tokens=False)


def _policy(options: SchedulerConfig) -> Policy:
    choice = options.policy
    try:
        policy = make_policy(choice)
    except ConfigError:
        raise
    except Exception as error:  # a user's class can raise anything
        raise ConfigError(
            f"policy {choice!r} could not be made without arguments: {type(error).__name__}: {error}"
        ) from error
    if options.tenant_weights:
        policy.set_weights(options.tenant_weights)
    return policy


def _decoder_core(
    place: Platform,
    decoder: Decoder,
    ranks: RankProcesses | None,
    num_blocks: int,
    max_model_len: int,
    grammars: GrammarCompiler,
    config: EngineConfig,
    policy: Policy,
) -> EngineCore:
    options, block_size = config.scheduler, config.cache.block_size
    limits = _limits(options, place, options.max_num_batched_tokens or place.max_num_batched_tokens)
    limits = replace(limits, num_stages=config.parallel.pipeline_parallel_size)
    cache = ChainHashCache(block_size) if config.cache.enable_prefix_caching else NoPrefixCache()
    target = place.target_step_ms if options.target_step_ms is None else options.target_step_ms
    max_tokens = limits.max_num_batched_tokens
    token_budget = (
        TimedTokenBudget(max_tokens, target / 1000, place.step_sizes(max_tokens)) if target else None
    )
    scheduler = Scheduler(limits, policy, BlockManager(num_blocks, block_size, cache), token_budget)
    depth = options.pipeline_depth or place.pipeline_depth
    links = None if ranks is None else stage_links(ranks.memory, decoder)
    make_runner = partial(place.runner, config, decoder, num_blocks, max_model_len, grammars, links)
    if ranks is None:
        prepare = partial(_compiled_grammar, grammars)
        dormancy = ModelDormancy(decoder, place.device, make_runner)
        return EngineCore(
            scheduler, make_runner(), depth, options.max_queue, prepare=prepare, dormancy=dormancy
        )
    sizes = num_blocks, max_model_len
    return parallel_core(ranks, scheduler, decoder, make_runner, *sizes, depth, options.max_queue)


def _compiled_grammar(grammars: GrammarCompiler, request: Request) -> Future[Grammar] | None:
    """On its way, where the request needs one that is not there yet."""
    asked = request.params.structured_outputs
    if asked is None or grammars.is_compiled(asked):
        return None
    return grammars.begin(asked)


def _encoder_core(
    place: Platform, encoder: PoolingEncoder, max_model_len: int, config: EngineConfig, policy: Policy
) -> EngineCore:
    """An encoder keeps nothing between steps. Its blocks are one for each text, with no memory behind them, and enough
    for what policies keep free besides."""
    options = config.scheduler
    max_tokens = options.max_num_batched_tokens or max(place.max_text_tokens, max_model_len)
    if max_tokens < max_model_len:
        raise ConfigError(
            f"max_num_batched_tokens is {max_tokens}: an encoder computes a text in one step, so it must be at least "
            f"max_model_len, {max_model_len}"
        )
    limits = _limits(options, place, max_tokens)
    num_spare = -(-HEADROOM * limits.max_num_seqs // max_model_len) + 1
    blocks = BlockManager(limits.max_num_seqs + num_spare, max_model_len, NoPrefixCache())
    scheduler = Scheduler(limits, policy, blocks)
    make_runner = partial(place.encoder_runner, config, encoder, limits)
    depth = options.pipeline_depth or place.pipeline_depth
    dormancy = ModelDormancy(encoder, place.device, make_runner)
    return EngineCore(scheduler, make_runner(), depth, options.max_queue, dormancy=dormancy)


def _limits(options: SchedulerConfig, place: Platform, max_num_batched_tokens: int) -> Limits:
    return Limits(
        max_num_seqs=options.max_num_seqs or place.max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        # Unless asked for, no limit but the blocks themselves: tokens of a shared prefix are resident in every
        # request that has it, and there may be many more of them than places.
        max_kv_tokens=options.max_kv_tokens or sys.maxsize,
    )
