"""Models that generate: a decoder, or the part of one that a rank holds, and an engine over it."""

from __future__ import annotations

import logging
import weakref
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from inflight.config import EngineConfig
from inflight.constraints import GrammarCompiler
from inflight.engine.runner import Runner
from inflight.execution.parallel.starting import rank_shard, stage_links, start_ranks
from inflight.execution.platforms import Platform, platform
from inflight.frontend import InputProcessor
from inflight.frontend.input_processor import vocabulary_of
from inflight.kv.budget import fit_context
from inflight.loading.cores import decoder_core
from inflight.loading.loaded_engine import LoadedEngine, LoadProgress
from inflight.loading.opened import eos_ids, load_tokenizer, model_name, open_configured, plain_ids
from inflight.models.checkpoint import Checkpoint
from inflight.models.decoder import Decoder
from inflight.models.decoder_heads import DecoderPlan, plan_decoder
from inflight.models.defaults import default_sampling, resolve_context, resolve_dtype
from inflight.models.shard import whole_shard
from inflight.models.weights import load_decoder
from inflight.scheduling import Policy
from inflight.text import Tokenizer

if TYPE_CHECKING:
    from inflight.execution.parallel.follower import LoadedRank
    from inflight.execution.parallel.layout import RankMemory
    from inflight.execution.parallel.messages import Begin
    from inflight.execution.parallel.rank_processes import RankProcesses

logger = logging.getLogger(__name__)


def load_decoder_engine(
    config: EngineConfig,
    policy: Policy,
    place: Platform,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer | None,
    progress: LoadProgress | None,
) -> LoadedEngine:
    model = config.model
    plan = plan_decoder(model_name(config), checkpoint, plain_ids(tokenizer))
    spec = plan.spec
    recommended = default_sampling(checkpoint.generation_config)
    eos = eos_ids(checkpoint, tokenizer)
    context = resolve_context(spec, model.max_model_len)
    with ExitStack() as undo:
        dtype = resolve_dtype(model.dtype, checkpoint.config)
        shared = _SharedProgress(progress)
        ranks = shared.ranks = start_ranks(config, place, spec, context, dtype, shared.repeat)
        if ranks is not None:
            undo.callback(ranks.close)
        memory = None if ranks is None else ranks.memory
        decoder = _fill_decoder(config, place, checkpoint, plan, context, memory, shared)
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
        build = partial(decoder_core, place, decoder, ranks, num_blocks, max_model_len, grammars)
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


class _SharedProgress:
    """The progress of the first rank, which is repeated when another one makes some: nobody may give up an engine
    whose first rank waits for one that still loads, nor a rank that waits for the first one."""

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


def load_rank(config: EngineConfig, memory: RankMemory, progress: LoadProgress | None = None) -> LoadedRank:
    """The part of a model that a rank in a process of its own holds: see `execution/parallel/worker.py`."""
    from inflight.execution.parallel.follower import LoadedRank

    model = config.model
    checkpoint = open_configured(config, model.load_format)
    tokenizer = load_tokenizer(config, checkpoint)
    plan = plan_decoder(model_name(config), checkpoint, plain_ids(tokenizer))
    context = resolve_context(plan.spec, model.max_model_len)
    eos = eos_ids(checkpoint, tokenizer)
    grammars = GrammarCompiler(partial(vocabulary_of, tokenizer, plan.spec.vocab_size, eos))
    place = platform(model.device)
    decoder = _fill_decoder(config, place, checkpoint, plan, context, memory, progress)
    if decoder.generates and decoder.shard.is_last:
        grammars.warm_up()  # else all ranks would wait for this one at the first constraint
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
