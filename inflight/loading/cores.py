"""A scheduler and a runner over a model: the core of an engine."""

from __future__ import annotations

import sys
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from inflight.config import EngineConfig, SchedulerConfig
from inflight.constraints import Grammar, GrammarCompiler
from inflight.engine import EngineCore
from inflight.errors import ConfigError
from inflight.execution.parallel.starting import parallel_core, stage_links
from inflight.execution.platforms import Platform
from inflight.execution.sleep import ModelSleepSupport
from inflight.kv import BlockManager, ChainHashCache, NoPrefixCache
from inflight.models.decoder import Decoder
from inflight.models.encoder import PoolingEncoder
from inflight.request import Request
from inflight.scheduling import HEADROOM, Limits, Policy, Scheduler, TimedTokenBudget, make_policy

if TYPE_CHECKING:
    from inflight.execution.parallel.rank_processes import RankProcesses


def decoder_core(
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
        sleep_support = ModelSleepSupport(decoder, place.device, make_runner)
        return EngineCore(
            scheduler, make_runner(), depth, options.max_queue, prepare=prepare, sleep_support=sleep_support
        )
    sizes = num_blocks, max_model_len
    return parallel_core(ranks, scheduler, decoder, make_runner, *sizes, depth, options.max_queue)


def _compiled_grammar(grammars: GrammarCompiler, request: Request) -> Future[Grammar] | None:
    """On its way, where the request needs one that is not there yet."""
    asked = request.params.structured_outputs
    if asked is None or grammars.is_compiled(asked):
        return None
    return grammars.begin(asked, request.tenant)


def encoder_core(
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
    sleep_support = ModelSleepSupport(encoder, place.device, make_runner)
    return EngineCore(scheduler, make_runner(), depth, options.max_queue, sleep_support=sleep_support)


def _limits(options: SchedulerConfig, place: Platform, max_num_batched_tokens: int) -> Limits:
    return Limits(
        max_num_seqs=options.max_num_seqs or place.max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        # Unless asked for, no limit but the blocks themselves: tokens of a shared prefix are resident in every
        # request that has it, and there may be many more of them than places.
        max_kv_tokens=options.max_kv_tokens or sys.maxsize,
    )


def policy_of(options: SchedulerConfig) -> Policy:
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
