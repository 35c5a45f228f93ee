"""Starting ranks: their number, each one's part of the model, their processes, and the runner of all."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from inflight.config import EngineConfig
from inflight.engine.runner import Runner
from inflight.errors import ConfigError
from inflight.execution.platforms import Platform
from inflight.execution.runner import StageLinks
from inflight.layers.native.library import Library, native_library
from inflight.models.decoders.decoder import Decoder
from inflight.models.decoders.footprint import RankShare, meta_kernels, rank_shares
from inflight.models.decoders.spec import (
    Collective,
    DecoderSpec,
    Shard,
    check_tensor_parallel,
    shard_of,
)

if TYPE_CHECKING:  # they need msgspec, which a single rank does not
    from inflight.execution.parallel.layout import RankMemory
    from inflight.execution.parallel.messages import Begin
    from inflight.execution.parallel.rank_processes import RankProcesses

logger = logging.getLogger(__name__)

# Loads the part of one rank in its process.
LOADER = "inflight.loading.load:load_rank"
GIB = 1 << 30
LINE = 64  # bytes of a cache line
REGION_BYTES = 1 << 20  # bytes that a rank contributes to an exchange at once: they stay in its cache


def start_ranks(
    config: EngineConfig,
    place: Platform,
    spec: DecoderSpec,
    context: int,
    dtype: torch.dtype,
    on_progress: Callable[[], None],
) -> RankProcesses | None:
    """Start the processes of all ranks but this one; return None if there is only one rank.

    `on_progress` is called whenever one of them makes progress while starting.
    """
    parallel = config.parallel
    if parallel.num_ranks == 1:
        return None
    check_tensor_parallel(spec, parallel.tensor_parallel_size)
    devices = _devices(config, place)
    library = native_library()
    if library is None:
        raise ConfigError(f"{parallel}: several ranks need the compiled kernels, which cannot be built here")
    try:
        from inflight.execution.parallel.layout import RankLayout
        from inflight.execution.parallel.rank_processes import RankProcesses
    except ImportError as error:
        raise ConfigError(
            f"{parallel}: several ranks need a package that is not installed ({error}): install inflight-llm[server]"
        ) from error
    tensor, pipeline = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    kernels = meta_kernels(place.device.type, dtype)
    shares = rank_shares(spec, tensor, pipeline, context, config.cache.block_size, kernels, dtype)
    for share in shares:
        logger.info("%s: %.2f GiB of weights", _named(share, len(shares)), share.weights / GIB)
    max_tokens = config.scheduler.max_num_batched_tokens or place.defaults.max_num_batched_tokens
    layout = RankLayout(
        tensor=tensor,
        pipeline=pipeline,
        threads=_threads(library, parallel.num_ranks),
        region=region_bytes(spec.vocab_size, tensor),
        # Holds all steps in flight: no stage waits for the next one to read.
        hand_over=pipeline * max_tokens * spec.hidden_size * 4,
        layers=tuple((share.layers.start, share.layers.stop) for share in shares[::tensor]),
    )
    options = config.options() | {"policy": "continuous"}
    timeout = config.model.start_timeout
    return RankProcesses(library, layout, shares, LOADER, options, devices, timeout, on_progress)


def _devices(config: EngineConfig, place: Platform) -> list[str]:
    """Return the device of each rank. GPUs are assigned in order, starting with the first rank's."""
    parallel = config.parallel
    if place.device.type == "cpu":
        return ["cpu"] * parallel.num_ranks
    count = torch.cuda.device_count()
    if parallel.num_ranks > count and config.cache.num_blocks is None:
        raise ConfigError(
            f"{parallel}, but torch finds {count} GPUs: ranks that share a GPU need num_blocks, because none of them "
            "knows how much memory the others take"
        )
    first = place.device.index or 0
    return [f"cuda:{(first + rank) % count}" for rank in range(parallel.num_ranks)]


def rank_shard(spec: DecoderSpec, memory: RankMemory, place: Platform) -> Shard:
    """Return the part of a model that a rank holds."""
    layout, rank = memory.ranks, memory.rank
    layers = range(*layout.layers[layout.stage(rank)])
    shared = memory.collective()
    collective: Collective | None = shared
    if shared is not None and place.device.type != "cpu":
        from inflight.execution.parallel.device_collective import device_collective

        collective = device_collective(memory, shared, place.device)
    return shard_of(spec, rank % layout.tensor, layout.tensor, layers, collective)


def stage_links(memory: RankMemory, decoder: Decoder) -> StageLinks | None:
    """Return the links to the previous and the next stage; None if there is one stage."""
    if memory.ranks.pipeline == 1:
        return None
    if decoder.device.type == "cuda":
        from inflight.execution.parallel.links import device_links

        return device_links(memory, decoder)
    from inflight.execution.parallel.links import SharedLinks

    return SharedLinks(memory, decoder.spec.hidden_size)


def begin_ranks(
    ranks: RankProcesses,
    decoder: Decoder,
    begin: Begin,
    make_runner: Callable[[], Runner[Any]],
) -> Runner[Any]:
    """Have all ranks begin with empty memory, and return the runner of the first one, which the others follow.
    `make_runner` makes the runner of this rank's part."""
    from inflight.execution.parallel.runner import (
        FirstRank,
        MirroredRunner,
        PipelineRunner,
        rank_runner,
    )

    library = native_library()
    assert library is not None
    for share in ranks.shares:
        size = share.kv(begin.num_blocks) / GIB
        logger.info("%s: %.2f GiB of KV memory", _named(share, len(ranks.shares)), size)
    first = FirstRank(ranks, library, decoder.shard.collective)
    ranks.begin(begin)  # their warm-up steps need this rank's, so all ranks warm up together
    runner: MirroredRunner | PipelineRunner
    if ranks.layout.pipeline == 1:
        runner = MirroredRunner(make_runner(), first)
    else:
        stage = rank_runner(make_runner(), ranks.memory)
        runner = PipelineRunner(stage, ranks.memory.results(), first)
    first.wait_until_begun()
    return runner


def region_bytes(vocab_size: int, size: int) -> int:
    """Return the bytes of a region that holds the logits of one of `size` ranks for one row."""
    return max(REGION_BYTES, -(-4 * -(-vocab_size // size) // LINE) * LINE)


def _named(share: RankShare, count: int) -> str:
    return f"rank {share.rank} of {count}, layers {share.layers.start} to {share.layers.stop - 1}"


def _threads(library: Library, num_ranks: int) -> int:
    """Return the threads of each rank: OMP_NUM_THREADS if set, else an equal share of the machine's."""
    requested = os.environ.get("OMP_NUM_THREADS", "")
    is_set = requested.isdecimal() and int(requested) > 0
    return library.threads if is_set else max(1, library.threads // num_ranks)
