from __future__ import annotations

from inflight.request import Request, Status
from inflight.sampling_params import SamplingParams


def test_a_new_request_counts_its_prompt() -> None:
    request = Request("r", [5, 6, 7], SamplingParams(), 10)
    assert (request.num_prompt_tokens, request.num_tokens, request.num_computed) == (3, 3, 0)
    assert (request.max_total, request.num_output_tokens) == (13, 0)
    assert request.status is Status.WAITING
    assert request.record.num_prompt_tokens == 3


def test_a_resumed_request_knows_its_outputs() -> None:
    request = Request("r", [5, 6, 7, 8, 9], SamplingParams(), 10, num_prompt_tokens=3)
    assert (request.num_prompt_tokens, request.num_output_tokens, request.num_tokens) == (3, 2, 5)
    assert request.max_total == 13


def test_requests_are_told_apart_by_identity() -> None:
    one, other = (Request("r", [1], SamplingParams(), 1) for _ in range(2))
    assert one != other
    assert len({one, other}) == 2
    assert one.record is not other.record
    assert one.block_ids is not other.block_ids
