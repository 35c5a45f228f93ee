"""The number of connections that fit into the limit of open files."""

from __future__ import annotations

import resource
from collections.abc import Callable

import pytest

from inflight.server.http.limits import NUM_OTHER_FILES, fit_open_files

ALL = resource.RLIM_INFINITY


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], list[tuple[int, int]]]:
    """Pretends these, and keeps what is set."""

    def pretend(soft: int, hard: int) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
        monkeypatch.setattr(resource, "setrlimit", lambda _, limit: found.append(limit))
        return found

    return pretend


@pytest.mark.parametrize(
    ("soft", "hard", "fitting", "raised"),
    [
        (ALL, ALL, 4096, []),
        (1 << 20, 1 << 20, 4096, []),
        (1024, 1 << 20, 4096, [(4096 + NUM_OTHER_FILES, 1 << 20)]),
        (1024, ALL, 4096, [(4096 + NUM_OTHER_FILES, ALL)]),
        (256, 1024, 1024 - NUM_OTHER_FILES, [(1024, 1024)]),
        (20, 20, 1, [(20, 20)]),
    ],
)
def test_connections_fit_into_the_raised_file_limit(
    soft: int,
    hard: int,
    fitting: int,
    raised: list[tuple[int, int]],
    limits: Callable[[int, int], list[tuple[int, int]]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    changes = limits(soft, hard)
    assert fit_open_files(4096) == fitting
    assert changes == raised
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (fitting < 4096)
    assert all("--max-connections 4096" in line and "ulimit -n" in line for line in said)


def test_file_limit_that_cannot_be_raised_reduces_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("not allowed")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, ALL))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert fit_open_files(4096) == 1024 - NUM_OTHER_FILES
