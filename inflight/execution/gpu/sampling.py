"""Sampling's part of a step: the parameters and constraints of rows, log-probabilities, and the sampled tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from inflight.constraints.compiler import GrammarCompiler
from inflight.constraints.native_matcher import UNKNOWN
from inflight.events import PositionLogprobs, RequestFailure
from inflight.execution.constrained_rows import ConstrainedRows, StepMasks
from inflight.execution.gpu.device import to_host
from inflight.execution.gpu.parts import Section, StepPart, put
from inflight.execution.gpu.rows import DeviceRows
from inflight.execution.gpu.shapes import StepShape
from inflight.execution.sampling.triton.rows import TritonSamplingRows
from inflight.execution.sampling.triton.sample import (
    MAX_LOGPROBS,
    LogprobBuffers,
    SamplingBatch,
    SamplingWorkspace,
    read_logprobs,
    sample_tokens,
)
from inflight.execution.step import HostStep, Ints, failure
from inflight.scheduling.batch import Admission, Sampled


class PendingLogprobs(NamedTuple):
    """Log-probabilities being copied to host memory, packed for `read_logprobs`."""

    results: Tensor
    counts: list[int]
    width: int

    def read(self) -> list[PositionLogprobs]:
        return read_logprobs(self.results, self.counts, self.width)


@dataclass(slots=True)
class PendingSamples:
    """The tokens of a step, and their log-probabilities, being copied to host memory."""

    num_entries: int
    sampling_entries: list[int]
    sampled: Tensor  # [2, S] int32, padded: token ids, and 0 or why sampling failed
    logprobs: PendingLogprobs | None = None  # for `logprob_entries`, in order
    logprob_entries: list[int] = field(default_factory=list)
    # By sample, where the constraint failed.
    failures: dict[int, RequestFailure] = field(default_factory=dict)

    def token_ids(self) -> list[int]:
        """Return the sampled tokens, and some padding."""
        token_ids: list[int] = self.sampled[0].tolist()
        return token_ids

    def read_into(self, result: Sampled) -> None:
        token_ids, bad = self.sampled.tolist()
        entries = self.sampling_entries
        if entries == list(range(self.num_entries)):
            result.token_ids = [[token_id] for token_id in token_ids[: len(entries)]]
        else:
            result.token_ids = [[] for _ in range(self.num_entries)]
            for entry, token_id in zip(entries, token_ids, strict=False):
                result.token_ids[entry].append(token_id)
        if any(bad):
            for index, (entry, code) in enumerate(zip(entries, bad, strict=False)):
                if code:
                    result.errors[entry] = self.failures.get(index) or failure(code)
        if self.logprobs is not None:
            for entry, position in zip(self.logprob_entries, self.logprobs.read(), strict=True):
                result.logprobs.setdefault(entry, []).append(position)


class DeviceSampling(StepPart):
    """Samples a token for each sample of a step, inside its graph."""

    def __init__(self, rows: DeviceRows, vocab_size: int, grammars: GrammarCompiler | None) -> None:
        self._rows = rows
        max_rows, device = len(rows.tokens), rows.device
        self.state = TritonSamplingRows(max_rows, vocab_size, device)
        self.constrained = ConstrainedRows(self.state, grammars, partial(_use_device, device))
        self.workspace = SamplingWorkspace.allocate(max_rows, vocab_size, device)
        self._sampled = torch.zeros(2 * max_rows, dtype=torch.int32, device=device)
        # Packed, for the samples that want log-probabilities: see `LogprobBuffers`.
        self._logprobs = torch.zeros(max_rows * 3 * (1 + MAX_LOGPROBS), dtype=torch.int32, device=device)
        # By sample of the last step, negative where no log-probabilities are wanted; None: nowhere.
        self._logprob_counts: Ints | None = None

    def admit(self, admissions: Sequence[Admission]) -> None:
        sampling = [admission for admission in admissions if admission.request.max_tokens]
        self.state.set_many(sampling, self._rows.tokens)
        self.constrained.admit(admissions)

    def sections(self, shape: StepShape) -> dict[str, Section]:
        return {
            "sample_rows": Section(shape.num_samples, -1),
            "sample_lengths": Section(shape.num_samples),
            "logprob_counts": Section(shape.num_samples, -1),
            "logprob_places": Section(shape.num_samples),
            "logprob_width": Section(1),
        }

    def fill(self, step: HostStep, sections: dict[str, Ints]) -> None:
        put(sections["sample_rows"], step.sample_rows)
        put(sections["sample_lengths"], step.sample_lengths)
        counts = self._logprob_counts = self.state.logprob_counts(step.sampling_rows)
        if counts is not None:
            put(sections["logprob_counts"], counts)
            put(sections["logprob_places"], (counts >= 0).cumsum() - 1)
            sections["logprob_width"][0] = 1 + counts.max()

    def start_masks(self, step: HostStep) -> StepMasks | None:
        """Start computing the masks of the step's constrained rows; None if there are none."""
        return self.constrained.start(step.sampling_rows.tolist() if self.constrained.any else [])

    def sample(self, logits: Tensor, shape: StepShape, sections: dict[str, Tensor]) -> None:
        """Enqueue the choice of a token for each row of logits [S, vocab_size]."""
        logprobs = LogprobBuffers(
            sections["logprob_counts"], sections["logprob_places"], sections["logprob_width"], self._logprobs
        )
        ids, bad = self._results(shape)
        batch = SamplingBatch(sections["sample_rows"], sections["sample_lengths"], ids, bad, logprobs)
        tokens = self._rows.tokens
        sample_tokens(logits, batch, self.state, tokens, self.workspace)

    def fetch(self, step: HostStep, shape: StepShape, masks: StepMasks | None) -> PendingSamples:
        """Start copying the results of the last step to host memory."""
        entries, counts = step.sampling_entries, self._logprob_counts
        samples = PendingSamples(
            len(step.rows), entries, to_host(self._results(shape), None if masks is None else UNKNOWN)
        )
        if masks is not None:
            samples.failures = masks.failures()
        if counts is not None:
            pairs = zip(entries, counts, strict=True)
            samples.logprob_entries = [entry for entry, count in pairs if count >= 0]
            num_logprobs, width = counts[counts >= 0].tolist(), 1 + int(counts.max())
            results = to_host(self._logprobs[: len(num_logprobs) * 3 * width])
            samples.logprobs = PendingLogprobs(results, num_logprobs, width)
        return samples

    def expect(self, masks: StepMasks, samples: PendingSamples, wait: Callable[[], None]) -> None:
        """Start computing the next masks of these rows. `wait` waits until the samples are in host memory."""

        def token_ids() -> list[int]:
            wait()
            return samples.token_ids()

        self.constrained.expect(masks, token_ids, samples.sampled[0].numpy())

    def _results(self, shape: StepShape) -> Tensor:
        """Return [2, S] int32: token ids, and 0 or why sampling failed."""
        return self._sampled[: 2 * shape.num_samples].view(2, shape.num_samples)

    def warm_up(self, shapes: Collection[StepShape]) -> None:  # noqa: ARG002
        self.state.warm_up(self._rows.tokens)


def _use_device(device: torch.device) -> None:
    """Make a device the current one of a thread that waits for its events and allocates pinned memory."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
