"""Runs batches on a real model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.execution.inputs import StepInputs, build_inputs
from inflight.execution.rows import Rows
from inflight.execution.sampling import LogprobTensors, SampledTensors, Sampler, SamplingRows, prompt_logprobs
from inflight.execution.torch_threads import WORTH_SHARING, torch_threads
from inflight.models.decoder import Decoder
from inflight.scheduling import Batch, Sampled

# Prompt positions whose logits are held at once when their logprobs are asked for.
PROMPT_LOGITS_AT_ONCE = 64


@dataclass(slots=True)
class Ticket:
    """A launched step, still on the device."""

    num_entries: int
    sampling_entries: list[int]
    sampled: SampledTensors | None  # None when no entry samples
    prompt_logprobs: dict[int, list[LogprobTensors]]  # by entry, in order of position


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
        self._num_threads = torch.get_num_threads()

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Ticket:
        with torch_threads(1):
            self.rows.apply(batch)
            for row, request in batch.admissions:
                self.sampling.set(row, request)
            inputs = build_inputs(batch, self.rows, self.block_size)
        hidden = self.decoder.forward(inputs.token_ids, self.caches, inputs.attention)
        ticket = Ticket(len(batch), inputs.sampling_entries, None, self._prompt_logprobs(batch, hidden))
        if inputs.sampling_entries:
            ticket.sampled = self._sample(batch, inputs, hidden).fetch()
        return ticket

    def _sample(self, batch: Batch, inputs: StepInputs, hidden: Tensor) -> SampledTensors:
        """One token for every entry that has caught up, written into its row for the next step to read."""
        if len(inputs.sampling_entries) < len(hidden):
            with torch_threads(1):
                hidden = hidden[inputs.sampling_tokens]
        logits = self.decoder.logits(hidden)
        rows = [batch.rows[entry] for entry in inputs.sampling_entries]
        with torch_threads(self._num_threads if logits.numel() >= WORTH_SHARING else 1):
            sampled = self.sampler.sample(logits, rows, inputs.sampling_lengths, self.rows.tokens)
            self.rows.append(inputs.sampling_rows, inputs.sampling_lengths, sampled.token_ids)
        return sampled

    def _prompt_logprobs(self, batch: Batch, hidden: Tensor) -> dict[int, list[LogprobTensors]]:
        """For entries that ask: the logprob of every prompt token that this chunk predicts."""
        found: dict[int, list[LogprobTensors]] = {}
        first = 0
        for entry, (request, row, start, count) in enumerate(
            zip(batch.requests, batch.rows, batch.starts, batch.counts, strict=True)
        ):
            wanted = request.params.prompt_logprobs
            num_targets = min(start + count, request.num_prompt_tokens - 1) - start
            if wanted is not None and num_targets > 0:
                targets = self.rows.tokens[row, start + 1 : start + 1 + num_targets].long()
                parts = range(0, num_targets, PROMPT_LOGITS_AT_ONCE)
                found[entry] = [
                    prompt_logprobs(
                        self.decoder.logits(
                            hidden[first + at : first + min(at + PROMPT_LOGITS_AT_ONCE, num_targets)]
                        ),
                        targets[at : at + PROMPT_LOGITS_AT_ONCE],
                        wanted,
                    ).fetch()
                    for at in parts
                ]
            first += count
        return found

    def collect(self, ticket: Ticket) -> Sampled:
        result = Sampled([-1] * ticket.num_entries)
        if ticket.sampled is not None:
            sample = ticket.sampled.to_host()
            for index, entry in enumerate(ticket.sampling_entries):
                result.token_ids[entry] = sample.token_ids[index]
                if sample.bad[index]:
                    result.errors[entry] = "the model's logits are not finite, or no token is allowed"
            result.logprobs = {
                ticket.sampling_entries[index]: found for index, found in sample.logprobs.items()
            }
        for entry, parts in ticket.prompt_logprobs.items():
            result.prompt_logprobs[entry] = [position for part in parts for position in part.to_host()]
        return result

    def close(self) -> None:
        self.caches.clear()
