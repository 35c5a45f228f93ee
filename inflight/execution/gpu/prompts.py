"""What steps return for prompts: the log-probabilities of their own tokens, and vectors from the model's head."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from inflight.execution.gpu.device import to_host
from inflight.execution.gpu.parts import StepPart
from inflight.execution.gpu.rows import DeviceRows
from inflight.execution.gpu.sampling import PendingLogprobs
from inflight.execution.gpu.shapes import StepShape
from inflight.execution.sampling.triton.sample import SamplingWorkspace, score_all
from inflight.execution.step import PROMPT_LOGITS_AT_ONCE, HostStep, PooledRows, ScoredRows, StepVectors
from inflight.models.decoders.decoder import Decoder
from inflight.scheduling.batch import Admission, Sampled


class PendingScores(NamedTuple):
    """Log-probabilities of prompt tokens, being copied to host memory."""

    pieces: list[tuple[int, PendingLogprobs]]  # by entry, in order of position

    def read_into(self, result: Sampled) -> None:
        for entry, piece in self.pieces:
            result.prompt_logprobs.setdefault(entry, []).extend(piece.read())


class PromptScores(StepPart):
    """Scores the tokens of prompts whose requests want that, after the step's graph."""

    def __init__(
        self, decoder: Decoder, rows: DeviceRows, scored: ScoredRows, workspace: SamplingWorkspace
    ) -> None:
        self._decoder = decoder
        self._rows = rows
        self._workspace = workspace
        self._scored = scored

    def admit(self, admissions: Sequence[Admission]) -> None:
        self._scored.admit(admissions)

    def begin(self, step: HostStep) -> None:
        step.scores = self._scored.any_in(step.batch)

    def results(self, step: HostStep, sections: dict[str, Tensor], hidden: Tensor) -> PendingScores | None:  # noqa: ARG002
        if not step.scores:
            return None
        scores = PendingScores([])
        for piece in self._scored.pieces(step.batch, len(self._rows.tokens)):
            logits = self._decoder.logits(hidden[piece.predicting])
            self._scored.read_logits(logits)
            targets = self._rows.tokens[piece.row, piece.targets]
            results = score_all(logits, targets, piece.num_logprobs, self._workspace)
            counts = [min(piece.num_logprobs, logits.shape[1])] * piece.size
            scores.pieces.append((piece.entry, PendingLogprobs(to_host(results), counts, 1 + counts[0])))
        return scores

    def warm_up_largest(self) -> None:
        """Score as many positions as are ever scored at once, to allocate what that takes."""
        decoder, size = self._decoder, min(PROMPT_LOGITS_AT_ONCE, len(self._rows.tokens))
        shape = size, decoder.spec.hidden_size
        hidden = torch.zeros(shape, dtype=decoder.kernels.compute_dtype, device=decoder.device)
        targets = torch.zeros(size, dtype=torch.int32, device=decoder.device)
        score_all(decoder.logits(hidden), targets, 1, self._workspace)


class PromptVectors(StepPart):
    """Applies the model's head to the last token of prompts that end with a vector, after the step's graph."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._pooled = PooledRows()

    def admit(self, admissions: Sequence[Admission]) -> None:
        self._pooled.admit(admissions)

    def begin(self, step: HostStep) -> None:
        if entries := self._pooled.ending(step.batch):
            step.pool(entries)

    def results(self, step: HostStep, sections: dict[str, Tensor], hidden: Tensor) -> StepVectors | None:
        """The head computes all samples of the shape, so that it sees few sizes. Those that want vectors come last."""
        head, entries = self._decoder.pooling_head, step.pooled_entries
        if head is None or not entries:
            return None
        vectors = head(hidden[sections["sample_tokens"]] if step.scores else hidden)
        end = len(step.sample_tokens)
        return StepVectors(entries, to_host(vectors[end - len(entries) : end]))

    def warm_up(self, shapes: Collection[StepShape]) -> None:
        """Let the head allocate what it needs for as many samples as these shapes have."""
        decoder = self._decoder
        if decoder.pooling_head is None:
            return
        for num_samples in {shape.num_samples for shape in shapes if shape.chunks}:
            shape, dtype = (num_samples, decoder.spec.hidden_size), decoder.kernels.compute_dtype
            decoder.pooling_head(torch.zeros(shape, dtype=dtype, device=decoder.device))
