"""Random requests, some of them faulty: exactly those fail, and all others get the tokens they would get alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from inflight.scheduling.policy import Policy
from tests.scheduling.policies import POLICIES
from tests.scheduling.trouble import Trouble
from tests.support.seen import SeenBatch

MAX_LEN = 22
REQUESTS = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.integers(0, 2), min_size=1, max_size=12),
        "max_tokens": st.integers(1, 10),
        "priority": st.integers(-2, 2),
        "tenant": st.sampled_from("abc"),
        "stop_ids": st.frozensets(st.integers(0, 49), max_size=4),
    }
)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


@settings(max_examples=120, deadline=None)
@given(
    requests=st.lists(
        st.tuples(
            REQUESTS,
            st.none() | st.integers(1, MAX_LEN),  # if poison: how many of its tokens bring a step down
            st.integers(0, 4),  # steps before it comes
        ),
        min_size=1,
        max_size=10,
    ),
    method=st.sampled_from(["launch", "collect"]),
    policy=st.sampled_from(POLICIES),
    depth=st.sampled_from([1, 2]),
    block_size=st.sampled_from([1, 4, 16]),
    max_num_seqs=st.sampled_from([2, 4, 8]),
    chunk=st.sampled_from([2, 7, 40]),
    spare_blocks=st.sampled_from([0, 2, 100]),
    caching=st.booleans(),
)
def test_exactly_the_faulty_requests_fail(
    requests: list[tuple[dict[str, Any], int | None, int]],
    method: str,
    policy: str | Callable[[], Policy],
    depth: int,
    block_size: int,
    max_num_seqs: int,
    chunk: int,
    spare_blocks: int,
    caching: bool,
) -> None:
    doses: dict[str, int] = {}

    def fault(batch: SeenBatch) -> bool:
        return any(
            end >= doses.get(request.request_id, 1000)
            for request, end in zip(batch.requests, batch.ends, strict=True)
        )

    trouble = Trouble(
        fault,
        method,
        policy=policy,
        num_blocks=-(-MAX_LEN // block_size) + spare_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=chunk,
        pipeline_depth=depth,
        caching=caching,
    )
    for fields, dose, num_steps in requests:
        for _ in range(num_steps):
            trouble.engine.step()
        name = trouble.add(**fields).request_id
        # The last token is computed only where a stop is found late, and then for nothing.
        if dose is not None and dose < len(fields["prompt"]) + len(trouble.expected[name]):
            doses[name] = dose
    trouble.check(failed=set(doses))
