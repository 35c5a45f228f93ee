"""Runs batches on a real model."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.execution.inputs import StepInputs, build_inputs
from inflight.execution.results import ScoredRows, Ticket
from inflight.execution.rows import Rows
from inflight.execution.sampling import SampledTensors, Sampler, SamplingRows
from inflight.execution.torch_threads import WORTH_SHARING, torch_threads
from inflight.models.decoder import Decoder
from inflight.scheduling import Batch, Sampled


class ModelRunner:
    """Implements `Runner`: permanent rows, one forward pass a step, one vectorised sampling pass."""

    def __init__(
        self, decoder: Decoder, num_blocks: int, block_size: int, max_rows: int, max_len: int
    ) -> None:
        self.decoder = decoder
        self.block_size = block_size
        self.caches = decoder.attention.allocate(decoder.kv_shape(block_size), num_blocks, decoder.device)
        self.rows = Rows(max_rows, max_len, block_size, decoder.device)
        self.sampling = SamplingRows(max_rows, decoder.spec.vocab_size, decoder.device)
        self.sampler = Sampler(self.sampling)
        self.scored = ScoredRows()
        self._num_threads = torch.get_num_threads()

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Ticket:
        with torch_threads(1):
            self.rows.apply(batch)
            for row, request in batch.admissions:
                self.sampling.set(row, request)
            self.scored.admit(batch.admissions)
            inputs = build_inputs(batch, self.rows, self.block_size)
        ticket = Ticket(len(batch), inputs.sampling_entries, None, {})
        if self.scored.any_in(batch):
            hidden = self._forward(inputs, None)
            ticket.prompt_logprobs = self.scored.score(batch, self.decoder, hidden, self.rows.tokens)
            hidden = hidden[inputs.sampling_tokens]
        else:
            all_wanted = len(inputs.sampling_entries) == len(inputs.token_ids)
            hidden = self._forward(inputs, None if all_wanted else inputs.sampling_tokens)
        if inputs.sampling_entries:
            ticket.sampled = self._sample(batch, inputs, hidden).fetch()
        return ticket

    def _forward(self, inputs: StepInputs, wanted: Tensor | None) -> Tensor:
        return self.decoder.forward(inputs.token_ids, self.caches, inputs.attention, wanted)

    def _sample(self, batch: Batch, inputs: StepInputs, hidden: Tensor) -> SampledTensors:
        """One token for every entry that has caught up, written into its row for the next step to read.

        hidden [S, hidden_size].
        """
        logits = self.decoder.logits(hidden)
        rows = [batch.rows[entry] for entry in inputs.sampling_entries]
        with torch_threads(self._num_threads if logits.numel() >= WORTH_SHARING else 1):
            sampled = self.sampler.sample(logits, rows, inputs.sampling_lengths, self.rows.tokens)
            self.rows.append(inputs.sampling_rows, inputs.sampling_lengths, sampled.token_ids)
        return sampled

    def collect(self, ticket: Ticket) -> Sampled:
        return ticket.read()

    def close(self) -> None:
        self.caches.clear()
