"""Samples on their way from the device to the results of entries."""

from __future__ import annotations

import torch

from inflight.events import RequestFailure
from inflight.execution.gpu.sampling import PendingLogprobs, PendingSamples
from inflight.execution.step import NOT_FINITE
from inflight.scheduling.batch import Batch, Sampled


def test_entry_may_have_several_samples() -> None:
    sampled = torch.tensor([[5, 6, 7, 9], [0, 0, 1, 0]], dtype=torch.int32)  # the last one is padding
    logprobs = PendingLogprobs(torch.arange(6, dtype=torch.int32), [0, 0], 1)
    result = Sampled([])
    batch = Batch(0, rows=[4, 5, 6], drafts={0: [5]})
    PendingSamples(batch, [0, 0, 2], sampled, logprobs, [0, 1]).read_into(result)
    assert result.token_ids == [[5, 6], [], [7]]
    assert [len(position) for position in result.logprobs[0]] == [12, 12]
    assert result.errors == {2: NOT_FINITE}


def test_failed_constraint_is_the_error_of_its_entry() -> None:
    failure = RequestFailure("constraint_failed", "too large")
    sampled = torch.tensor([[5, 6], [0, 2]], dtype=torch.int32)
    result = Sampled([])
    PendingSamples(Batch(0, rows=[4, 5]), [0, 1], sampled, failures={1: failure}).read_into(result)
    assert result.token_ids == [[5], [6]]
    assert result.errors == {1: failure}
