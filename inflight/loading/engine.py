"""Build the engine core, a scheduler and a runner, over a loaded model; `LoadedEngine` can rebuild it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from inflight.config import EngineConfig, SchedulerConfig, SpeculationConfig
from inflight.constraints.compiler import Grammar, GrammarCompiler
from inflight.constraints.drafts import GrammarDrafts
from inflight.engine.client import ModelFacts
from inflight.engine.core import EngineCore
from inflight.engine.runner import Runner, asleep
from inflight.errors import ConfigError, EngineError
from inflight.execution.parallel.starting import begin_ranks, stage_links
from inflight.execution.platforms import (
    MODEL_DRAFTS,
    ModelSleepSupport,
    Platform,
    expert_counts,
    max_samples,
)
from inflight.frontend.frontend import Frontend
from inflight.kv.block_manager import BlockManager
from inflight.kv.layout import KVLayout
from inflight.kv.prefix_cache import ChainHashCache, PrefixCache
from inflight.loading.checkpoint import model_name
from inflight.models.decoders.decoder import Decoder
from inflight.models.decoders.footprint import common_layout
from inflight.models.encoders.encoder import PoolingEncoder
from inflight.request import Request
from inflight.scheduling.drafts import AdaptiveSpeculation, Drafter
from inflight.scheduling.lookup import Lookup, Predictions
from inflight.scheduling.model_drafts import ModelDrafter, ModelSpeculation
from inflight.scheduling.policy import HEADROOM, Policy, TimedTokenBudget, make_policy
from inflight.scheduling.request_pool import Limits
from inflight.scheduling.scheduler import NoSpeculation, Scheduler, Speculation

if TYPE_CHECKING:
    from inflight.execution.parallel.rank_processes import RankProcesses

LOOKUP_DRAFTS = 16  # of a request in a step, unless configured
MODEL_METHODS = ("mtp", "eagle3", "draft_model")


def decoder_core(
    platform: Platform,
    decoder: Decoder,
    ranks: RankProcesses | None,
    num_blocks: int,
    max_model_len: int,
    grammars: GrammarCompiler,
    config: EngineConfig,
    policy: Policy,
) -> EngineCore:
    """Build the core of a decoder, whose other ranks have loaded their parts."""
    options = config.scheduler
    limits = _limits(
        options, platform, options.max_num_batched_tokens or platform.defaults.max_num_batched_tokens
    )
    limits = replace(limits, num_stages=config.parallel.pipeline_parallel_size)
    layout = kv_layout(config, decoder, ranks)
    cache = ChainHashCache(layout) if config.cache.enable_prefix_caching else PrefixCache()
    target = platform.defaults.target_step_ms if options.target_step_ms is None else options.target_step_ms
    max_tokens = limits.max_num_batched_tokens
    token_budget = (
        TimedTokenBudget(max_tokens, target / 1000, platform.step_sizes(max_tokens)) if target else None
    )
    if options.speculative_config is not None and limits.num_stages > 1:
        raise ConfigError("speculative_config is set: so far, it works only without pipeline stages")
    predictor = decoder.predictor
    read_ahead = None if predictor is None else int(predictor.reads_tokens)
    speculation = make_speculation(options, grammars, read_ahead)
    blocks = BlockManager(num_blocks, layout, cache)
    scheduler = Scheduler(limits, policy, blocks, token_budget, speculation)
    links = None if ranks is None else stage_links(ranks.memory, decoder)
    make_runner: Callable[[], Runner[Any]]
    make_runner = partial(platform.runner, config, decoder, num_blocks, max_model_len, grammars, links)
    depth = options.pipeline_depth or platform.defaults.pipeline_depth
    extras: dict[str, Any] = {"prepare": partial(_compiled_grammar, grammars)}
    if ranks is not None:
        from inflight.execution.parallel.messages import Begin

        begin = Begin(num_blocks, limits.max_num_seqs, max_model_len, max_tokens)
        make_runner = partial(begin_ranks, ranks, decoder, begin, make_runner)
        depth = depth if limits.num_stages == 1 else limits.num_stages
        extras = {"check": ranks.check}
    # On GPUs, the weights of other ranks would have to move as well.
    if ranks is None or platform.device.type == "cpu":
        extras["sleep_support"] = ModelSleepSupport(decoder, platform.device, make_runner)
    runner, experts = make_runner(), expert_counts(decoder)
    return EngineCore(scheduler, runner, depth, options.max_queue, expert_counts=experts, **extras)


def make_speculation(
    options: SchedulerConfig, grammars: GrammarCompiler, read_ahead: int | None = None
) -> Speculation:
    """Return what `speculative_config` asks for. `read_ahead`: how many sampled tokens a model reads before it guesses
    others; None: none guesses."""
    if options.speculative_config is None:
        return NoSpeculation()
    config = SpeculationConfig.from_options(options.speculative_config)
    if config.method in MODEL_METHODS and read_ahead is None:
        raise ConfigError(
            f"speculative_config: method is {config.method}, but the model was loaded without a layer that predicts "
            "further tokens"
        )
    constraints = GrammarDrafts(grammars)
    predictions = None if config.method == "grammar" else Predictions(config)
    if read_ahead is not None and config.method in ("auto", *MODEL_METHODS):
        most = config.num_speculative_tokens or MODEL_DRAFTS
        return ModelSpeculation(ModelDrafter(), most, [constraints], constraints, predictions, read_ahead)
    drafters: list[Drafter] = [constraints, *([] if config.method == "grammar" else [Lookup(config)])]
    most = config.num_speculative_tokens or LOOKUP_DRAFTS
    return AdaptiveSpeculation(drafters, most, constraints, predictions)


def kv_layout(config: EngineConfig, decoder: Decoder, ranks: RankProcesses | None) -> KVLayout:
    """Return the layout of the memory that all ranks of a model share."""
    if ranks is None:
        return decoder.kv_shape(config.cache.block_size).layout
    return common_layout(ranks.shares)


def _compiled_grammar(grammars: GrammarCompiler, request: Request) -> Future[Grammar] | None:
    """Start to compile the request's grammar, if it needs one that is not compiled yet."""
    constraint = request.params.structured_outputs
    if constraint is None or grammars.is_compiled(constraint):
        return None
    return grammars.begin(constraint, request.tenant)


def encoder_core(
    platform: Platform, encoder: PoolingEncoder, max_model_len: int, config: EngineConfig, policy: Policy
) -> EngineCore:
    """Build the core of an encoder. It keeps nothing between steps, so each text gets one block without memory behind
    it, and there are spare blocks for the headroom that policies keep free."""
    options = config.scheduler
    max_tokens = options.max_num_batched_tokens or max(platform.defaults.max_text_tokens, max_model_len)
    if max_tokens < max_model_len:
        raise ConfigError(
            f"max_num_batched_tokens is {max_tokens}: an encoder computes a text in one step, so it must be at least "
            f"max_model_len, {max_model_len}"
        )
    limits = _limits(options, platform, max_tokens)
    num_spare = -(-HEADROOM * limits.max_num_seqs // max_model_len) + 1
    blocks = BlockManager(limits.max_num_seqs + num_spare, KVLayout(max_model_len), PrefixCache())
    scheduler = Scheduler(limits, policy, blocks)
    make_runner = partial(platform.encoder_runner, config, encoder, limits)
    depth = options.pipeline_depth or platform.defaults.pipeline_depth
    sleep_support = ModelSleepSupport(encoder, platform.device, make_runner)
    return EngineCore(scheduler, make_runner(), depth, options.max_queue, sleep_support=sleep_support)


def _limits(options: SchedulerConfig, platform: Platform, max_num_batched_tokens: int) -> Limits:
    return Limits(
        max_num_seqs=options.max_num_seqs or platform.defaults.max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        # By default the blocks are the only limit: tokens of a shared prefix count once per request that has it, so
        # there may be many more of them than slots.
        max_kv_tokens=options.max_kv_tokens or sys.maxsize,
        max_samples=max_samples(options, platform.defaults) or sys.maxsize,
    )


def policy_of(options: SchedulerConfig) -> Policy:
    choice = options.policy
    try:
        policy = make_policy(choice)
    except ConfigError:
        raise
    except Exception as error:  # a user's class can raise anything
        raise ConfigError(
            f"policy {choice!r} could not be created without arguments: {type(error).__name__}: {error}"
        ) from error
    if options.tenant_weights:
        policy.set_weights(options.tenant_weights)
    return policy


BuildCore = Callable[[EngineConfig, Policy], EngineCore]
LoadProgress = Callable[[int, int], None]  # (bytes done, total bytes)


@dataclass
class LoadedEngine:
    """An engine in this process, with its model, its frontend and everything to rebuild it."""

    config: EngineConfig
    frontend: Frontend
    platform: Platform
    core: EngineCore
    model: Decoder | PoolingEncoder
    build_core: BuildCore
    end_ranks: Callable[[], object] | None = None  # of a model on several ranks
    fingerprint: str = ""  # of the checkpoint (`checkpoint/checkpoint.py`)

    @property
    def facts(self) -> ModelFacts:
        """The facts about the model that clients need without holding the weights."""
        frontend, tokenizer = self.frontend, self.frontend.tokenizer
        folder = None if tokenizer is None else tokenizer.folder
        limits, blocks = self.core.scheduler.limits, self.core.scheduler.blocks
        return ModelFacts(
            model=model_name(self.config),
            vocab_size=frontend.input_processor.vocab_size,
            max_model_len=frontend.max_model_len,
            eos_token_ids=frontend.input_processor.eos_token_ids,
            default_params=frontend.default_params,
            tokenizer_folder=None if folder is None else str(folder.absolute()),
            device=self.platform.describe(),
            dtype=str(self.model.dtype).removeprefix("torch."),
            num_blocks=blocks.pool.num_blocks,
            block_size=blocks.block_size,
            windows=blocks.layout.windows,
            snapshot_blocks=blocks.layout.snapshot_blocks,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            generates=frontend.generates,
            pooling=frontend.pooling,
            fingerprint=self.fingerprint,
        )

    def use(self, **scheduler_options: Any) -> EngineCore:
        """Rebuild the engine core over the same weights with another policy or other limits. The engine must be idle;
        the old core's memory is released first."""
        if self.core.is_sleeping:
            raise asleep()
        if self.core.has_work:
            raise EngineError(
                "the engine has requests: its scheduler options can only be changed while it is idle"
            )
        config = replace(self.config, scheduler=replace(self.config.scheduler, **scheduler_options))
        policy = policy_of(config.scheduler)
        self.core.close()
        self.config = config
        self.core = self.build_core(config, policy)
        return self.core

    def close(self) -> None:
        """Release memory and the processes that render templates and validate grammars."""
        try:
            self.core.close()
        finally:
            if self.end_ranks is not None:
                self.end_ranks()
            self.frontend.close()
