"""One engine for all tests here, and one server with the default options."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from inflight import LLM
from tests.server.live import Backend, Live, live_server


@pytest.fixture(scope="session")
def backend() -> Iterator[Backend]:
    backend = Backend(num_blocks=2048, max_num_seqs=64, max_queue=1024)
    yield backend
    backend.close()


@pytest.fixture(scope="session")
def _default(backend: Backend) -> Iterator[Live]:
    with live_server(backend) as live:
        yield live


@pytest.fixture
def live(_default: Live) -> Iterator[Live]:
    """The server with the default options; whatever a test does to it, it is idle afterwards."""
    yield _default
    _default.wait_until_idle()


@pytest.fixture(scope="session")
def llm() -> LLM:
    """The same model without any server, to compare with."""
    return LLM(num_blocks=512)
