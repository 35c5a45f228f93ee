"""The process of a rank other than the first: loads its part of the model and computes its part of each step.

Started by `rank_processes.py` as `python -m inflight.execution.parallel.worker`.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable
from functools import partial
from typing import NoReturn

import torch

from inflight.config import EngineConfig
from inflight.errors import EngineError
from inflight.execution.parallel.layout import RankMemory
from inflight.execution.parallel.messages import Broken, Loading, RankStart, Report, encode_report
from inflight.execution.parallel.rank_processes import BEAT_EVERY
from inflight.execution.parallel.runner import LoadedRank, follow
from inflight.layers.native.library import native_library
from inflight.logs import configure_logging
from inflight.processes.channel import RemoteError
from inflight.processes.child import reporting_input, run_child
from inflight.registry import Registry

logger = logging.getLogger("inflight.execution.parallel.worker")  # __name__ is __main__ here

LoadRank = Callable[[EngineConfig, RankMemory, Callable[[int, int], None]], LoadedRank]
LOADERS: Registry[LoadRank] = Registry("loader", {})


def run_rank(start: RankStart) -> int:
    configure_logging(start.log_level, start.log_format, process=f"rank {start.rank}")
    try:
        _work(start)
    except Exception as error:
        logger.debug("rank %d failed", start.rank, exc_info=True)
        _report(start, Broken(RemoteError.from_exception(error)))
        return 1
    return 0


def _work(start: RankStart) -> None:
    library = native_library()
    if library is None:
        raise EngineError("the compiled kernels cannot be loaded, although the first rank has them")
    library.threads = start.layout.threads
    torch.set_num_threads(1)
    memory = RankMemory(library, start.layout, start.rank, _leave, start.memory)
    library.beat(memory.beats(start.rank), BEAT_EVERY)
    tell = partial(_report, start, Loading())
    with reporting_input(tell):
        loaded = LOADERS.get(start.build)(EngineConfig.create(**start.options), memory, lambda *_: tell())
    gc.collect()
    gc.freeze()
    follow(loaded, memory, partial(_report, start))


def _report(start: RankStart, report: Report) -> None:
    os.write(start.reports, encode_report(report))


def _leave(_code: int) -> NoReturn:
    """Exit without a report: rank 0 knows why the engine is lost."""
    os._exit(1)


if __name__ == "__main__":
    run_child(RankStart, run_rank)
