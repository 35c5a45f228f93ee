from __future__ import annotations

from collections.abc import Iterator

import pytest

from inflight.bench.compare.report import Comparison, compare
from inflight.bench.compare.workload import Workload
from inflight.config import EngineConfig
from inflight.loading.engine import LoadedEngine
from inflight.loading.load import load_engine

NUM_REQUESTS = 12
NUM_SLOTS = 4


@pytest.fixture(scope="session")
def engine() -> Iterator[LoadedEngine]:
    """An engine with the built-in model."""
    loaded = load_engine(EngineConfig.create(max_num_seqs=NUM_SLOTS))
    yield loaded
    loaded.close()


@pytest.fixture(scope="session")
def comparison(engine: LoadedEngine) -> Comparison:
    """A comparison of the three strategies over a dozen real requests."""
    workload = Workload(num_requests=NUM_REQUESTS, max_tokens=48)
    return compare(engine, workload, num_slots=NUM_SLOTS, model="<the & model>")
