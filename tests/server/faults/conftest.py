"""An engine whose steps fail on request, and a server in front of it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from inflight import LLM
from inflight.config import ProcessConfig
from tests.server.faults.cases import Case, make_case, make_cases
from tests.server.faulty import SLOW
from tests.server.live import Live, ProcessBackend, live_server

NUM_SLOTS, MAX_QUEUE = 4, 8


@pytest.fixture(scope="package")
def process() -> Iterator[ProcessBackend]:
    backend = ProcessBackend(num_blocks=1024, max_num_seqs=NUM_SLOTS, max_queue=MAX_QUEUE)
    yield backend
    backend.close()


@pytest.fixture(scope="package")
def _server(process: ProcessBackend) -> Iterator[Live]:
    with live_server(process, max_queue=MAX_QUEUE) as live:
        yield live


@pytest.fixture(scope="package")
def _watched() -> Iterator[Live]:
    process = ProcessBackend(ProcessConfig(heartbeat=0.05, silent_after=3.0, stalled_after=3.0))
    try:
        with live_server(process) as live:
            yield live
    finally:
        process.close()


@pytest.fixture
def watched(_watched: Live) -> Iterator[Live]:
    """A server whose engine is soon reported as stalled, but not while a busy machine merely slows it down."""
    yield _watched
    _watched.wait_until_idle()


@pytest.fixture
def server(_server: Live, threads: ThreadPoolExecutor) -> Iterator[Live]:  # noqa: ARG001
    yield _server
    _server.wait_until_idle()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(64) as pool:
        yield pool


@pytest.fixture(scope="package")
def slow(llm: LLM) -> list[Case]:
    """Requests that take seconds each with the faulty engine."""
    return make_cases(llm, [([SLOW, number], 200) for number in range(NUM_SLOTS + MAX_QUEUE)])


@pytest.fixture(scope="package")
def quick(llm: LLM) -> Case:
    return make_case(llm, [5, 6], 40)
