"""The guesses of the model itself, on a GPU: a predictor's passes follow sampling, in a graph of their own.

The first pass reads all tokens of the step, so that its keys and values are complete. Which of them is the last right
one of its row is known on the device alone, and so are the positions of further passes, of one token for each row.

Guesses are sampled as the tokens that they guess will be, with the same random numbers. Only penalties and rules do not
know the guesses before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from inflight.errors import ConfigError
from inflight.execution.gpu.attention import DeviceAttention
from inflight.execution.gpu.device import to_host
from inflight.execution.gpu.parts import Section, StepPart, put
from inflight.execution.gpu.rows import DeviceRows
from inflight.execution.gpu.sampling import DeviceSampling
from inflight.execution.gpu.shapes import DECODE_STEPS, StepShape, round_up, sizes_up_to
from inflight.execution.sampling.triton.guesses import (
    Cursor,
    Guessing,
    StepSamples,
    TokenPlaces,
    find_last,
    following_tokens,
    go_on,
)
from inflight.execution.sampling.triton.sample import SamplingBatch, sample_tokens
from inflight.execution.step import HostStep, Ints
from inflight.layers.attention.backend import LayerCache
from inflight.layers.attention.triton.backend import TritonInputs
from inflight.models.decoders.decoder import Decoder
from inflight.scheduling.batch import Sampled


class DraftShape(NamedTuple):
    """The shape of a graph of the predictor's passes."""

    step: StepShape
    num_rows: int  # capacity for rows that guess
    num_guesses: int  # of each, at most


@dataclass(slots=True)
class PendingGuesses:
    """Guesses being copied to host memory."""

    entries: list[int]
    wanted: list[int]  # guesses of each
    guesses: Tensor  # [2, number, rows] int32: token ids, and 0 or why sampling failed

    def read_into(self, result: Sampled) -> None:
        ids, bad = self.guesses.tolist()
        for place, (entry, wanted) in enumerate(zip(self.entries, self.wanted, strict=True)):
            guess = []
            for number in range(wanted):
                if bad[number][place]:
                    break
                guess.append(ids[number][place])
            if guess and entry not in result.errors:
                result.drafts[entry] = guess


class DeviceDrafts(StepPart):
    """The predictor of a decoder, which guesses what follows the samples of a step."""

    def __init__(
        self,
        decoder: Decoder,
        rows: DeviceRows,
        attention: DeviceAttention,
        sampling: DeviceSampling,
        caches: list[LayerCache],
        max_tokens: int,
        max_guesses: int,
    ) -> None:
        """`max_guesses`: of a row behind a step."""
        self._decoder, self._rows, self._sampling = decoder, rows, sampling
        self._caches, self._row_sizes = caches, sizes_up_to(len(rows.tokens), DECODE_STEPS)
        self._max_guesses = max_guesses
        predictor = decoder.predictor
        assert predictor is not None
        if not predictor.keeps_tokens:
            raise ConfigError(
                "speculative_config: so far, models draft from the keys and values of another on CPUs only"
            )
        self._predictor = predictor
        self._singles = attention.single_tokens(predictor.attention_layers)
        dtype, hidden_size = decoder.kernels.compute_dtype, decoder.spec.hidden_size
        probe = torch.zeros(1, hidden_size, dtype=dtype, device=rows.device)
        width = decoder.first_states(probe, [probe for _ in predictor.inner_layers]).shape[1]
        # What the predictor reads of the last step's tokens.
        self._states = torch.zeros(max_tokens, width, dtype=dtype, device=rows.device)

    # ---- the part of a step ----

    def sections(self, shape: StepShape) -> dict[str, Section]:
        if not shape.predicts:
            return {}
        return {
            "guess_rows": Section(shape.num_samples, -1),
            "guess_samples": Section(shape.num_samples),  # the first of each row
            "guess_counts": Section(shape.num_samples),  # the row's samples
            "guess_wanted": Section(shape.num_samples),
        }

    def fill(self, step: HostStep, sections: dict[str, Ints]) -> None:
        if not step.predicts:
            return
        entries = self._entries(step)
        _, firsts, counts = np.unique(step.sampling_entries, return_index=True, return_counts=True)
        wanted = np.array(step.batch.wanted_drafts, dtype=np.int32)
        sampling = np.flatnonzero(np.isin(np.unique(step.sampling_entries), entries))
        put(sections["guess_rows"], np.array(step.batch.rows, dtype=np.int32)[entries])
        put(sections["guess_samples"], firsts[sampling])
        put(sections["guess_counts"], counts[sampling])
        put(sections["guess_wanted"], wanted[entries])

    def _entries(self, step: HostStep) -> list[int]:
        """Return the batch's entries behind which tokens are guessed."""
        sampling = set(step.sampling_entries)
        return [entry for entry, count in enumerate(step.batch.wanted_drafts) if count and entry in sampling]

    def shape_of(self, step: HostStep, shape: StepShape) -> DraftShape:
        entries = self._entries(step)
        most = max((step.batch.wanted_drafts[entry] for entry in entries), default=0)
        return DraftShape(shape, round_up(len(entries), self._row_sizes) if entries else 0, most)

    def usual(self, shape: StepShape) -> list[DraftShape]:
        """Return the shapes of nearly all passes behind a step of this shape: all rows have all drafts, or none has."""
        if not shape.predicts:
            return []
        most, largest = self._max_guesses, self._row_sizes[-1]
        counts = [shape.num_samples] if shape.chunks else [shape.num_samples, shape.num_samples // (1 + most)]
        sizes = {round_up(min(count, largest), self._row_sizes) for count in counts if count}
        return [DraftShape(shape, size, most) for size in sizes]

    # ---- behind the step ----

    def keep(self, hidden: Tensor, inner: list[Tensor]) -> None:
        """Enqueue the copy of what the predictor reads of a step's tokens."""
        if not self._predictor.reads_tokens:
            self._states[: len(hidden)].copy_(self._decoder.first_states(hidden, inner))

    def draft(self, shape: DraftShape, sections: dict[str, Tensor], inputs: TritonInputs) -> Tensor | None:
        """Enqueue all passes, and return [2, guesses, rows]: token ids, and 0 or why sampling failed."""
        rows, step, predictor, capacity = self._rows, shape.step, self._predictor, shape.num_rows
        cursor = Cursor.of(capacity, rows.device)
        if capacity:
            guessing = (sections[f"guess_{name}"] for name in ("rows", "samples", "counts", "wanted"))
            samples = (sections[f"sample_{name}"] for name in ("tokens", "lengths", "drafts"))
            sampled = StepSamples(*samples, *self._sampling.sampled(step))
            find_last(Guessing(*guessing), sampled, cursor, int(predictor.reads_tokens))
        states = self._states[: step.num_tokens]
        if (
            predictor.reads_tokens
        ):  # the first guess follows the sampled token, which the step has not computed
            self._predict(rows.token_ids(step), states, inputs, cursor.last[:0])
            if capacity:
                hidden = self._predict(
                    cursor.sampled, states, self._singles.plan(cursor.rows, cursor.positions)
                )
        else:
            step_tokens = TokenPlaces(sections["token_rows"], sections["positions"])
            hidden = self._predict(following_tokens(step_tokens, rows.tokens), states, inputs, cursor.last)
        if not capacity:
            return None
        guesses = torch.zeros(2, shape.num_guesses, capacity, dtype=torch.int32, device=rows.device)
        for number in range(shape.num_guesses):
            token_ids, failed = guesses[0, number], guesses[1, number]
            batch = SamplingBatch(cursor.rows, cursor.lengths, token_ids, failed, None)
            logits = self._decoder.predicted_logits(hidden)
            sample_tokens(logits, batch, self._sampling.state, rows.tokens, self._sampling.workspace)
            if number + 1 < shape.num_guesses:
                go_on(sections["guess_wanted"], failed, cursor, number + 1)
                single = self._singles.plan(cursor.rows, cursor.positions)
                hidden = self._predict(token_ids, predictor.next_states(hidden), single)
        return guesses

    def _predict(
        self, token_ids: Tensor, states: Tensor, inputs: TritonInputs, output_tokens: Tensor | None = None
    ) -> Tensor:
        return self._decoder.predict(token_ids, states, self._caches, inputs, output_tokens)

    def fetch(self, step: HostStep, guesses: Tensor) -> PendingGuesses:
        """Start copying the guesses to host memory."""
        entries = self._entries(step)
        return PendingGuesses(
            entries, [step.batch.wanted_drafts[entry] for entry in entries], to_host(guesses)
        )
