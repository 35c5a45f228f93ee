"""Sampling's part of a step: the parameters and constraints of rows, log-probabilities, and the sampled tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from inflight.constraints.compiler import GrammarCompiler
from inflight.constraints.native_matcher import UNKNOWN
from inflight.events import PositionLogprobs, RequestFailure
from inflight.execution.constrained_rows import ConstrainedRows, StepMasks
from inflight.execution.gpu.device import to_host
from inflight.execution.gpu.parts import Section, StepPart, put, staging
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
from inflight.scheduling.batch import Admission, Batch, Sampled


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

    batch: Batch
    sampling_entries: list[int]
    sampled: Tensor  # [2, S] int32, padded: token ids, and 0 or why sampling failed
    logprobs: PendingLogprobs | None = None  # for `logprob_samples`, in order
    logprob_samples: list[int] = field(default_factory=list)
    # By sample, where the constraint failed.
    failures: dict[int, RequestFailure] = field(default_factory=dict)

    def token_ids(self) -> list[int]:
        """Return the sampled tokens, and some padding."""
        token_ids: list[int] = self.sampled[0].tolist()
        return token_ids

    def read_into(self, result: Sampled) -> None:
        token_ids, bad = self.sampled.tolist()
        entries, num_entries = self.sampling_entries, len(self.batch)
        if entries == list(range(num_entries)):
            result.token_ids = [[token_id] for token_id in token_ids[: len(entries)]]
        else:
            result.token_ids = [[] for _ in range(num_entries)]
            for sample in self._samples(token_ids, bad):
                result.token_ids[entries[sample]].append(token_ids[sample])
        if any(bad):
            for sample in self._samples(token_ids, bad):
                if bad[sample]:
                    result.errors[entries[sample]] = self.failures.get(sample) or failure(bad[sample])
        if self.logprobs is not None:
            taken = set(self._samples(token_ids, bad))
            for sample, position in zip(self.logprob_samples, self.logprobs.read(), strict=True):
                if sample in taken:
                    result.logprobs.setdefault(entries[sample], []).append(position)

    def _samples(self, token_ids: list[int], bad: list[int]) -> Iterable[int]:
        """Return the samples that follow right tokens: not those behind a draft that was not sampled before it."""
        entries, drafts = self.sampling_entries, self.batch.drafts
        if not drafts:
            return range(len(entries))
        taken, last, place = [], -1, 0
        for sample, entry in enumerate(entries):
            if entry != last:
                last, place = entry, 0
            elif place < 0 or bad[sample - 1] or token_ids[sample - 1] != drafts[entry][place]:
                place = -1
                continue
            else:
                place += 1
            taken.append(sample)
        return taken


class DeviceSampling(StepPart):
    """Samples a token for each sample of a step, inside its graph."""

    def __init__(
        self,
        rows: DeviceRows,
        vocab_size: int,
        grammars: GrammarCompiler | None,
        max_samples: int | None = None,  # of steps with drafts; None: there are none
    ) -> None:
        self._rows = rows
        self._verifies = max_samples is not None
        max_rows, device = len(rows.tokens), rows.device
        self.state = TritonSamplingRows(max_rows, vocab_size, device, max_samples or 0)
        max_samples = max_samples or max_rows
        self.constrained = ConstrainedRows(self.state, grammars, partial(_use_device, device))
        self.workspace = SamplingWorkspace.allocate(max_samples, vocab_size, device)
        self._sampled = torch.zeros(2 * max_samples, dtype=torch.int32, device=device)
        # Packed, for the samples that want log-probabilities: see `LogprobBuffers`.
        self._logprobs = torch.zeros(max_samples * 3 * (1 + MAX_LOGPROBS), dtype=torch.int32, device=device)
        # By sample of the last step, negative where no log-probabilities are wanted; None: nowhere.
        self._logprob_counts: Ints | None = None
        self._drafted: list[int] = []  # samples of constrained rows behind the last step's drafts

    def admit(self, admissions: Sequence[Admission]) -> None:
        sampling = [admission for admission in admissions if admission.request.max_tokens]
        self.state.set_many(sampling, self._rows.tokens)
        self.constrained.admit(admissions)

    def begin(self, step: HostStep) -> None:
        """Find drafts whose samples must be taken one after another."""
        batch, stateful = step.batch, self.state.stateful
        if batch.drafts and stateful:
            drafts = batch.drafts.items()
            step.places = 1 + max(
                (len(ids) for entry, ids in drafts if batch.rows[entry] in stateful), default=0
            )

    def sections(self, shape: StepShape) -> dict[str, Section]:
        drafts = {}
        if self._verifies:
            drafts = {
                "sample_drafts": Section(shape.num_samples, -1),
                "sample_masks": Section(shape.num_samples, -1),
            }
        return drafts | {
            "sample_rows": Section(shape.num_samples, -1),
            "sample_lengths": Section(shape.num_samples),
            "logprob_counts": Section(shape.num_samples, -1),
            "logprob_places": Section(shape.num_samples),
            "logprob_width": Section(1),
        }

    def fill(self, step: HostStep, sections: dict[str, Ints]) -> None:
        put(sections["sample_rows"], step.sample_rows)
        put(sections["sample_lengths"], step.sample_lengths)
        if (drafts := step.sample_drafts) is not None:
            put(sections["sample_drafts"], drafts)
        if self._drafted:
            count = len(self._drafted)
            sections["sample_masks"][self._drafted] = self.state.draft_masks_at + np.arange(count)
        counts = self._logprob_counts = self.state.logprob_counts(step.sampling_rows)
        if counts is not None:
            put(sections["logprob_counts"], counts)
            put(sections["logprob_places"], (counts >= 0).cumsum() - 1)
            sections["logprob_width"][0] = 1 + counts.max()

    def start_masks(self, step: HostStep) -> StepMasks | None:
        """Start computing the masks of the step's constrained rows; None if there are none."""
        if not self.constrained.any:
            self._drafted = []
            return None
        drafts = step.sample_drafts
        masks = self.constrained.start(step.sampling_rows.tolist(), () if drafts is None else drafts.tolist())
        self._drafted = [] if masks is None else masks.drafted_samples
        return masks

    def finish_masks(self, masks: StepMasks) -> None:
        """Wait for the masks, compute those behind drafts, and pass all to the device."""
        self.constrained.finish(masks)
        if masks.drafts:
            device_masks = self.state.mask[self.state.draft_masks_at :][: len(masks.drafted_samples)]
            pinned, array = staging(device_masks.numel(), self._rows.device)
            self.constrained.look_ahead(masks, array.reshape(device_masks.shape))
            device_masks.copy_(pinned.view(device_masks.shape), non_blocking=True)

    def sample(self, logits: Tensor, shape: StepShape, sections: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Enqueue the choice of a token for each row of logits [S, vocab_size].

        Return where the tokens will be, and 0 or why sampling failed, [S] int32 each."""
        logprobs = LogprobBuffers(
            sections["logprob_counts"], sections["logprob_places"], sections["logprob_width"], self._logprobs
        )
        ids, bad = self.sampled(shape)
        rows, masks = sections["sample_rows"], sections.get("sample_masks")
        batch = SamplingBatch(rows, sections["sample_lengths"], ids, bad, logprobs, masks)
        drafts = sections["sample_drafts"] if shape.places > 1 else None
        sample_tokens(logits, batch, self.state, self._rows.tokens, self.workspace, drafts, shape.places)
        return ids, bad

    def fetch(self, step: HostStep, shape: StepShape, masks: StepMasks | None) -> PendingSamples:
        """Start copying the results of the last step to host memory."""
        entries, counts = step.sampling_entries, self._logprob_counts
        samples = PendingSamples(
            step.batch, entries, to_host(self.sampled(shape), None if masks is None else UNKNOWN)
        )
        if masks is not None:
            samples.failures = masks.failures()
        if counts is not None:
            samples.logprob_samples = np.flatnonzero(counts >= 0).tolist()
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

    def sampled(self, shape: StepShape) -> Tensor:
        """Return [2, S] int32: token ids, and 0 or why sampling failed."""
        return self._sampled[: 2 * shape.num_samples].view(2, shape.num_samples)

    def warm_up(self, shapes: Collection[StepShape]) -> None:  # noqa: ARG002
        self.state.warm_up(self._rows.tokens)


def _use_device(device: torch.device) -> None:
    """Make a device the current one of a thread that waits for its events and allocates pinned memory."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
