"""Both samplers of a CPU: in torch, and compiled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from inflight.layers.native.library import native_library
from tests.execution.sampling.sampler_oracle import Bench


@pytest.fixture(scope="module", params=["torch", "native"])
def each_sampler(request: pytest.FixtureRequest) -> Iterator[str]:
    """The kind of sampler that `Bench` has: every test of a module that uses this runs with each of them."""
    if request.param != "torch" and native_library() is None:
        pytest.skip("nothing can be compiled here")
    before, Bench.default_kind = Bench.default_kind, request.param
    yield request.param
    Bench.default_kind = before
