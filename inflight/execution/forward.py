"""One forward pass of a decoder over the rows of a CPU: what all ranks do alike, whoever samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from inflight.execution.inputs import Rows, StepInputs, build_inputs
from inflight.execution.results import PooledRows, PromptPiece, ScoredRows
from inflight.execution.threads import torch_threads
from inflight.models.decoders.decoder import Decoder
from inflight.scheduling import Batch


@dataclass(slots=True)
class HiddenStates:
    """What the last layer leaves of a step, for those who read it."""

    samples: Tensor  # [S, hidden_size], of the entries that sample
    pooled: Tensor  # [P, hidden_size], of those that end with a vector
    pooled_entries: list[int]
    scored: list[tuple[PromptPiece, Tensor]]  # [size, hidden_size] of each piece whose logprobs are asked for


class StageLinks(Protocol):
    """Where hidden states come from and go to, where a stage has only some of the layers."""

    def receive(self, into: Tensor) -> None:
        """[num_tokens, hidden_size] from the stage before."""

    def hand_over(self, hidden: Tensor) -> None:
        """To the stage behind."""


class ForwardPass:
    """Weights, KV memory and rows. Without `links`, all layers are here."""

    def __init__(
        self,
        decoder: Decoder,
        num_blocks: int,
        block_size: int,
        max_rows: int,
        max_len: int,
        links: StageLinks | None = None,
    ) -> None:
        self.decoder = decoder
        self._links = links
        self.block_size = block_size
        self.caches = decoder.attention.allocate(decoder.kv_shape(block_size), num_blocks, decoder.device)
        self.rows = Rows(max_rows, max_len, block_size, decoder.device)
        self._scored = ScoredRows()
        self._pooled = PooledRows()

    def take_in(self, batch: Batch) -> StepInputs:
        """Requests that got a row, blocks that were handed out, and what the step computes."""
        with torch_threads(1):
            self.rows.apply(batch)
            self._scored.admit(batch.admissions)
            self._pooled.admit(batch.admissions)
            return build_inputs(batch, self.rows, self.block_size)

    def run(self, batch: Batch, inputs: StepInputs) -> HiddenStates:
        """Through all layers, or on a last stage through those that are here."""
        pooled, num_samples = self._pooled.ending(batch), len(inputs.sampling_entries)
        wanted = inputs.sampling_tokens
        if pooled:
            wanted = torch.cat((wanted, inputs.last_tokens(pooled)))
        scored: list[tuple[PromptPiece, Tensor]] = []
        if self._scored.any_in(batch):
            hidden = self._forward(inputs, None)
            scored = [(piece, hidden[piece.predicting]) for piece in self._scored.pieces(batch)]
            hidden = hidden[wanted]
        else:
            all_sample = num_samples == len(inputs.token_ids)
            hidden = self._forward(inputs, None if all_sample else wanted)
        return HiddenStates(hidden[:num_samples], hidden[num_samples:], pooled, scored)

    def pass_on(self, inputs: StepInputs) -> None:
        """On any stage but the last."""
        assert self._links is not None
        self._links.hand_over(self._forward(inputs, None))

    def _forward(self, inputs: StepInputs, wanted: Tensor | None) -> Tensor:
        decoder = self.decoder
        if decoder.shard.is_first:
            return decoder.forward(inputs.token_ids, self.caches, inputs.attention, wanted)
        assert self._links is not None
        hidden = torch.empty(len(inputs.token_ids), decoder.spec.hidden_size)
        self._links.receive(hidden)
        return decoder.run_layers(hidden, self.caches, inputs.attention, wanted)

    def close(self) -> None:
        self.caches.clear()
