"""Ranks as threads, for all tests here that do not use processes."""

from __future__ import annotations

import pytest

from inflight.execution.parallel import rank_processes
from tests.e2e.conftest import folder as folder
from tests.execution.parallel.thread_ranks import ThreadRank


@pytest.fixture
def in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "RankProcess", ThreadRank)
