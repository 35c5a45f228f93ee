"""From options to ranks: how many, which part of the model each has, and their processes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from inflight.config import EngineConfig
from inflight.engine import EngineCore
from inflight.engine.runner import Runner
from inflight.errors import ConfigError
from inflight.execution.platforms import Platform
from inflight.execution.runner import ModelRunner
from inflight.models.shard import Shard, check_tensor_parallel, shard_of
from inflight.models.spec import DecoderSpec
from inflight.native.library import Library, native_library
from inflight.scheduling import Scheduler

if TYPE_CHECKING:  # they need msgspec, which one rank does without
    from inflight.execution.parallel.layout import RankMemory
    from inflight.execution.parallel.rank_processes import RankProcesses

# `load_rank` of that module loads the part of one rank in its process.
LOADER = "inflight.loading:load_rank"
SLOT = 1 << 20  # bytes that a rank gives to an exchange at once: they stay in its cache


def start_ranks(config: EngineConfig, place: Platform, spec: DecoderSpec) -> RankProcesses | None:
    """The processes of all ranks but this one; None where there is only one rank."""
    if config.parallel.num_ranks == 1:
        return None
    size = config.parallel.tensor_parallel_size
    if place.device.type != "cpu":
        raise ConfigError(f"tensor_parallel_size is {size}: on {place.device} a model has one rank, so far")
    check_tensor_parallel(spec, size)
    library = native_library()
    if library is None:
        raise ConfigError(f"tensor_parallel_size is {size}: ranks on a CPU need the compiled kernels")
    try:
        from inflight.execution.parallel.layout import RankLayout
        from inflight.execution.parallel.rank_processes import RankProcesses
    except ImportError as error:
        raise ConfigError(
            f"tensor_parallel_size is {size}: ranks need a package that is not installed ({error}): install "
            "inflight-llm[server]"
        ) from error
    layout = RankLayout(
        tensor=size,
        pipeline=1,
        threads=_threads(library, config.parallel.num_ranks),
        slot=max(SLOT, 4 * -(-spec.vocab_size // size)),
        hand_over=0,
    )
    options = config.options() | {"policy": "continuous", "device": str(place.device)}
    return RankProcesses(library, layout, LOADER, options)


def rank_shard(spec: DecoderSpec, memory: RankMemory) -> Shard:
    """What of a model the rank holds that sees this memory."""
    size = memory.ranks.tensor
    return shard_of(spec, memory.rank % size, size, collective=memory.collective())


def parallel_core(
    ranks: RankProcesses,
    scheduler: Scheduler,
    runner: Runner[Any],
    num_blocks: int,
    max_len: int,
    pipeline_depth: int,
    max_queue: int | None,
) -> EngineCore:
    """An engine over all ranks. `runner` is that of the first."""
    from inflight.execution.parallel.messages import Begin
    from inflight.execution.parallel.runner import TensorParallelRunner

    library = native_library()
    assert library is not None
    assert isinstance(runner, ModelRunner)
    begin = Begin(num_blocks, scheduler.blocks.block_size, scheduler.limits.max_num_seqs, max_len)
    together = TensorParallelRunner(runner, ranks, library, begin)
    return EngineCore(scheduler, together, pipeline_depth, max_queue, check=together.check)


def _threads(library: Library, num_ranks: int) -> int:
    """Of each rank: the machine's are shared out, but what the user has asked for is each rank's."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return library.threads if asked.isdecimal() and int(asked) > 0 else max(1, library.threads // num_ranks)
